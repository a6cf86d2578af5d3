"""The contract of every op: what goes in, what comes out, what is written where.

Each op exists as a readable definition (``kernels.reference``) and as fast paths (``kernels.cpu_ops``) that are
compared with it. An implementation is chosen once, at start (``kernels.select``); nothing falls back silently.

Shape letters
    T tokens of the step, flat over all rows      R rows            W window width, K+1
    S slots of the pool                           B blocks of the pool
    C conv channels = I + 2·G·N                   k conv taps
    H Mamba heads, P head width (I = H·P), G groups, N state width
    A query heads, V key/value heads, D attention head width
    d hidden width                                E experts, F experts chosen per token

No op guesses the kind of a row from lengths: prefill rows (START, EXTEND) and window rows (VERIFY) arrive as
different types, and everything that is persisted is named by an explicit slot or block index. Index -1 never
appears in an index that is written: writes that nobody wants go to the sink slot or the sink block (index 0).

Row invariance. A fast path must give each token bits that do not depend on which other rows share the step, nor on
how many window positions follow it. Chunking may change rounding only where an implementation's
``chunk_invariant`` is False.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

SINK = 0
"""Index of the sink slot and of the sink block: written freely, never read for a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRows:
    """START and EXTEND rows, ragged. Token range of row r is [cu_tokens[r], cu_tokens[r+1])."""

    cu_tokens: Tensor
    """int32 [R+1], starts at 0, strictly increasing."""
    has_state: Tensor
    """bool [R]. False (START): begin from zero whatever ``slot_in`` contains, NaN included."""
    slot_in: Tensor
    """int32 [R]: slot that holds h(first position). Read only where has_state."""
    slot_out: Tensor
    """int32 [R]: slot that receives h after the row's last token; may equal ``slot_in``."""

    @property
    def num_rows(self) -> int:
        return int(self.slot_in.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """VERIFY (and SINK) rows: exactly W positions each, row r owns tokens [r·W, (r+1)·W) of the window part."""

    width: int
    slot_in: Tensor
    """int32 [R]: committed slot, only read."""
    slots_out: Tensor
    """int32 [R, W]: slot that receives h after each position. Never contains ``slot_in`` of any row, except SINK."""

    @property
    def num_rows(self) -> int:
        return int(self.slot_in.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """Where queries find their keys. Ragged over all rows of the step, whatever their kind."""

    cu_tokens: Tensor
    """int32 [R+1] over all T tokens."""
    block_table: Tensor
    """int32 [R, ≥ceil(max keys / block_tokens)], padded with SINK."""
    num_keys: Tensor
    """int32 [T]: the query at token t sees key positions [first_key, num_keys[t]). May give an empty range: output 0."""
    first_key: int = 0
    """0 for the model's layers, 1 for MTP (its index 0 stays empty and is never attended to)."""


class PackedWeight(Protocol):
    """A weight [out, in] in whatever form the implementation likes best."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...


class Ops(Protocol):
    """All ops. Tensors are contiguous unless a line says 'strided'; floats are of one dtype (fp32; fp64 in reference)."""

    name: str
    """For logs and /health, for instance 'native-avx2' or 'torch-onednn'."""
    chunk_invariant: bool
    """True when splitting a prompt into other chunks gives bit-equal results."""

    def pack_linear(self, weight: Tensor) -> PackedWeight:
        """Pack ``weight`` [out, in] once at load. The original is not kept alive unless the packing needs it."""
        ...

    def linear(self, x: Tensor, weight: PackedWeight, *, relu2: bool = False) -> Tensor:
        """x [T, in] -> [T, out] = x · weightᵀ; with ``relu2``, max(·, 0)² is applied to the result."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, d] -> x / sqrt(mean(x²) + eps) · weight."""
        ...

    def gated_group_rms_norm(self, y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        """y, gate [T, I] -> y·silu(gate), rms-normed over each of ``groups`` equal channel groups, · weight [I].

        ``gate`` is strided: its rows may be a slice of wider ones.
        """
        ...

    def conv_prefill(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: PrefillRows) -> Tensor:
        """Causal depthwise conv, then silu, with the carried window of raw inputs.

        x [T, C] strided rows; weight [C, k], last tap is the current token; bias [C]; windows [S, k-1, C] strided over S,
        oldest column first. Returns [T, C]. Writes the window after the last token of each row to ``slot_out``.
        """
        ...

    def conv_window(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: WindowRows) -> Tensor:
        """The same over windows: x [R·W, C]; the window after each position goes to ``slots_out``."""
        ...

    def mamba2_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: PrefillRows,
        chunk: int,
    ) -> Tensor:
        """Mamba-2 over ragged rows with initial state; h after the last token of each row goes to ``slot_out``.

        x [T, H, P], dt [T, H] raw (before bias and softplus), b, c [T, G, N], all with strided rows; a [H] = -exp(A_log),
        d [H], dt_bias [H]; states [S, H, P, N] strided over S; ``chunk`` is a hint for chunked algorithms.
        dt' = clamp(softplus(dt + dt_bias), dt_limit); S = exp(dt'·a)·S + (dt'·x) bᵀ; y = S c + d·x. Returns [T, H, P].
        Source: Dao & Gu 2024 (Mamba-2/SSD), arXiv 2405.21060.
        """
        ...

    def mamba2_update(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        states: Tensor,
        rows: WindowRows,
    ) -> Tensor:
        """The same recurrence position by position over windows; h after each position goes to ``slots_out``.

        One kernel for every W, so that a one-token decode and a verify window round alike, bit for bit.
        """
        ...

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, kv_index: Tensor) -> None:
        """key, value [T, V, D] strided rows -> cache [B, 2, V, block_tokens, D] strided over B.

        kv_index int64 [T] = block·block_tokens + offset. Several tokens may name the sink block; then any may win.
        """
        ...

    def paged_attention(self, query: Tensor, cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        """query [T, A, D], cache as in write_kv -> [T, A, D]; head a reads key/value head a·V//A. Softmax in the op's dtype."""
        ...

    def route(self, x: Tensor, gate: Tensor, correction_bias: Tensor, top_k: int, normalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
        """Sigmoid router: x [T, d], gate [E, d] -> (ids int64 [T, F], weights [T, F]).

        Scores σ(x·gateᵀ); the bias [E] decides the choice only; weights are the chosen scores, divided by (their sum + 1e-20)
        when ``normalise``, times ``scaling``.
        """
        ...

    def pack_experts(self, up: Tensor, down: Tensor) -> Any:
        """up [E, m, d_in], down [E, d_in, m] -> the packed experts that ``experts`` takes."""
        ...

    def experts(self, x: Tensor, packed: Any, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, d_in] -> Σ_f weights[:, f] · down_e(relu²(up_e(x))), e = ids[:, f]. Summed in the order of f."""
        ...
