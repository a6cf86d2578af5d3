"""What only the native ops promise: no chunk, no thread and no instruction set shows in a single bit, and a clear refusal."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import samples
from kernels.contract import SINK, AttentionRows, PrefillRows, WindowRows
from kernels.cpu_ops import native_library, native_ops
from kernels.cpu_ops.native_check import check
from kernels.cpu_ops.native_library import load_library
from kernels.cpu_ops.native_ops import NativeOps, NativeUnavailable
from kernels.samples import MambaShape

SOURCES = Path(native_library.__file__).parent / "native"
SHAPE = MambaShape(heads=6, head_dim=20, groups=2, state=24)
NO_LIMIT = (0.0, float("inf"))
BLOCK_TOKENS = 16

try:
    LIBRARY = load_library()
except NativeUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


def one_row(first: int, length: int, slot: int) -> PrefillRows:
    return PrefillRows(
        cu_tokens=torch.tensor([0, length], dtype=torch.int32),
        has_state=torch.tensor([first > 0]),
        slot_in=torch.tensor([slot], dtype=torch.int32),
        slot_out=torch.tensor([slot], dtype=torch.int32),
    )


class Layers:
    """A linear, a conv, a recurrence and an attention over one prompt, each fed from random inputs."""

    def __init__(self, ops: NativeOps, num_tokens: int) -> None:
        torch.manual_seed(num_tokens)
        self.ops, self.length = ops, num_tokens
        self.hidden, self.weight = torch.randn(num_tokens, 200), ops.pack_linear(torch.randn(300, 200))
        self.raw, self.inputs = torch.randn(num_tokens, SHAPE.channels), samples.scan_inputs(num_tokens, SHAPE)
        self.taps, self.bias = torch.randn(SHAPE.channels, SHAPE.taps), torch.randn(SHAPE.channels)
        self.windows, self.states = samples.state_pool(12, SHAPE)
        self.windows.fill_(torch.nan)
        self.states.fill_(torch.nan)
        self.rows = samples.attention_rows([(0, num_tokens)], BLOCK_TOKENS)
        self.index = samples.kv_index(self.rows, BLOCK_TOKENS)
        self.cache = torch.full((self.rows.block_table.shape[1] + 1, 2, 2, BLOCK_TOKENS, 32), torch.nan)
        self.query, self.key, self.value = (torch.randn(num_tokens, heads, 32) for heads in (6, 2, 2))

    def prefill(self, start: int, end: int, slot: int = 1) -> list[Tensor]:
        rows = one_row(start, end - start, slot)
        conv = self.ops.conv_prefill(self.raw[start:end], self.taps, self.bias, self.windows, rows)
        scan = self.ops.mamba2_scan(*self.inputs.tokens(start, end).arguments, NO_LIMIT, self.states, rows, 64)
        return [conv, scan, *self._stateless(start, end)]

    def window(self, start: int, end: int, slot_in: int, first_out: int) -> list[Tensor]:
        slots_out = torch.arange(first_out, first_out + end - start, dtype=torch.int32)[None]
        rows = WindowRows(width=end - start, slot_in=torch.tensor([slot_in], dtype=torch.int32), slots_out=slots_out)
        conv = self.ops.conv_window(self.raw[start:end], self.taps, self.bias, self.windows, rows)
        scan = self.ops.mamba2_update(*self.inputs.tokens(start, end).arguments, NO_LIMIT, self.states, rows)
        return [conv, scan, *self._stateless(start, end)]

    def state(self, slot: int) -> list[Tensor]:
        return [self.windows[slot].clone(), self.states[slot].clone()]

    def _stateless(self, start: int, end: int) -> list[Tensor]:
        self.ops.write_kv(self.key[start:end], self.value[start:end], self.cache, self.index[start:end])
        rows = AttentionRows(
            cu_tokens=torch.tensor([0, end - start], dtype=torch.int32),
            block_table=self.rows.block_table,
            num_keys=self.rows.num_keys[start:end],
        )
        return [
            self.ops.paged_attention(self.query[start:end], self.cache, rows, 0.2),
            self.ops.linear(self.hidden[start:end], self.weight, relu2=True),
        ]


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(left, right, strict=True)] == [True] * len(left)


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(LIBRARY, 2)


# ---- no bit shows how the work was cut ----


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 150), cuts=st.sets(st.integers(1, 149), max_size=6))
def test_chunks_leave_no_trace(length: int, cuts: set[int]) -> None:
    layers = Layers(NativeOps(LIBRARY, 2), length)
    whole, state = layers.prefill(0, length), layers.state(1)
    bounds = [0, *sorted(cut for cut in cuts if cut < length), length]
    parts = [layers.prefill(start, end, slot=2) for start, end in pairwise(bounds)]
    assert_equal(joined(parts), whole)
    assert_equal(layers.state(2), state)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("first", [1, 15, 60])
def test_a_window_equals_the_prompt_of_the_same_tokens(ops: NativeOps, first: int, width: int) -> None:
    layers = Layers(ops, first + width)
    layers.prefill(0, first)
    out = layers.window(first, first + width, 1, 3)
    for n in range(1, width + 1):
        layers.prefill(0, first, slot=2)
        expected = layers.prefill(first, first + n, slot=2)
        assert_equal([tensor[:n] for tensor in out], expected)
        assert_equal(layers.state(2 + n), layers.state(2))


def test_a_window_may_drop_states_midway(ops: NativeOps) -> None:
    layers = Layers(ops, 20)
    layers.prefill(0, 17)
    out, state = layers.window(17, 20, 1, 2), layers.state(4)
    layers.windows[SINK], layers.states[SINK] = 1.0, 1.0
    slots_out = torch.tensor([[SINK, SINK, 8]], dtype=torch.int32)
    rows = WindowRows(width=3, slot_in=torch.tensor([1], dtype=torch.int32), slots_out=slots_out)
    scan = ops.mamba2_update(*layers.inputs.tokens(17, 20).arguments, NO_LIMIT, layers.states, rows)
    conv = ops.conv_window(layers.raw[17:], layers.taps, layers.bias, layers.windows, rows)
    assert_equal([conv, scan], out[:2])
    assert_equal(layers.state(8), state)
    assert_equal(layers.state(SINK), [torch.ones_like(tensor) for tensor in state])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_leave_no_trace(threads: int) -> None:
    alone, shared = Layers(NativeOps(LIBRARY, 1), 130), Layers(NativeOps(LIBRARY, threads), 130)
    assert_equal(shared.prefill(0, 125), alone.prefill(0, 125))
    assert_equal(shared.window(125, 130, 1, 3), alone.window(125, 130, 1, 3))
    for slot in (1, 3, 7):
        assert_equal(shared.state(slot), alone.state(slot))
    assert_equal(moe(shared.ops), moe(alone.ops))
    assert_equal(norms(shared.ops), norms(alone.ops))


def moe(ops: NativeOps) -> list[Tensor]:
    torch.manual_seed(1)
    x, gate, bias = torch.randn(90, 96), torch.randn(12, 96), torch.randn(12)
    packed = ops.pack_experts(torch.randn(12, 72, 96), torch.randn(12, 96, 72))
    ids, weights = ops.route(x, gate, bias, 3, True, 1.5)
    return [ids, weights, ops.experts(x, packed, ids, weights)]


def norms(ops: NativeOps) -> list[Tensor]:
    torch.manual_seed(2)
    y, gate, weight = torch.randn(70, 768), torch.randn(70, 800)[:, 16:-16], torch.randn(768)
    return [ops.rms_norm(y, weight, 1e-5), ops.gated_group_rms_norm(y, gate, weight, 4, 1e-5)]


# ---- the functions behind silu, softplus and decay ----


def test_silu_over_its_whole_range(ops: NativeOps) -> None:
    x = torch.cat([torch.linspace(-110, 110, 40_000), torch.logspace(-30, 0, 1000), -torch.logspace(-30, 0, 1000)])[:, None]
    weight, windows = torch.tensor([[0.0, 1.0]]), torch.zeros(2, 1, 1)
    out = ops.conv_prefill(x, weight, None, windows, one_row(0, len(x), 1))
    exact = torch.nn.functional.silu(x.double())
    normal = exact.abs() > 1e-36  # below, floats themselves get coarse
    assert float(((out - exact).abs() / exact.abs())[normal].max()) < 4e-7
    assert float(out[~normal].abs().max()) <= 1.1e-36


def test_softplus_and_decay_over_their_whole_range(ops: NativeOps) -> None:
    """With P = N = 1 and unit x, b, c from an empty state the output is the step size; with x = 0 from state 1, the decay."""
    dt = torch.cat([torch.linspace(-87, 60, 20_000), torch.linspace(-1, 1, 5000)])
    assert relative_error(step_outputs(ops, dt, a=-1.0, x=1.0, state=0.0, limit=NO_LIMIT), torch.nn.functional.softplus(dt.double())) < 4e-7
    for a in (-1e-3, -0.7, -40.0, -87.0):
        decay = step_outputs(ops, dt[:1], a=a, x=0.0, state=1.0, limit=(1.0, 1.0))
        assert relative_error(decay, torch.tensor([a], dtype=torch.float32).double().exp()) < 2e-7


def step_outputs(ops: NativeOps, dt: Tensor, *, a: float, x: float, state: float, limit: tuple[float, float]) -> Tensor:
    """One independent window of one token per dt."""
    count = len(dt)
    states = torch.full((2 * count + 1, 1, 1, 1), state)
    rows = samples.window_rows(count, 1)
    ones, one = torch.ones(count, 1, 1), torch.ones(1)
    return ops.mamba2_update(ones * x, dt[:, None], ones, ones, one * a, one * 0, one * 0, limit, states, rows).flatten()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float(((actual.double() - exact) / exact).abs().max())


def test_nan_is_not_hidden(ops: NativeOps) -> None:
    x = torch.tensor([[0.5, torch.nan, -torch.inf]])
    out = ops.conv_prefill(x, torch.tensor([[0.0, 1.0]] * 3), None, torch.zeros(2, 1, 3), one_row(0, 1, 1))
    assert out.isnan().tolist() == [[False, True, True]]


# ---- threads and processes ----


def test_many_callers_at_once_get_their_own_results() -> None:
    def work(seed: int) -> bool:
        ops, generator = NativeOps(LIBRARY, 2), torch.Generator().manual_seed(seed)
        x, weight = torch.randn(20, 300, generator=generator), torch.randn(250, 300, generator=generator)
        packed, expected = ops.pack_linear(weight), x.double() @ weight.double().T
        return all(float((ops.linear(x, packed) - expected).abs().max()) < 1e-3 for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(work, range(8), timeout=250))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """In a fresh process, as the pool's life is the process's."""
    prelude = """
import os, torch
from kernels.cpu_ops.native_library import load_library
from kernels.cpu_ops.native_ops import NativeOps
ops = NativeOps(load_library(), 2)
packed, x = ops.pack_linear(torch.ones(512, 64)), torch.ones(9, 64)
def right(): return bool(ops.linear(x, packed).eq(64).all())
"""
    root = str(Path(native_library.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", prelude + code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=250
    )


def test_a_forked_child_has_a_pool_of_its_own_and_both_end_while_their_workers_sleep_or_spin() -> None:
    ended = run_python("""
import sys, time
assert right()
child = os.fork()
if child == 0:
    done = all(right() for _ in range(20))
    time.sleep(0.05)  # its workers sleep by then
    sys.exit(0 if done else 3)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert right()  # the workers spin for a while after it
""")
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- refusals, and the other instruction set ----


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")

    def run(sources: list[Path], *flags: str) -> Path:
        out = tmp_path_factory.mktemp("native") / "library.so"
        options = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi", *flags]
        subprocess.run([compiler, *options, *map(str, sources), "-o", str(out), "-lm"], check=True, timeout=250)
        return out

    return run


def test_plain_c_gives_the_same_bits(build: Callable[..., Path]) -> None:
    """The variant for CPUs that have no AVX2 of their own to name: other instructions, the same order of the same roundings."""
    library = load_library(build(sorted(SOURCES.glob("*.c")), "-DBATON_PORTABLE"))
    portable = NativeOps(library, 1)
    assert portable.name == "native-portable"
    assert check(portable) is None
    mine, other = Layers(NativeOps(LIBRARY, 1), 40), Layers(portable, 40)
    assert_equal(other.prefill(0, 36), mine.prefill(0, 36))
    assert_equal(other.window(36, 40, 1, 3), mine.window(36, 40, 1, 3))
    assert_equal(moe(portable), moe(mine.ops))
    assert_equal(norms(portable), norms(mine.ops))


def test_a_cpu_without_the_instructions_is_told_so(build: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "lacking.c"
    version = native_library.ABI_VERSION
    source.write_text(
        f'int baton_abi_version(void) {{ return {version}; }} const char *baton_variant(void) {{ return "avx2"; }}'
        'const char *baton_missing_feature(void) { return "AVX2"; }'
    )
    with pytest.raises(NativeUnavailable, match="no AVX2"):
        load_library(build([source]))


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "ABI_VERSION", -1)
    with pytest.raises(NativeUnavailable, match="build again"):
        native_ops.load()


def test_a_missing_or_broken_library_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "library.so"
    broken.write_text("not a library")
    with pytest.raises(NativeUnavailable, match="do not load"):
        load_library(broken)
    monkeypatch.setattr(native_library, "EXTENSION_SUFFIXES", [])
    with pytest.raises(NativeUnavailable, match="not built"):
        native_ops.load()


def test_wrong_results_are_caught_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeOps.linear
    monkeypatch.setattr(NativeOps, "linear", lambda *args, **options: right(*args, **options) * 1.001)
    with pytest.raises(NativeUnavailable, match="self-check: linear of one row is off by"):
        native_ops.load()


def test_the_check_leaves_the_random_state_alone(ops: NativeOps) -> None:
    before = torch.random.get_rng_state()
    assert check(ops) is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_structures_have_the_sizes_that_c_gives_them() -> None:
    assert ctypes.sizeof(native_library.MambaArguments) == 13 * 8 + 12 * 8 + 2 * 4
    assert ctypes.sizeof(native_library.AttentionArguments) == 6 * 8 + 10 * 8 + 8
