"""The offline engine: a completion is what it would be alone, whatever shares its batch, its steps or its stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine as engine_package
from engine import Completion, Engine, Piece, SamplingParams
from protocol.errors import CheckpointError, EngineStopped, RequestFailed
from tests.engine.engine_kit import assert_whole, prompt, write_checkpoint
from tests.offline.conftest import END, MakeEngine, tiny_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
PROMPTS = [prompt(length, seed=length) for length in (1, 2, 3, 4, 5, 8, 13, 30)]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=1, temperature=1.5),
    SamplingParams(max_tokens=14, temperature=1.0, top_p=0.9, top_k=20, seed=4, logprobs=2),
    SamplingParams(max_tokens=10, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=12, min_tokens=6, temperature=2.0, seed=9, logit_bias={END: 4.0}),
    SamplingParams(max_tokens=20, temperature=0.7, min_p=0.05, seed=2**40, stop_token_ids=(5, 9)),
]


def told(completion: Completion) -> tuple[Any, ...]:
    """What must not depend on anything but prompt and parameters."""
    return completion.prompt_token_ids, completion.token_ids, completion.text, completion.finish_reason, completion.stop_token_id


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [told(c) for c in ours] == [told(c) for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        for mine, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[Completion]:
    with Engine(checkpoint, block_tokens=4, kv_blocks=100, kernels="torch") as engine:
        return [engine.generate(ids, params)[0] for ids, params in zip(PROMPTS, PARAMS, strict=True)]


class TestOneAnswer:
    """Independent of the batch, its order, the chunks, the drafts."""

    def test_the_cases_are_not_trivial(self, alone: list[Completion]) -> None:
        assert {completion.finish_reason for completion in alone} == {"stop", "length"}
        assert any(completion.text for completion in alone)

    def test_in_one_batch(self, engine: Engine, alone: list[Completion]) -> None:
        assert_same(engine.generate(PROMPTS, PARAMS), alone)

    def test_in_any_order(self, engine: Engine, alone: list[Completion]) -> None:
        for seed in range(3):
            order = list(range(len(PROMPTS)))
            random.Random(seed).shuffle(order)
            assert_same(engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order]), [alone[i] for i in order])

    @pytest.mark.parametrize("speculation", [1, 5])
    def test_with_speculation(self, make_engine: MakeEngine, alone: list[Completion], speculation: int) -> None:
        speculating = make_engine(speculation=speculation)
        together = speculating.generate(PROMPTS, PARAMS)
        assert_same(together, alone)
        assert_same([speculating.generate(ids, params)[0] for ids, params in zip(PROMPTS, PARAMS, strict=True)], alone)
        assert sum(completion.accepted_drafts for completion in together) > 0

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_running": 2},
            {"step_tokens": 6, "max_prefill_chunk": 3, "speculation": 2},
            {"tail_padding": "never", "speculation": 4},
            {"mtp": False},
        ],
        ids=str,
    )
    def test_with_other_settings(self, make_engine: MakeEngine, alone: list[Completion], settings: dict[str, Any]) -> None:
        assert_same(make_engine(**settings).generate(PROMPTS, PARAMS), alone)

    def test_with_preemption(self, make_engine: MakeEngine, alone: list[Completion]) -> None:
        small = make_engine(kv_blocks=16, speculation=3)
        assert_same(small.generate(PROMPTS, PARAMS), alone)
        assert small.core.counters()["baton_preemptions_total"] > 0

    def test_with_the_reference_kernels(self, make_engine: MakeEngine, alone: list[Completion]) -> None:
        assert_same(make_engine(kernels="reference").generate(PROMPTS, PARAMS), alone)


class TestCompletion:
    def test_counts_and_reasons(self, engine: Engine) -> None:
        (completion,) = engine.generate(PROMPTS[5], SamplingParams(max_tokens=7, ignore_eos=True))
        assert completion.prompt_token_ids == PROMPTS[5]
        assert len(completion.token_ids) == 7
        assert (completion.finish_reason, completion.stop_token_id, completion.logprobs) == ("length", None, None)
        assert (completion.proposed_drafts, completion.accepted_drafts) == (0, 0)

    def test_a_stop_token_is_a_token_without_text(self, engine: Engine) -> None:
        (free,) = engine.generate(PROMPTS[5], SamplingParams(max_tokens=8, ignore_eos=True))
        stop = free.token_ids[4]
        at = free.token_ids.index(stop)
        (stopped,) = engine.generate(PROMPTS[5], SamplingParams(max_tokens=8, stop_token_ids=(stop,), ignore_eos=True))
        assert stopped.token_ids == free.token_ids[: at + 1]
        assert (stopped.finish_reason, stopped.stop_token_id) == ("stop", stop)
        (before,) = engine.generate(PROMPTS[5], SamplingParams(max_tokens=max(at, 1), ignore_eos=True))
        assert stopped.text == (before.text if at else "")

    def test_eos_stops(self, engine: Engine) -> None:
        (completion,) = engine.generate([7, 8], SamplingParams(max_tokens=8, logit_bias={END: 100.0}, min_tokens=3))
        assert (completion.token_ids[-1], len(completion.token_ids)) == (END, 4)
        assert (completion.finish_reason, completion.stop_token_id) == ("stop", END)

    def test_max_tokens_1(self, engine: Engine) -> None:
        assert [len(c.token_ids) for c in engine.generate([[5], [5, 6]], SamplingParams(max_tokens=1))] == [1, 1]

    def test_logprobs_one_per_token(self, engine: Engine) -> None:
        (completion,) = engine.generate([5, 6], SamplingParams(max_tokens=5, logprobs=3, ignore_eos=True))
        assert completion.logprobs is not None
        assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids
        assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in completion.logprobs)  # greedy

    def test_drafts_save_steps(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        (plain,), (drafted,) = (make_engine(speculation=k).generate(PROMPTS[0], params) for k in (0, 5))
        assert drafted.token_ids == plain.token_ids
        assert drafted.steps + drafted.accepted_drafts >= plain.steps > drafted.steps


class TestInput:
    def test_text_is_tokenised(self, engine: Engine) -> None:
        ids = tiny_tokenizer().encode("ABBA").ids
        assert engine.generate("ABBA") == engine.generate(ids)

    def test_forms(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=3)
        mixed: list[str | list[int]] = [[5, 6], "AB"]
        one = engine.generate([5, 6], params)
        assert engine.generate((5, 6), params) == one
        assert engine.generate(np.array([5, 6]), params) == one  # type: ignore[arg-type]
        assert engine.generate([[5, 6]], params) == one
        assert engine.generate(mixed, [params, params])[:1] == one

    def test_nothing_gives_nothing(self, engine: Engine) -> None:
        assert engine.generate([]) == []
        assert list(engine.stream([])) == []

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([[5], []], r"prompts\[1\]: .*no token"),
            ([[5], [5, 40]], r"prompts\[1\]: .*vocabulary 0\.\.39"),
            ([[5], [-1]], r"prompts\[1\]: .*vocabulary"),
            ([[5], [0.5]], r"prompts\[1\]: neither text nor a list of token ids"),
            ([[5], [5] * 128], r"prompts\[1\]: 128 prompt \+ 16 output tokens exceed max_model_len=128"),
            ("", r"prompts\[0\]: .*no token"),
        ],
    )
    def test_bad_prompts_are_named_and_leave_nothing(self, engine: Engine, prompts: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts)
        assert_whole(engine.core)
        assert not engine.core.has_work()

    def test_bad_params_are_named(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="params: 2 given for 3 prompts"):
            engine.generate([[5]] * 3, [SamplingParams()] * 2)
        with pytest.raises(ValueError, match=r"prompts\[1\]: logit_bias: token 40"):
            engine.generate([[5]] * 2, [SamplingParams(), SamplingParams(logit_bias={40: 1.0})])
        assert not engine.core.has_work()

    def test_a_stream_refuses_at_once(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match=r"prompts\[0\]"):
            engine.stream([[40]])


class TestLoading:
    def test_without_a_tokenizer_ids_work_and_text_is_refused(self, tmp_path: Path, make_engine: MakeEngine) -> None:
        bare = make_engine(write_checkpoint(tmp_path / "bare"))
        assert bare.generate([5, 6])[0].text == ""
        with pytest.raises(ValueError, match=r"prompts\[0\]: text needs a tokenizer\.json"):
            bare.generate("A")

    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere"):
            Engine(tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("settings", "key"), [({"speculation": 8}, "speculation"), ({"kernels": "cuda"}, "kernels"), ({"max_running": 0}, "max_running")]
    )
    def test_impossible_settings_are_named(self, checkpoint: Path, settings: dict[str, Any], key: str) -> None:
        with pytest.raises(ValueError, match=key):
            Engine(checkpoint, **settings)

    def test_speculation_needs_mtp(self, checkpoint: Path) -> None:
        with pytest.raises(ValueError, match=r"speculation.*MTP|MTP.*speculation"):
            Engine(checkpoint, speculation=2, mtp=False)

    def test_unknown_settings_are_named(self, checkpoint: Path) -> None:
        with pytest.raises(TypeError, match="speculatoin"):
            Engine(checkpoint, speculatoin=2)

    def test_exports_are_what_all_says(self) -> None:
        assert all(hasattr(engine_package, name) for name in engine_package.__all__)


class TestStream:
    @pytest.mark.parametrize("speculation", [0, 5])
    def test_pieces_add_up_to_the_completions(self, make_engine: MakeEngine, speculation: int) -> None:
        engine = make_engine(speculation=speculation)
        whole = engine.generate(PROMPTS, PARAMS)
        pieces = list(engine.stream(PROMPTS, PARAMS))
        for index, completion in enumerate(whole):
            own = [piece for piece in pieces if piece.index == index]
            assert sum((piece.token_ids for piece in own), ()) == completion.token_ids
            assert "".join(piece.text for piece in own) == completion.text
            assert sum((piece.logprobs or () for piece in own), ()) == (completion.logprobs or ())
            assert [piece.completion for piece in own] == [None] * (len(own) - 1) + [completion]

    def test_pieces_come_while_others_still_run(self, engine: Engine) -> None:
        pieces = list(engine.stream([[5], [6, 7]], SamplingParams(max_tokens=4, ignore_eos=True)))
        before_the_first_end = pieces[: next(i for i, piece in enumerate(pieces) if piece.completion is not None)]
        assert {piece.index for piece in before_the_first_end} == {0, 1}

    def test_text_is_that_of_decoding_all_at_once_but_for_an_unfinished_end(self, engine: Engine) -> None:
        bias = dict.fromkeys(tiny_tokenizer().encode("😀").ids, 4.0)
        for seed in range(10):
            params = SamplingParams(max_tokens=30, temperature=2.0, seed=seed, logit_bias=bias, ignore_eos=True)
            (completion,) = engine.generate([30], params)
            everything = tiny_tokenizer().decode([30, *completion.token_ids])[1:]
            assert everything.startswith(completion.text)
            assert everything[len(completion.text) :] in ("", BROKEN, BROKEN * 2, BROKEN * 3)

    def test_leaving_early_gives_all_back(self, engine: Engine) -> None:
        for _ in engine.stream(PROMPTS, SamplingParams(max_tokens=50)):
            break
        assert_whole(engine.core)
        assert not engine.core.has_work()

    def test_an_unread_stream_that_is_dropped_gives_all_back(self, engine: Engine) -> None:
        engine.stream(PROMPTS)
        assert not engine.core.has_work()

    def test_close_ends_a_stream(self, engine: Engine) -> None:
        stream = engine.stream(PROMPTS, SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
        assert_whole(engine.core)

    def test_streams_may_be_read_in_turns(self, engine: Engine) -> None:
        params = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
        expected = [engine.generate([5, 6], p)[0] for p in params]
        streams = [engine.stream([5, 6], p) for p in params]
        last: dict[int, Piece] = {}
        while any(piece.completion is None for piece in last.values()) or not last:
            for number, stream in enumerate(streams):
                piece = next(stream, None)
                if piece is not None:
                    last[number] = piece
        assert_same([last[n].completion or pytest.fail("no completion") for n in range(3)], expected)


class TestEndings:
    @pytest.fixture
    def poisoned(self, make_engine: MakeEngine) -> Engine:
        """Whoever reads token 39 gets NaN. (No checkpoint with NaN would load.)"""
        engine = make_engine()
        model: Any = engine.core.loaded.model
        model.embeddings[39] = torch.nan
        return engine

    def test_a_failed_request_is_an_error_that_names_it(self, poisoned: Engine) -> None:
        with pytest.raises(RequestFailed, match=r"prompts\[1\]: LogitsError: .*position 3"):
            poisoned.generate([[5, 6, 7], [5, 6, 39], [5, 6, 8]], SamplingParams(max_tokens=30, logit_bias={39: -100.0}, ignore_eos=True))
        assert_whole(poisoned.core)
        assert not poisoned.core.has_work()

    def test_the_engine_goes_on_after_it_with_clean_pages(self, poisoned: Engine) -> None:
        params = SamplingParams(max_tokens=9, logit_bias={39: -100.0}, ignore_eos=True)
        before = poisoned.generate([5, 6, 7], params)
        with pytest.raises(RequestFailed):
            poisoned.generate([[39] * 20], params)
        assert poisoned.generate([5, 6, 7], params) == before

    def test_a_closed_engine_says_so(self, checkpoint: Path) -> None:
        with Engine(checkpoint, kv_blocks=50) as engine:
            stream = engine.stream([5, 6], SamplingParams(max_tokens=9))
            next(stream)
        engine.close()
        with pytest.raises(EngineStopped, match="closed"):
            engine.generate([5])
        with pytest.raises(EngineStopped, match="closed"):
            list(stream)


class TestProgress:
    def test_a_function_is_told_of_each_completion(self, engine: Engine) -> None:
        calls: list[tuple[int, int]] = []
        engine.generate([[5], [6], [7]], SamplingParams(max_tokens=2), progress=lambda done, total: calls.append((done, total)))
        assert calls == [(1, 3), (2, 3), (3, 3)]

    def test_a_bar_leaves_standard_output_alone(self, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(engine.generate([[5], [6]], progress=True)) == 2
        assert capsys.readouterr().out == ""
