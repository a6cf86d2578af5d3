"""Verification of drafts: the target chooses its own token at every position; a draft only saves a step.

Because a token is a function of (logits, parameters, seed, position) and of the tokens before it, a draft is right or
wrong, never 'accepted with probability'. So speculation changes when tokens come, and never which (invariant 18).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(choose: Callable[[Sequence[int]], int], drafts: Sequence[int]) -> list[int]:
    """The tokens that a window yields: 1 .. len(drafts)+1 of them.

    ``choose(before)`` gives the target's token after ``before``, the window's tokens so far; it is called for window
    position len(before), whose logits are true because every earlier draft was the target's own token.
    """
    tokens: list[int] = []
    for draft in (*drafts, None):
        tokens.append(choose(tokens))
        if tokens[-1] != draft:
            break
    return tokens
