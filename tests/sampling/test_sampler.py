"""Each parameter's effect, its neutral value and its edges."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sampling import NO_TOKEN, Sampler, greedy_tokens
from protocol.errors import LogitsError
from protocol.sampling import SamplingParams

EOS = (2,)
GOLDEN_TOKENS = [14, 9, 11, 10, 11, 13, 14, 11, 15, 14, 15, 13]


def sampler(vocab_size: int, prompt: tuple[int, ...] = (0,), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, EOS, vocab_size)


def one_token(row: list[float], output: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,), position: int = 9, **params: Any) -> int:
    result = sampler(len(row), prompt, **params).accept_window(torch.tensor([row]), [], position, output)
    assert len(result.tokens) == 1
    return result.tokens[0]


def drawn(row: list[float], temperature: float = 1.0, **params: Any) -> set[int]:
    return {one_token(row, position=position, temperature=temperature, **params) for position in range(64)}


class TestGreedy:
    def test_takes_the_likeliest(self) -> None:
        assert one_token([0.0, 3.0, 1.0]) == 1

    def test_ties_go_to_the_lowest_id(self) -> None:
        assert one_token([0.0, 3.0, 1.0, 3.0]) == 1

    @pytest.mark.parametrize("width", [5, 64, 4096, 100_003])
    def test_batched_ties_go_to_the_lowest_id(self, width: int) -> None:
        logits = torch.zeros(3, width)
        logits[1, width // 2 :] = 1.0
        logits[2, [width // 3, width - 1]] = 2.0
        assert greedy_tokens(logits).tolist() == [0, width // 2, width // 3]

    def test_seed_and_position_do_not_matter(self) -> None:
        row = [0.1, 0.2, 0.15]
        assert {one_token(row, position=p, seed=s) for p in range(5) for s in range(5)} == {1}

    def test_plain_greedy_is_false_when_anything_but_the_argmax_is_asked_for(self) -> None:
        neutral: dict[str, Any] = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "top_k": 3, "min_p": 0.1, "seed": 7, "min_tokens": 0}
        assert sampler(8, **neutral).plain_greedy(0)
        cases: list[dict[str, Any]] = [
            {"temperature": 0.1},
            {"logprobs": 0},
            {"logit_bias": {1: 1.0}},
            {"repetition_penalty": 1.1},
            {"presence_penalty": 0.1},
            {"frequency_penalty": 0.1},
        ]
        for params in cases:
            assert not sampler(8, **params).plain_greedy(0), params

    def test_plain_greedy_waits_for_min_tokens(self) -> None:
        assert [sampler(8, min_tokens=2).plain_greedy(n) for n in range(4)] == [False, False, True, True]
        assert sampler(8, min_tokens=2, ignore_eos=True).plain_greedy(0)  # nothing to mask


class TestTemperature:
    def test_a_tiny_one_is_greedy(self) -> None:
        assert drawn([0.0, 3.0, 1.0], temperature=5e-324) == {1}

    def test_a_high_one_reaches_unlikely_tokens(self) -> None:
        assert drawn([0.0, 2.0, 1.0], temperature=2.0) == {0, 1, 2}

    def test_masked_logits_are_never_drawn(self) -> None:
        assert drawn([0.0, -math.inf, 0.0], temperature=2.0) == {0, 2}


class TestFilters:
    def test_top_k_1_is_greedy_at_any_temperature_ties_included(self) -> None:
        assert drawn([0.0, 3.0, 3.0], top_k=1, temperature=2.0) == {1}

    def test_top_k_beyond_the_vocabulary_is_no_filter(self) -> None:
        row = [0.0, 0.1, 0.2]
        assert [one_token(row, position=p, temperature=1.0, top_k=99) for p in range(30)] == [
            one_token(row, position=p, temperature=1.0) for p in range(30)
        ]

    def test_a_filter_never_changes_a_draw_that_it_allows(self) -> None:
        row = [0.0, 1.0, 0.5, 0.8]
        for position in range(100):
            free = one_token(row, position=position, temperature=1.0)
            if free in (1, 3):
                assert one_token(row, position=position, temperature=1.0, top_k=2) == free

    def test_tiny_top_p_is_greedy(self) -> None:
        assert drawn([0.0, 3.0, 1.0], top_p=1e-12, temperature=2.0) == {1}

    def test_min_p_1_keeps_only_the_likeliest(self) -> None:
        assert drawn([0.0, 3.0, 3.0], min_p=1.0, temperature=2.0) == {1, 2}

    def test_filters_come_after_the_temperature(self) -> None:
        row = [math.log(0.6), math.log(0.4)]
        assert drawn(row, top_p=0.58, temperature=1.0) == {0}
        assert drawn(row, top_p=0.58, temperature=2.0) == {0, 1}  # 0.6 flattens to 0.5505


class TestPenalties:
    def test_repetition_counts_prompt_and_output_and_shrinks_towards_zero_or_below(self) -> None:
        assert one_token([2.0, 1.5, 0.0], prompt=(0,), repetition_penalty=2.0) == 1
        assert one_token([2.0, 1.5, 0.0], prompt=(2,), output=(0,), repetition_penalty=2.0) == 1
        assert one_token([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1

    def test_repetition_below_one_rewards(self) -> None:
        assert one_token([2.0, 1.5, 0.0], prompt=(1,), repetition_penalty=0.5) == 1

    def test_repetition_counts_a_token_once(self) -> None:
        assert one_token([3.0, 1.0, 0.0], prompt=(0, 0, 0), output=(0, 0), repetition_penalty=2.0) == 0

    def test_presence_and_frequency_look_at_the_output_only(self) -> None:
        cases: list[dict[str, Any]] = [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
        for params in cases:
            assert one_token([2.0, 1.5, 0.0], prompt=(0, 0), **params) == 0
            assert one_token([2.0, 1.5, 0.0], output=(0,), **params) == 1

    def test_presence_counts_once_and_frequency_counts_each(self) -> None:
        row = [2.0, 0.0]
        assert one_token(row, output=(0, 0, 0), presence_penalty=1.0) == 0
        assert one_token(row, output=(0, 0, 0), frequency_penalty=1.0) == 1

    def test_negative_penalties_reward(self) -> None:
        assert one_token([1.0, 0.0], output=(1,), presence_penalty=-2.0) == 1

    def test_order_repetition_before_presence(self) -> None:
        # 4/2 - 1 = 1 beats 0.9; the other order, (4-1)/2 = 1.5, would beat 1.2 as well
        assert one_token([4.0, 1.2], output=(0,), repetition_penalty=2.0, presence_penalty=1.0) == 1
        assert one_token([4.0, 0.9], output=(0,), repetition_penalty=2.0, presence_penalty=1.0) == 0

    def test_accepted_drafts_of_a_window_are_counted_in_order(self) -> None:
        window = torch.tensor([[2.0, 1.0, 0.0]] * 3)
        result = sampler(3, presence_penalty=1.5).accept_window(window, [0, 1], 5, [])
        assert result.tokens == [0, 1, 0]  # 2 | 0.5, 1 | 0.5, -0.5, 0
        assert sampler(3, frequency_penalty=1.5).accept_window(window, [0, 1], 5, [1, 1]).tokens == [0, 0]  # 0.5, -2, 0: draft 1 is wrong


class TestBias:
    def test_plus_100_forces_and_minus_100_bans(self) -> None:
        assert drawn([0.0, 8.0, 0.0], logit_bias={0: 100.0}, temperature=2.0) == {0}
        assert drawn([0.0, 8.0, 0.0], logit_bias={1: -100.0}, temperature=2.0) == {0, 2}

    def test_is_added_after_the_repetition_penalty(self) -> None:
        assert one_token([1.0, 1.2], prompt=(0,), repetition_penalty=2.0, logit_bias={0: 0.8}) == 0  # 1/2 + 0.8 = 1.3

    def test_does_not_touch_the_given_logits(self) -> None:
        logits = torch.zeros(1, 4, dtype=torch.float64)
        sampler(4, logit_bias={0: 5.0}, temperature=1.0, presence_penalty=1.0, min_tokens=3).accept_window(logits, [], 1, [1])
        assert not logits.any()

    @pytest.mark.parametrize(
        ("token", "message"),
        [(4, r": token 4 is outside the vocabulary 0\.\.3"), (-1, r"\S*\n +Input should be greater than or equal to 0")],
    )
    @pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
    def test_ids_outside_the_vocabulary_are_refused_by_name(self, field: str, token: int, message: str) -> None:
        """Negative ones by the parameters themselves, too large ones by whoever knows the vocabulary."""
        value: Any = {token: 1.0} if field == "logit_bias" else (token,)
        with pytest.raises(ValueError, match=field + message):
            sampler(4, **{field: value})


class TestMinTokens:
    ROW = (0.0, 1.0, 9.0, 8.0)

    def test_masks_eos_and_stop_ids_until_enough_tokens_are_out(self) -> None:
        params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (3,)}
        assert [one_token(list(self.ROW), output=(0,) * n, **params) for n in range(4)] == [1, 1, 2, 2]

    def test_an_ignored_eos_is_not_masked(self) -> None:
        assert one_token(list(self.ROW), min_tokens=2, ignore_eos=True) == 2
        assert one_token(list(self.ROW), min_tokens=2, ignore_eos=True, stop_token_ids=(2,)) == 3

    def test_beats_a_bias(self) -> None:
        assert one_token(list(self.ROW), min_tokens=1, logit_bias={2: 100.0}) == 3

    def test_ends_inside_a_window(self) -> None:
        result = sampler(4, min_tokens=2).accept_window(torch.tensor([self.ROW] * 4), [3, 3, 2], 5, [])
        assert result.tokens == [3, 3, 2, 2]

    def test_masking_everything_is_an_error(self) -> None:
        with pytest.raises(LogitsError, match="every token is masked at position 9"):
            one_token([0.0, 1.0, 2.0], min_tokens=1, stop_token_ids=(0, 1, 2))


class TestLogprobs:
    ROW = (1.0, 3.0, 2.0, 3.0, -1.0)

    def entry(self, **params: Any) -> Any:
        result = sampler(5, **params).accept_window(torch.tensor([self.ROW]), [], 9, [1])
        assert result.logprobs is not None
        return result.logprobs[0]

    def test_absent_when_not_asked_for(self) -> None:
        assert sampler(5).accept_window(torch.tensor([self.ROW]), [], 9, []).logprobs is None

    def test_chosen_and_the_likeliest_first_with_ties_by_id(self) -> None:
        expected = torch.log_softmax(torch.tensor(self.ROW), 0).tolist()
        entry = self.entry(logprobs=3)
        assert (entry.token_id, entry.logprob) == (1, expected[1])
        assert entry.top == ((1, expected[1]), (3, expected[3]), (2, expected[2]))

    def test_zero_gives_the_chosen_only(self) -> None:
        assert self.entry(logprobs=0).top == ()

    def test_more_than_the_vocabulary_gives_all(self) -> None:
        assert [token for token, _ in self.entry(logprobs=20).top] == [1, 3, 2, 0, 4]

    def test_are_of_the_raw_logits(self) -> None:
        expected = torch.log_softmax(torch.tensor(self.ROW), 0).tolist()
        entry = self.entry(logprobs=1, temperature=0.01, presence_penalty=2.0, logit_bias={4: 100.0})
        assert (entry.token_id, entry.logprob, entry.top) == (4, expected[4], ((1, expected[1]),))

    def test_one_entry_per_token_of_a_window(self) -> None:
        window = torch.eye(4) * 3
        result = sampler(4, logprobs=1).accept_window(window, [0, 1, 0], 9, [])
        assert result.tokens == [0, 1, 2]
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == [0, 1, 2]


class TestBadLogits:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize(
        "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"logprobs": 1}, {"logit_bias": {1: -5.0}}]
    )
    def test_are_an_error_and_never_a_token(self, bad: float, params: dict[str, Any]) -> None:
        with pytest.raises(LogitsError, match="position 9"):
            one_token([0.0, bad, 1.0], **params)

    def test_nothing_finite_is_an_error(self) -> None:
        with pytest.raises(LogitsError):
            one_token([-math.inf] * 3)

    def test_a_bad_row_behind_a_wrong_draft_is_never_looked_at(self) -> None:
        window = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
        assert sampler(2).accept_window(window, [0], 9, []).tokens == [1]
        with pytest.raises(LogitsError, match="position 10"):
            sampler(2).accept_window(window, [1], 9, [])

    def test_the_batched_argmax_marks_bad_rows_and_only_them(self) -> None:
        logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0], [0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [-math.inf, 2.0]])
        assert greedy_tokens(logits).tolist() == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN, 1]

    def test_the_greedy_door_names_the_position(self) -> None:
        with pytest.raises(LogitsError, match="position 6"):
            sampler(4).accept_greedy([1, NO_TOKEN], [1], 5)

    def test_drafts_too(self) -> None:
        with pytest.raises(LogitsError, match="position 3"):
            sampler(2).draft_token(torch.tensor([math.nan, 0.0]), 3, [])


class TestSeeds:
    LOGITS: Tensor = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))

    def tokens(self, seed: int) -> list[int]:
        chooser = sampler(500, temperature=1.0, seed=seed)
        return [chooser.accept_window(self.LOGITS, [], position, []).tokens[0] for position in range(20)]

    def test_the_same_seed_gives_the_same_tokens(self) -> None:
        assert self.tokens(5) == self.tokens(5)

    def test_other_seeds_and_positions_give_other_tokens(self) -> None:
        assert self.tokens(5) != self.tokens(6)
        assert len(set(self.tokens(5))) > 10

    def test_golden_tokens(self) -> None:
        row = torch.arange(16, dtype=torch.float32).unsqueeze(0) / 4
        chooser = sampler(16, temperature=0.7, top_p=0.9, seed=42)
        assert [chooser.accept_window(row, [], position, []).tokens[0] for position in range(12)] == GOLDEN_TOKENS
