"""Layouts on disk that must load alike, and damaged ones that must be refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.info import ModelInfo
from engine.models.loader import load_model
from kernels.reference import ReferenceOps
from protocol.errors import CheckpointError

Tensors = dict[str, Tensor]
Logits = Callable[[Path], Tensor]


def load(path: Path, mtp: bool | None = None) -> tuple[Any, ModelInfo]:
    return load_model(path, ReferenceOps(), torch.float32, mtp)


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Any], tmp_path: Path) -> Path:
    """A private copy of an MoE checkpoint with an MTP module, to be spoilt."""
    return Path(shutil.copytree(make_checkpoint("moe", num_nextn_predict_layers=1).path, tmp_path / "model"))


@pytest.fixture
def logits(one_request: Any, prompt: list[int]) -> Logits:
    def run(path: Path) -> Tensor:
        model, _ = load(path)
        found: Tensor = model.logits(one_request(model).chunk(prompt[:6]))
        return found

    return run


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in change(load_file(file)).items()}, file, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    """``...`` removes a field."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", "language_model.backbone.", "language_model.model."])
def test_every_prefix_loads_alike(checkpoint: Path, logits: Logits, prefix: str) -> None:
    before = logits(checkpoint)
    outer = "language_model." if prefix.startswith("language_model.") else ""

    def rename(name: str) -> str:
        return prefix + name.removeprefix("backbone.") if name.startswith("backbone.") else outer + name

    rewrite(checkpoint, lambda tensors: {rename(name): value for name, value in tensors.items()})
    assert torch.equal(logits(checkpoint), before)


def test_one_tensor_for_all_experts_loads_alike(make_checkpoint: Callable[..., Any], logits: Logits, tmp_path: Path) -> None:
    """As transformers saves when it does not go back to the original names."""
    checkpoint = make_checkpoint("moe")
    checkpoint.oracle.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mixer.experts.up_proj" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), logits(checkpoint.path))


def test_shards_load_alike(make_checkpoint: Callable[..., Any], logits: Logits, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("moe")
    checkpoint.oracle.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path), logits(checkpoint.path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float_dtype_become_the_engines(checkpoint: Path, dtype: torch.dtype) -> None:
    rewrite(checkpoint, lambda tensors: {name: value.to(dtype) for name, value in tensors.items()})
    model, info = load(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")["backbone.embeddings.weight"]
    assert stored.dtype is dtype
    assert torch.equal(model.embeddings, stored.to(torch.float32))
    assert info.dtype == "float32"


def test_a_tied_head_needs_no_tensor(make_checkpoint: Callable[..., Any], logits: Logits, tmp_path: Path) -> None:
    path = Path(shutil.copytree(make_checkpoint("dense", tie_word_embeddings=True).path, tmp_path / "tied"))
    before = logits(path)
    rewrite(path, lambda tensors: {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    assert torch.equal(logits(path), before)


# --- what the checkpoint says about itself ---------------------------------------------------------------------------


def test_info(checkpoint: Path) -> None:
    _, info = load(checkpoint)
    assert (info.model_type, info.vocab_size, info.max_model_len, info.has_mtp) == ("nemotron_h", 128, 64, True)
    assert len(info.config_digest) == len(info.weights_digest) == 32
    assert load(checkpoint)[1] == info


def test_one_changed_bit_changes_the_weights_digest(checkpoint: Path) -> None:
    _, before = load(checkpoint)

    def flip(tensors: Tensors) -> Tensors:
        value = tensors["backbone.norm_f.weight"]
        value.view(torch.int32)[3] ^= 1
        return tensors

    rewrite(checkpoint, flip)
    _, after = load(checkpoint)
    assert after.weights_digest != before.weights_digest
    assert after.config_digest == before.config_digest


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 2, (7,)), ([11, 2, 11], 5, (2, 11)), (None, 5, (5,)), (..., [9, 4], (4, 9)), (..., None, ())],
)
def test_eos_token_ids(checkpoint: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    edit_json(checkpoint / "generation_config.json", eos_token_id=generation)
    edit_json(checkpoint / "config.json", eos_token_id=config)
    assert load(checkpoint)[1].eos_token_ids == expected


def test_eos_without_a_generation_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    assert load(checkpoint)[1].eos_token_ids == (2,)


@pytest.mark.parametrize("wrong", [128, -1, "2", [2, True]])
def test_eos_outside_the_vocabulary_is_refused(checkpoint: Path, wrong: Any) -> None:
    edit_json(checkpoint / "generation_config.json", eos_token_id=wrong)
    with pytest.raises(CheckpointError, match=r"eos_token_id=.*vocab_size=128"):
        load(checkpoint)


# --- MTP or not ------------------------------------------------------------------------------------------------------


def without_mtp(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if not name.startswith("mtp.")}


def test_mtp_asked_for_but_not_declared(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"MTP was asked for.*num_nextn_predict_layers=0"):
        load(checkpoint, mtp=True)
    with pytest.raises(CheckpointError, match=r"'mtp.layers.0.*not part of this model"):
        load(checkpoint)
    assert load(checkpoint, mtp=False)[1].has_mtp is False


def test_mtp_declared_but_not_stored(checkpoint: Path) -> None:
    """As transformers leaves a checkpoint that it saved again."""
    rewrite(checkpoint, without_mtp)
    with pytest.raises(CheckpointError, match=r"MTP was asked for.*no 'mtp.' tensor"):
        load(checkpoint, mtp=True)
    assert load(checkpoint)[1].has_mtp is False


def test_half_an_mtp_module_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: {name: value for name, value in tensors.items() if name != "mtp.layers.0.hnorm.weight"})
    with pytest.raises(CheckpointError, match=r"'mtp.layers.0.hnorm.weight' is missing; expected shape \[32\]"):
        load(checkpoint)


# --- damage ----------------------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def put(name: str, value: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


DAMAGE: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (drop("backbone.layers.0.mixer.A_log"), r"'layers.0.mixer.A_log' is missing; expected shape \[8\]"),
    (drop("backbone.layers.1.mixer.experts.3.up_proj.weight"), r"experts.3.up_proj.weight' is missing; expected shape \[24, 32\]"),
    (drop("lm_head.weight"), r"'lm_head.weight' is missing; expected shape \[128, 32\]"),
    (put("backbone.norm_f.weight", torch.ones(31)), r"'backbone.norm_f.weight' has shape \[31\]; expected \[32\]"),
    (put("backbone.layers.1.mixer.experts.4.up_proj.weight", torch.ones(24, 32)), r"experts.4.up_proj.weight' of shape .* is not part"),
    (put("backbone.layers.0.mixer.in_proj.weight_scale", torch.ones(1)), "in_proj.weight_scale.*not part of this model"),
    (put("model.norm_f.weight", torch.ones(32)), "is there twice, also as 'backbone.norm_f.weight'"),
    (put("backbone.norm_f.weight", torch.ones(32, dtype=torch.int8)), "'backbone.norm_f.weight' is I8; allowed: F64, F32, BF16, F16"),
    (put("backbone.norm_f.weight", torch.full((32,), torch.nan)), "'backbone.norm_f.weight' holds NaN or infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), DAMAGE, ids=[told for _, told in DAMAGE])
def test_wrong_tensors_are_named(checkpoint: Path, change: Callable[[Tensors], Tensors], told: str) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=told):
        load(checkpoint)


def test_a_tied_head_that_differs_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but 'lm_head.weight' differs"):
        load(checkpoint)
    rewrite(checkpoint, put("lm_head.weight", torch.ones(3, 32)))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' of shape \[3, 32\]"):
        load(checkpoint)


def test_many_differences_are_counted(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", layers_block_type=["linear_attention"] * 9)
    with pytest.raises(CheckpointError, match=r"; and \d+ more$"):
        load(checkpoint)


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        load(checkpoint)


def test_a_file_of_something_else_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        load(checkpoint)


def test_missing_files_are_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: No such file"):
        load(checkpoint)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "told"), [("{", "not JSON"), ("[1]", "not a JSON object"), ("\udcff", "not JSON")])
def test_json_that_is_none(checkpoint: Path, file: str, text: str, told: str) -> None:
    (checkpoint / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=f"{file}: {told}"):
        load(checkpoint)


@pytest.fixture
def sharded(make_checkpoint: Callable[..., Any], tmp_path: Path) -> Path:
    make_checkpoint("dense").oracle.save_pretrained(tmp_path, max_shard_size="40KB")
    return tmp_path


def edit_index(path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: no such file"):
        load(sharded)


NORM = "backbone.norm_f.weight"
INDEX_DAMAGE: list[tuple[Callable[[dict[str, str]], dict[str, str]], str]] = [
    (lambda index: index | {"backbone.more": index[NORM]}, "'backbone.more' should be in .* but it is in no file"),
    (lambda index: {name: file for name, file in index.items() if name != NORM}, f"'{NORM}' of .* is not listed"),
    (lambda index: index | {NORM: min(set(index.values()) - {index[NORM]})}, f"'{NORM}' should be in .* but it is in "),
    (lambda index: index | {NORM: "../outside.safetensors"}, "not a plain file name"),
    (lambda index: {}, "no weight_map"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), INDEX_DAMAGE, ids=[told for _, told in INDEX_DAMAGE])
def test_an_index_that_lies_is_refused(sharded: Path, change: Callable[[dict[str, str]], dict[str, str]], told: str) -> None:
    edit_index(sharded, change)
    with pytest.raises(CheckpointError, match=told):
        load(sharded)
