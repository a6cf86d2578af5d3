"""From a checkpoint directory to a model that runs. Names and shapes are all checked before the first value is read."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import torch
import xxhash

from engine.models.info import ModelInfo
from engine.models.nemotron_h import NemotronH
from engine.models.nemotron_h_config import NemotronHConfig, parse_config
from engine.models.parameters import Shapes, expert_names, fused_expert_name, model_parameters, mtp_parameters
from engine.models.weight_files import WeightFiles, differences, read_json
from engine.models.weights import Weights
from kernels.contract import Ops
from protocol.errors import CheckpointError

_SHOWN_DIFFERENCES = 8


def load_model(path: Path, ops: Ops, dtype: torch.dtype, mtp: bool | None) -> tuple[NemotronH, ModelInfo]:
    """Load the checkpoint directory ``path`` with float32 or float64 weights.

    ``mtp``: True needs an MTP module, False leaves it out, None takes it when the configuration declares it and the
    files hold it. Raises CheckpointError that names the file, field or tensor; then nothing stays loaded.
    """
    assert dtype in (torch.float32, torch.float64), f"unsupported dtype {dtype}"
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    config = parse_config(read_json(path / "config.json"))
    eos_token_ids = _eos_token_ids(path, config)
    files = WeightFiles(path)
    with_mtp = _wants_mtp(path, config, files, mtp)
    _check_tensors(path, config, files, with_mtp=with_mtp, ignore_mtp=mtp is False)
    model = NemotronH(config, Weights(files, dtype), ops, with_mtp=with_mtp)
    return model, ModelInfo(
        model_type=config.model_type,
        config_digest=config_digest(config),
        weights_digest=files.digest(),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        has_mtp=with_mtp,
        dtype=str(dtype).removeprefix("torch."),
    )


def config_digest(config: NemotronHConfig) -> str:
    """xxh3-128 (hex) of what the configuration means; how it was spelled and which token ends a text don't count."""
    fields = config.model_dump(exclude={"eos_token_id", "num_hidden_layers"})
    fields["num_key_value_heads"] = config.kv_heads
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def _wants_mtp(path: Path, config: NemotronHConfig, files: WeightFiles, mtp: bool | None) -> bool:
    declared = bool(config.mtp_blocks)
    stored = any(name.startswith("mtp.") for name in files.tensors)
    if mtp is True and not declared:
        raise CheckpointError(f"{path}: MTP was asked for, but config.json has num_nextn_predict_layers=0")
    if mtp is True and not stored:
        raise CheckpointError(f"{path}: MTP was asked for, but the files hold no 'mtp.' tensor")
    return declared and stored and mtp is not False


def _check_tensors(path: Path, config: NemotronHConfig, files: WeightFiles, *, with_mtp: bool, ignore_mtp: bool) -> None:
    found = {name: tensor for name, tensor in files.tensors.items() if not (ignore_mtp and name.startswith("mtp."))}
    expected = model_parameters(config) | (mtp_parameters(config) if with_mtp else {})
    if config.tie_word_embeddings and "lm_head.weight" in found:
        _check_tied_head(path, files)
        del found["lm_head.weight"]
    wrong = differences(_as_stored(expected, set(found), config), found)
    shown = list(islice(wrong, _SHOWN_DIFFERENCES))
    if shown:
        more = sum(1 for _ in wrong)
        raise CheckpointError(f"{path}: " + "; ".join(shown) + (f"; and {more} more" if more else ""))


def _check_tied_head(path: Path, files: WeightFiles) -> None:
    """A stored head beside tied embeddings is a copy, or the checkpoint contradicts itself."""
    head, embeddings = files.tensors["lm_head.weight"], files.tensors.get("embeddings.weight")
    if embeddings is None or head.shape != embeddings.shape:
        raise CheckpointError(
            f"{path}: tie_word_embeddings is true, but 'lm_head.weight' of shape {list(head.shape)} has another shape than the embeddings"
        )
    if not torch.equal(files.read("lm_head.weight", torch.float64), files.read("embeddings.weight", torch.float64)):
        raise CheckpointError(f"{path}: tie_word_embeddings is true, but 'lm_head.weight' differs from the embeddings")


def _as_stored(expected: Shapes, found: set[str], config: NemotronHConfig) -> Shapes:
    """``expected`` with one tensor for all experts of a layer wherever the files have it that way."""
    shapes, count = dict(expected), config.n_routed_experts or 0
    gates = [name for name in expected if name.endswith("mixer.gate.weight")]
    for mixer in (name.removesuffix("gate.weight") for name in gates):
        for projection in ("up_proj", "down_proj"):
            fused = fused_expert_name(mixer, projection)
            if fused in found:
                singles = [shapes.pop(name) for name in expert_names(mixer, projection, count)]
                shapes[fused] = (count, *singles[0])
    return shapes


def _eos_token_ids(path: Path, config: NemotronHConfig) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json's word counts, else config.json's."""
    ids: object = config.eos_token_ids
    source = path / "generation_config.json"
    if source.is_file():
        stated = read_json(source).get("eos_token_id")
        ids = config.eos_token_ids if stated is None else (stated if isinstance(stated, list) else [stated])
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int and 0 <= token < config.vocab_size for token in ids):
        raise CheckpointError(f"{path}: eos_token_id={ids!r}; allowed: token ids below vocab_size={config.vocab_size}")
    return tuple(sorted(set(ids)))
