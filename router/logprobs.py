"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.sequence import PlacedLogprob

Describe = Callable[[int], tuple[str, bytes]]
"""Text and bytes of one token."""
LOWEST = -9999.0
"""JSON has no -inf."""


def completion_logprobs(entries: Sequence[PlacedLogprob], describe: Describe) -> dict[str, Any]:
    """Parallel lists. The chosen token is in ``top_logprobs`` too, so there may be one more than asked for."""
    tops = []
    for entry in entries:
        chosen = entry.logprob
        top = {describe(token_id)[0]: _finite(logprob) for token_id, logprob in chosen.top}
        top.setdefault(describe(chosen.token_id)[0], _finite(chosen.logprob))
        tops.append(top)
    return {
        "text_offset": [entry.text_offset for entry in entries],
        "token_logprobs": [_finite(entry.logprob.logprob) for entry in entries],
        "tokens": [describe(entry.logprob.token_id)[0] for entry in entries],
        "top_logprobs": tops,
    }


def chat_logprobs(entries: Sequence[PlacedLogprob], describe: Describe) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(entry.logprob.token_id, entry.logprob.logprob, describe),
                "top_logprobs": [_chat_entry(token_id, logprob, describe) for token_id, logprob in entry.logprob.top],
            }
            for entry in entries
        ]
    }


def as_token_ids(describe: Describe) -> Describe:
    """For ``return_tokens_as_token_ids``: names without doubt."""
    return lambda token_id: (f"token_id:{token_id}", describe(token_id)[1])


def _chat_entry(token_id: int, logprob: float, describe: Describe) -> dict[str, Any]:
    text, data = describe(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
