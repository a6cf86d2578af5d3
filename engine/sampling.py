"""From logits to tokens. A token is a function of (logits, parameters, seed, position) and of the tokens before it.

Order of the steps, each skipped when its parameter is neutral:
    repetition penalty (prompt and output) -> presence and frequency penalty (output) -> logit bias
    -> min_tokens masks the tokens that would end the sequence
    -> greedy: argmax
    -> sampled: / temperature -> top-k -> top-p -> min-p -> + Gumbel noise of (seed, position) -> argmax
Equal scores: the lowest token id wins, everywhere. Scores are float64, whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.filters import allowed_tokens, best
from engine.finish import ending_tokens
from engine.noise import PositionNoise, gumbel
from engine.speculation import accept
from protocol.errors import LogitsError
from protocol.messages import TokenLogprob
from protocol.sampling import SamplingParams

Floats = NDArray[np.float64]
NO_TOKEN = -1
"""What ``greedy_tokens`` says of logits that give no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    tokens: list[int]
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token, None when they were not asked for."""


def greedy_tokens(logits: Tensor) -> Tensor:
    """logits [M, V] -> int64 [M]: the likeliest token of each row (lowest id of equals), NO_TOKEN for NaN or infinite rows."""
    peaks, tokens = logits.max(dim=-1)  # NaN propagates; the first of equal maxima is returned
    return tokens.masked_fill(~peaks.isfinite(), NO_TOKEN)


class Sampler:
    """Chooses the tokens of one sequence. Pure but for its caches; not for use by two threads at once.

    ``output`` arguments are the sequence's output tokens before the position asked for.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: Collection[int], vocab_size: int) -> None:
        """Raises ValueError that names the field when a token id of ``params`` is outside the vocabulary."""
        for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{field}: token {token} is outside the vocabulary 0..{vocab_size - 1}")
        self.params = params
        self._vocab_size = vocab_size
        self._noise = PositionNoise(params.seed)
        self._ending = _id_array(ending_tokens(params, eos_token_ids))
        self._bias_ids = _id_array(params.logit_bias)
        self._bias = np.array([params.logit_bias[token] for token in self._bias_ids.tolist()], dtype=np.float64)
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._prompt_ids = _id_array(set(prompt_token_ids) if self._repeats else ())

    def plain_greedy(self, num_output: int) -> bool:
        """True when, after ``num_output`` output tokens, the token is just the argmax: ``accept_greedy`` then serves."""
        return self.params.temperature == 0.0 and self.params.logprobs is None and not self._changes_scores(num_output)

    def accept_greedy(self, greedy: Sequence[int], drafts: Sequence[int], first_position: int) -> WindowResult:
        """``accept_window`` where ``plain_greedy`` holds, from the window's row of ``greedy_tokens`` [len(drafts)+1]."""
        assert len(greedy) == len(drafts) + 1, f"{len(greedy)} tokens for {len(drafts)} drafts"

        def choose(before: Sequence[int]) -> int:
            token = greedy[len(before)]
            if token == NO_TOKEN:
                raise _no_finite_peak(first_position + len(before))
            return token

        return WindowResult(tokens=accept(choose, drafts), logprobs=None)

    def accept_window(self, logits: Tensor, drafts: Sequence[int], first_position: int, output: Sequence[int]) -> WindowResult:
        """Tokens at positions first_position .. first_position+n-1, 1 <= n <= real.

        logits [real, V]: row j predicts position first_position+j, true if drafts[:j] are the tokens before it; drafts are
        real-1 tokens. Raises LogitsError when a needed row gives no token.
        """
        assert logits.shape == (len(drafts) + 1, self._vocab_size), f"{tuple(logits.shape)} for {len(drafts)} drafts"
        rows = _to_numpy(logits)

        def choose(before: Sequence[int]) -> int:
            return self._token(rows[len(before)], first_position + len(before), [*output, *before])

        tokens = accept(choose, drafts)
        return WindowResult(tokens=tokens, logprobs=self._logprobs(logits, tokens))

    def draft_token(self, logits: Tensor, position: int, output: Sequence[int]) -> int:
        """A guess for ``position`` from the drafter's logits [V], with the target's own noise, filters and penalties.

        ``output`` includes the drafts made so far for positions before this one. Raises LogitsError.
        """
        return self._token(_to_numpy(logits), position, output)

    def _token(self, row: Floats, position: int, output: Sequence[int]) -> int:
        with np.errstate(invalid="ignore"):
            peak = row.max()
        if not np.isfinite(peak):
            raise _no_finite_peak(position)
        if self._changes_scores(len(output)):
            row = self._change_scores(row, output)
            peak = row.max()
            if not np.isfinite(peak):
                raise LogitsError(f"every token is masked at position {position}")
        if self.params.temperature == 0.0:
            return int(row.argmax())
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, which is right
            return self._sample((row - peak) / self.params.temperature, position)

    def _sample(self, scores: Floats, position: int) -> int:
        params = self.params
        uniforms = self._noise.uniforms(position, self._vocab_size)
        if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
            scores += gumbel(uniforms)
            return int(scores.argmax())
        ids = allowed_tokens(scores, params.top_k, params.top_p, params.min_p)
        return int(ids[(scores[ids] + gumbel(uniforms[ids])).argmax()])

    def _changes_scores(self, num_output: int) -> bool:
        masks = num_output < self.params.min_tokens and self._ending.size > 0
        return self._repeats or self._counts or self._bias_ids.size > 0 or masks

    def _change_scores(self, row: Floats, output: Sequence[int]) -> Floats:
        scores = row.copy()
        if self._repeats or self._counts:
            self._penalise(scores, output)
        scores[self._bias_ids] += self._bias
        if len(output) < self.params.min_tokens:
            scores[self._ending] = -np.inf
        return scores

    def _penalise(self, scores: Floats, output: Sequence[int]) -> None:
        output_ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        if self._repeats:
            seen = np.union1d(self._prompt_ids, output_ids)
            penalty = self.params.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        scores[output_ids] -= self.params.frequency_penalty * counts + self.params.presence_penalty

    def _logprobs(self, logits: Tensor, tokens: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        if self.params.logprobs is None:
            return None
        rows = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
        return tuple(token_logprob(row, token, self.params.logprobs) for row, token in zip(_to_numpy(rows), tokens, strict=True))


def token_logprob(logprobs: Floats, token: int, num_top: int) -> TokenLogprob:
    """The entry for a chosen ``token`` with the ``num_top`` likeliest of logprobs [V], best first, lowest id of equals first."""
    ids = best(logprobs, num_top) if num_top else _id_array(())
    ids = ids[np.argsort(-logprobs[ids], kind="stable")]
    top = tuple((int(i), float(logprobs[i])) for i in ids)
    return TokenLogprob(token_id=token, logprob=float(logprobs[token]), top=top)


def _to_numpy(values: Tensor) -> Floats:
    return values.detach().to("cpu", torch.float64).numpy()


def _id_array(ids: Collection[int]) -> NDArray[np.int64]:
    return np.array(sorted(ids), dtype=np.int64)


def _no_finite_peak(position: int) -> LogitsError:
    return LogitsError(f"the logits for position {position} hold NaN, +inf or no finite value: no token can be chosen")
