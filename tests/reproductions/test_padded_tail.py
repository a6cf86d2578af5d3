"""Report B: how a padded tail is classified, and what it costs to classify it wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.active import ActiveRequest
from engine.batch import PLACEHOLDER, StepTensors
from engine.config import EngineConfig
from engine.core import EngineCore, LoadedModel
from engine.models.dims import ModelDims
from engine.models.pool_views import PoolViews
from engine.planned import Planned, plan_tail
from engine.policies import OURS, Policies
from engine.runner import Model
from kernels.contract import AttentionRows
from tests.engine.engine_kit import Drive, prompt, request, write_checkpoint
from tests.reproductions.bounded import NUM_REQUESTS, answers_alone, answers_met, first_others
from tests.reproductions.padded_tail import STALE, ZEROS

K = 5
WIDTH = K + 1


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


class Watched:
    """The model, and the metadata of each step that it was given."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.batches: list[StepTensors] = []

    @property
    def dims(self) -> ModelDims:
        return self._model.dims

    def forward(self, batch: StepTensors, pools: PoolViews) -> Tensor:
        self.batches.append(batch)
        return self._model.forward(batch, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def mtp_write_kv(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, pools: PoolViews) -> None:
        self._model.mtp_write_kv(token_ids, hidden, kv_index, pools)

    def mtp_forward(self, token_ids: Tensor, hidden: Tensor, kv_index: Tensor, attention: AttentionRows, pools: PoolViews) -> Tensor:
        return self._model.mtp_forward(token_ids, hidden, kv_index, attention, pools)


def steps_of(checkpoint: Path, tokens: Sequence[int], policies: Policies = OURS) -> list[StepTensors]:
    """The steps that a prompt takes beside a request that speculates: its chunks of at most K+1 tokens, its tail."""
    config = EngineConfig(model=checkpoint, speculation=K, block_tokens=WIDTH, max_prefill_chunk=WIDTH, kernels="torch", kv_blocks=50)
    core = EngineCore(config, policies=policies)
    watched = Watched(core.loaded.model)
    core = EngineCore(config, LoadedModel(watched, core.loaded.info), policies)
    drive = Drive(core)
    steady, newcomer = request("steady", prompt(2), max_tokens=90), request("newcomer", tokens, max_tokens=20)
    core.submit(steady)
    while not drive.told or not drive.told[steady.key].tokens:
        drive.step()
    watched.batches.clear()
    core.submit(newcomer)
    while newcomer.key not in drive.told or not drive.told[newcomer.key].tokens:
        drive.step()
    return watched.batches


def test_a_padded_tail_with_state_is_verified(checkpoint: Path) -> None:
    *_, last = steps_of(checkpoint, prompt(8))
    assert last.prefill is None
    assert last.window is not None
    assert (last.window.width, len(last.window.slot_in)) == (WIDTH, 2)
    assert last.token_ids.view(2, WIDTH)[1].tolist() == [prompt(8)[-1], *[PLACEHOLDER] * K]
    assert last.window.slot_in[1] not in last.window.slots_out, "what was committed is read and not written"


def test_six_prompt_tokens_are_prefill_although_a_window_has_six(checkpoint: Path) -> None:
    first, second, tail = steps_of(checkpoint, prompt(2 * WIDTH + 1))
    for batch, has_state in ((first, False), (second, True)):
        assert batch.prefill is not None
        assert batch.prefill.cu_tokens.tolist() == [0, WIDTH]
        assert batch.prefill.has_state.tolist() == [has_state]
        assert batch.window is not None
        assert len(batch.window.slot_in) == 1, "the steady one"
    assert tail.prefill is None


def test_a_first_chunk_has_no_state_even_when_it_is_one_token(checkpoint: Path) -> None:
    for tokens in (prompt(1, seed=1), prompt(2, seed=1)):  # other tokens than the steady one has cached
        first, *_ = steps_of(checkpoint, tokens)
        assert first.prefill is not None
        assert first.prefill.cu_tokens.tolist() == [0, 1]
        assert first.prefill.has_state.tolist() == [False]


def test_the_fault_has_the_same_shape_and_the_row_among_the_prefills(checkpoint: Path) -> None:
    *_, ours = steps_of(checkpoint, prompt(8))
    *_, fault = steps_of(checkpoint, prompt(8), ZEROS)
    assert len(fault.token_ids) == len(ours.token_ids) == 2 * WIDTH
    assert fault.prefill is not None
    assert fault.prefill.cu_tokens.tolist() == [0, WIDTH]
    assert fault.token_ids[:WIDTH].tolist() == [prompt(8)[-1], *[PLACEHOLDER] * K]


def test_eight_requests_that_meet_steady_speculation(checkpoint: Path) -> None:
    """With ours each says what it says alone; with the fault most don't, and nothing is raised."""
    tails: list[bool] = []

    def watched(active: ActiveRequest, *, padded: bool) -> Planned:
        tails.append(padded)
        return plan_tail(active, padded=padded)

    prompts = [prompt(7 + 3 * i, seed=i) for i in range(NUM_REQUESTS)]
    alone = answers_alone(checkpoint, prompts, 8, kernels="torch")
    assert answers_met(checkpoint, prompt(9), prompts, Policies(plan_tail=watched), 8, kernels="torch") == alone
    assert tails.count(True) >= NUM_REQUESTS, "every tail met the steady one"
    for fault in (STALE, ZEROS):
        others = first_others(alone, answers_met(checkpoint, prompt(9), prompts, fault, 8, kernels="torch"))
        assert sum(index is not None for index in others) >= NUM_REQUESTS // 2
        assert 0 not in others, "the first token comes from token N itself, and is right"
