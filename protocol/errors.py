"""The exception tree of the system. ``ValueError`` is for the user's mistakes, ``assert`` for the programmer's.

BatonError
├── ConfigError            a setting or file is wrong; the message names the key
├── CheckpointError        a model directory is wrong; the message names the file, tensor or field
├── WireError              a message can't be decoded, is too large or has an unknown type
├── FingerprintMismatch    two processes don't fit together; names the field
├── Unwelcomed             the router won't have this worker; names the field
├── Busy                   no room now; nothing was started
├── StaleMessage           epoch or generation is not the current one
├── TransferError          a hand-off failed; nothing of it may be used
│   ├── PeerLost
│   ├── ChecksumMismatch
│   └── LeaseEnded
├── StateAuditError        a tag differs from the claimed position
├── LogitsError            a request's logits give no token: NaN, infinite, or every token masked
├── RequestFailed          the engine ended a request by an error; carries its reason
├── EngineStopped          the engine is closed, has ended or failed; carries the reason
└── IllegalTransition      a lifecycle got an event that its state forbids; carries the story
"""

from __future__ import annotations

from collections.abc import Sequence


class BatonError(Exception):
    """Base of everything that Baton raises on purpose."""


class ConfigError(BatonError):
    pass


class CheckpointError(BatonError):
    pass


class WireError(BatonError):
    pass


class FingerprintMismatch(BatonError):
    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours {ours!r}, theirs {theirs!r}")
        self.field, self.ours, self.theirs = field, ours, theirs


class Unwelcomed(BatonError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"the router refuses this worker because of {field}: {message}")
        self.field = field


class Busy(BatonError):
    pass


class StaleMessage(BatonError):
    pass


class TransferError(BatonError):
    pass


class PeerLost(TransferError):
    pass


class ChecksumMismatch(TransferError):
    pass


class LeaseEnded(TransferError):
    pass


class StateAuditError(BatonError):
    """``slot`` was to be used as h(``claimed``), for ``purpose``; its tag is ``held``."""

    def __init__(self, purpose: str, slot: int, claimed: int, held: int | None) -> None:
        super().__init__(f"{purpose}: slot {slot} is claimed to hold h({claimed}) but its tag is {held}")
        self.purpose, self.slot, self.claimed, self.held = purpose, slot, claimed, held


class LogitsError(BatonError):
    pass


class RequestFailed(BatonError):
    pass


class EngineStopped(BatonError):
    pass


class IllegalTransition(BatonError):
    def __init__(self, what: str, state: object, event: object, story: Sequence[object] = ()) -> None:
        told = "".join(f"\n  {line}" for line in story)
        super().__init__(f"{what}: {type(event).__name__} is not allowed in state {state}{told}")
        self.state, self.event, self.story = state, event, tuple(story)
