"""The safetensors files of a checkpoint directory: which tensors there are, their shapes, their values, their digest."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place. ``stored_name`` is its full name in ``file``."""

    file: str
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """Tensors by plain name (no ``backbone.``, ``model.`` or ``language_model.``).

    Opening reads headers only and checks that every file is whole. Raises CheckpointError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files, index = _list_files(directory)
        self._open = {file: _open(directory / file) for file in files}
        self.tensors: dict[str, StoredTensor] = {}
        for file, handle in self._open.items():
            for name in _guard(directory / file, handle.keys):
                self._add(_describe(directory, file, handle, name))
        if index is not None:
            self._check_index(index)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor ``name`` as ``dtype``. Raises CheckpointError when it holds NaN or infinity."""
        stored = self.tensors[name]
        path = self.directory / stored.file
        value: Tensor = _guard(path, lambda: self._open[stored.file].get_tensor(stored.stored_name))
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{path}: tensor {stored.stored_name!r} holds NaN or infinity")
        return value.to(dtype)

    def digest(self) -> str:
        """xxh3-128 of all bytes of all files, in the order of their names."""
        hasher = xxhash.xxh3_128()
        for file in sorted(self._open):
            with (self.directory / file).open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                hasher.update(content)
        return str(hasher.hexdigest())

    def _add(self, tensor: StoredTensor) -> None:
        name = plain_name(tensor.stored_name)
        if name in self.tensors:
            raise CheckpointError(
                f"{self.directory}: tensor {tensor.stored_name!r} is there twice, also as {self.tensors[name].stored_name!r}"
            )
        self.tensors[name] = tensor

    def _check_index(self, index: dict[str, str]) -> None:
        found = {tensor.stored_name: tensor.file for tensor in self.tensors.values()}
        for name, file in sorted(index.items()):
            if found.get(name) != file:
                where = f"it is in {found[name]!r}" if name in found else "it is in no file"
                raise CheckpointError(f"{self.directory / INDEX_FILE}: tensor {name!r} should be in {file!r}, but {where}")
        for name, file in sorted(found.items()):
            if name not in index:
                raise CheckpointError(f"{self.directory / INDEX_FILE}: tensor {name!r} of {file!r} is not listed")


def plain_name(stored_name: str) -> str:
    """'language_model.backbone.layers.0.norm.weight' -> 'layers.0.norm.weight'."""
    name = stored_name.removeprefix("language_model.")
    for prefix in ("backbone.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _list_files(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """File names, and the index's tensor -> file map when the checkpoint is sharded."""
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None
    path = directory / INDEX_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    return sorted(set((index := _read_index(path)).values())), index


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: tensor {name!r} should be in {file!r}, which is not a plain file name")
    return index


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    return _guard(path, lambda: safe_open(path, framework="pt"))


def _describe(directory: Path, file: str, handle: Any, name: str) -> StoredTensor:
    part = _guard(directory / file, lambda: handle.get_slice(name))
    tensor = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{directory / file}: tensor {name!r} is {tensor.dtype}; allowed: {', '.join(_FLOATS)}")
    return tensor


def _guard(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def differences(expected: dict[str, tuple[int, ...]], found: dict[str, StoredTensor]) -> Iterator[str]:
    """One line per tensor that is missing, has another shape, or should not be there."""
    for name, shape in expected.items():
        if name not in found:
            yield f"tensor {name!r} is missing; expected shape {list(shape)}"
        elif found[name].shape != shape:
            yield f"tensor {found[name].stored_name!r} has shape {list(found[name].shape)}; expected {list(shape)}"
    for name, tensor in found.items():
        if name not in expected:
            yield f"tensor {tensor.stored_name!r} of shape {list(tensor.shape)} is not part of this model"
