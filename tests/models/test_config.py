"""config.json in all its spellings; what is not supported is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.models.loader import config_digest
from engine.models.nemotron_h_config import parse_config
from protocol.errors import CheckpointError

NANO = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "c.C"},
    "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
"""The fields of the public 30B-A3B checkpoint."""


def nano(**changes: Any) -> dict[str, Any]:
    """``...`` removes a field."""
    return {key: value for key, value in (NANO | changes).items() if value is not ...}


def test_a_public_config_is_read() -> None:
    config = parse_config(nano())
    kinds = config.layers_block_type
    assert (len(kinds), kinds.count("mamba2"), kinds.count("moe"), kinds.count("attention")) == (52, 23, 23, 6)
    assert (config.mamba_width, config.conv_pieces) == (4096, (4096, 1024, 1024))
    assert config.time_step_limit == (0.0, math.inf)
    assert config.mtp_blocks == ()
    assert config.eos_token_ids == (2,)


def test_both_pattern_notations_mean_the_same() -> None:
    letters = parse_config(nano(hybrid_override_pattern="M-*E", num_hidden_layers=4))
    new = parse_config(
        nano(hybrid_override_pattern=..., layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], num_hidden_layers=...)
    )
    old = parse_config(nano(hybrid_override_pattern=..., layer_types=["mamba", "mlp", "attention", "moe"], num_hidden_layers=None))
    assert letters.layers_block_type == new.layers_block_type == old.layers_block_type == ("mamba2", "mlp", "attention", "moe")
    assert config_digest(letters) == config_digest(new) == config_digest(old)


@pytest.mark.parametrize("spelling", [{"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["attention", "moe"]}, {}])
def test_mtp_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse_config(nano(num_nextn_predict_layers=1, **spelling)).mtp_blocks == ("attention", "moe")
    assert parse_config(nano(num_nextn_predict_layers=0, **spelling)).mtp_blocks == ()


def test_infinity_as_transformers_writes_it() -> None:
    text = json.dumps(nano(time_step_limit=[0.0, {"__float__": "Infinity"}]))
    assert parse_config(json.loads(text)).time_step_limit == (0.0, math.inf)


def test_old_names_of_fields() -> None:
    config = parse_config(nano(n_groups=..., mamba_n_groups=4, conv_kernel=..., mamba_d_conv=3, head_dim=..., attention_head_dim=16))
    assert (config.n_groups, config.conv_kernel, config.head_dim) == (4, 3, 16)


def test_missing_kv_heads_means_one_per_query_head() -> None:
    assert parse_config(nano(num_key_value_heads=None)).kv_heads == 32


def test_the_digest_sees_what_matters() -> None:
    assert config_digest(parse_config(nano(eos_token_id=[2, 11], rope_theta=5))) == config_digest(parse_config(nano()))
    assert config_digest(parse_config(nano(routed_scaling_factor=2.0))) != config_digest(parse_config(nano()))


REFUSED = [
    ({"model_type": "bamba"}, "model_type='bamba'.*'nemotron_h'"),
    ({"model_type": ...}, "model_type is missing"),
    ({"mlp_bias": True}, "mlp_bias=True.*False"),
    ({"use_bias": True}, "use_bias=True"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias=True"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'.*'relu2'"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'.*'silu'"),
    ({"n_group": 8}, "n_group=8.*1"),
    ({"topk_group": 4}, "topk_group=4.*1"),
    ({"n_shared_experts": 2}, "n_shared_experts=2.*1"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*not a field known here"),
    ({"num_hidden_layers": 51}, "num_hidden_layers=51.*52"),
    ({"hybrid_override_pattern": "MX*"}, "'X'.*M, \\*, -, E"),
    ({"hybrid_override_pattern": ..., "layers_block_type": ["mamba", "sliding"]}, "'sliding'"),
    ({"hybrid_override_pattern": ..., "layers_block_type": [1]}, "unknown layer type 1"),
    ({"hybrid_override_pattern": 3}, "layers_block_type=3"),
    ({"hybrid_override_pattern": "", "num_hidden_layers": 0}, "layers_block_type=.*at least one"),
    ({"layers_block_type": ["mamba", "moe"]}, "hybrid_override_pattern.*layers_block_type.*disagree"),
    ({"norm_eps": 1e-6}, "layer_norm_epsilon=1e-05 and norm_eps=1e-06 disagree"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2.*less than or equal to 1"),
    ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "E"}, "mtp_layers_block_type.*exactly one attention"),
    ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*M"}, "mtp_layers_block_type.*exactly one attention"),
    ({"num_experts_per_tok": 129}, "num_experts_per_tok=129.*1..n_routed_experts=128"),
    ({"num_attention_heads": 33}, "num_attention_heads=33.*num_key_value_heads=2"),
    ({"mamba_num_heads": 60}, "mamba_num_heads=60.*n_groups=8"),
    ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
    ({"time_step_limit": 1}, "time_step_limit=1"),
    ({"hidden_size": "2688"}, "hidden_size='2688'"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": True}, "hidden_size=True"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        parse_config(nano(**changes))


def test_moe_fields_do_not_matter_without_moe() -> None:
    config = parse_config(
        nano(hybrid_override_pattern="M-*-", num_hidden_layers=4, n_shared_experts=0, n_routed_experts=None, num_experts_per_tok=0)
    )
    assert "moe" not in config.layers_block_type
