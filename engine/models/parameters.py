"""Every parameter of a Nemotron-H checkpoint: its name and shape, from the configuration alone.

Names are those on disk without the prefix (``backbone.`` or ``model.``, in some files after ``language_model.``):
``embeddings.weight``, ``layers.3.mixer.in_proj.weight``, ``mtp.layers.0.eh_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.models.nemotron_h_config import BlockKind, NemotronHConfig

Shapes = dict[str, tuple[int, ...]]


def model_parameters(config: NemotronHConfig) -> Shapes:
    """The model itself, head included; the head is left out when it is tied to the embeddings."""
    d, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embeddings.weight": (vocab, d)}
    for index, kind in enumerate(config.layers_block_type):
        shapes |= _block(config, kind, f"layers.{index}.")
    shapes["norm_f.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, d)
    return shapes


def mtp_parameters(config: NemotronHConfig) -> Shapes:
    """The MTP module: sub-blocks like the model's, projections on the first one, the final norm on the last one."""
    d = config.hidden_size
    shapes: Shapes = {}
    for index, kind in enumerate(config.mtp_blocks):
        shapes |= _block(config, kind, f"mtp.layers.{index}.")
    if config.mtp_blocks:
        first, last = "mtp.layers.0.", f"mtp.layers.{len(config.mtp_blocks) - 1}."
        shapes |= {first + "enorm.weight": (d,), first + "hnorm.weight": (d,), first + "eh_proj.weight": (d, 2 * d)}
        shapes[last + "final_layernorm.weight"] = (d,)
    return shapes


def expert_names(mixer: str, projection: str, count: int) -> list[str]:
    """One tensor per expert, as real checkpoints have them. ``projection`` is up_proj or down_proj."""
    return [f"{mixer}experts.{expert}.{projection}.weight" for expert in range(count)]


def fused_expert_name(mixer: str, projection: str) -> str:
    """All experts in one tensor [E, out, in], as transformers holds them in memory."""
    return f"{mixer}experts.{projection}"


def _block(config: NemotronHConfig, kind: BlockKind, prefix: str) -> Shapes:
    mixers: dict[BlockKind, Callable[[NemotronHConfig], Shapes]] = {
        "mamba2": _mamba2, "attention": _attention, "mlp": _mlp, "moe": _moe,
    }  # fmt: skip
    mixer = {f"{prefix}mixer.{name}": shape for name, shape in mixers[kind](config).items()}
    return {f"{prefix}norm.weight": (config.hidden_size,)} | mixer


def _mamba2(config: NemotronHConfig) -> Shapes:
    d, width, heads, channels = config.hidden_size, config.mamba_width, config.mamba_num_heads, sum(config.conv_pieces)
    shapes: Shapes = {
        "in_proj.weight": (width + channels + heads, d),
        "conv1d.weight": (channels, 1, config.conv_kernel),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (width,),
        "out_proj.weight": (d, width),
    }
    return shapes | ({"conv1d.bias": (channels,)} if config.use_conv_bias else {})


def _attention(config: NemotronHConfig) -> Shapes:
    d, queries, keys = config.hidden_size, config.num_attention_heads * config.head_dim, config.kv_heads * config.head_dim
    return {"q_proj.weight": (queries, d), "k_proj.weight": (keys, d), "v_proj.weight": (keys, d), "o_proj.weight": (d, queries)}


def _mlp(config: NemotronHConfig) -> Shapes:
    d, width = config.hidden_size, config.intermediate_size
    return {"up_proj.weight": (width, d), "down_proj.weight": (d, width)}


def _moe(config: NemotronHConfig) -> Shapes:
    d, experts = config.hidden_size, config.n_routed_experts or 0
    width, shared = config.moe_intermediate_size or 0, config.moe_shared_expert_intermediate_size or 0
    shapes: Shapes = {"gate.weight": (experts, d), "gate.e_score_correction_bias": (experts,)}
    inner = config.moe_latent_size or d
    shapes |= dict.fromkeys(expert_names("", "up_proj", experts), (width, inner))
    shapes |= dict.fromkeys(expert_names("", "down_proj", experts), (inner, width))
    shapes |= {"shared_experts.up_proj.weight": (shared, d), "shared_experts.down_proj.weight": (d, shared)}
    if config.moe_latent_size is not None:
        shapes |= {"fc1_latent_proj.weight": (inner, d), "fc2_latent_proj.weight": (d, inner)}
    return shapes
