"""Ids that appear in messages. An epoch names one process life; a generation counts one request's attempts."""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
Epoch = NewType("Epoch", str)


class RequestKey(NamedTuple):
    """One attempt of one request. State, accepted counts and hand-offs belong to this, never to a row of a batch."""

    request_id: RequestId
    generation: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.generation}"


def new_epoch() -> Epoch:
    """A random id for this process life."""
    return Epoch(secrets.token_hex(8))
