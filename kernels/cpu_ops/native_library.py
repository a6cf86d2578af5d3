"""Finds, checks and declares the C library that setup.py builds from ``native/``."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI_VERSION = 1
"""The library's own number must be the same: raise both (native/abi.c) whenever an exported function changes."""


class NativeUnavailable(ImportError):
    """The native kernels cannot be used here; the message is the reason, fit for /health."""


class MambaArguments(ctypes.Structure):
    """``Mamba`` in native/mamba2.c: arrays, then steps and sizes in floats, then dt_limit."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "dt", "b", "c", "a", "d", "dt_bias", "states", "out")),
        *((name, c_void_p) for name in ("cu_tokens", "slot_in", "slots_out", "has_state")),
        *((name, c_long) for name in ("x_step", "dt_step", "b_step", "c_step", "state_step")),
        *((name, c_long) for name in ("heads", "head_width", "groups", "state_width", "rows", "tokens", "width")),
        *((name, c_float) for name in ("dt_low", "dt_high")),
    )


class AttentionArguments(ctypes.Structure):
    """``Attention`` in native/attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "cache", "out", "cu_tokens", "block_table", "num_keys")),
        *((name, c_long) for name in ("rows", "tokens", "cache_step", "table_step", "heads", "kv_heads")),
        *((name, c_long) for name in ("block_tokens", "width", "first_key", "task_tokens")),
        ("scale", c_float),
    )


_P, _L, _F, _B, _THREADS = c_void_p, c_long, c_float, c_bool, c_int

_ARGUMENTS: dict[str, list[type]] = {
    "baton_pack": [_P, _P, _L, _L, _L, _THREADS],
    "baton_linear": [_P, _L, _P, _L, _L, _B, _P, _THREADS],
    "baton_experts": [_P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _THREADS],
    "baton_rms_norm": [_P, _P, _P, _L, _L, _F, _THREADS],
    "baton_gated_group_rms_norm": [_P, _P, _P, _P, _L, _L, _L, _L, _F, _THREADS],
    "baton_conv_prefill": [_P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _P, _P, _P, _P, _THREADS],
    "baton_conv_window": [_P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _P, _P, _THREADS],
    "baton_mamba2": [ctypes.POINTER(MambaArguments), _THREADS],
    "baton_write_kv": [_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _THREADS],
    "baton_paged_attention": [ctypes.POINTER(AttentionArguments), _THREADS],
    "baton_route": [_P, _P, _P, _P, _P, _L, _L, _L, _L, _B, _F, _THREADS],
}


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """The library at ``path`` (default: the installed one) with all functions declared. Raises NativeUnavailable with the reason."""
    path = path or _find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"native kernels do not load: {error}") from error
    library.baton_missing_feature.restype = ctypes.c_char_p
    library.baton_variant.restype = ctypes.c_char_p
    if library.baton_abi_version() != ABI_VERSION:
        raise NativeUnavailable(f"native kernels are of another version of the sources: build again ({path.name})")
    if missing := library.baton_missing_feature().decode():
        raise NativeUnavailable(f"this CPU has no {missing}, which the native kernels are built for")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def variant(library: ctypes.CDLL) -> str:
    """What the kernels were compiled for: 'avx2' or 'portable'."""
    return str(library.baton_variant().decode())


def _find() -> Path:
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := folder / f"_native{suffix}").exists():
            return path
    raise NativeUnavailable("native kernels are not built (no C compiler at install time?)")
