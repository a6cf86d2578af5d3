"""Messages to bytes and back: MessagePack maps, checked by pydantic. Anything wrong on the way in is a WireError, never a crash.

Lengths are bounded before memory is spent: a frame longer than ``max_bytes`` isn't looked at, and no array, map, string or
binary inside may be longer than the frame could hold. Decoders are built once, one per direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgpack
from pydantic import BaseModel, TypeAdapter, ValidationError

from protocol.errors import WireError
from protocol.messages import DecodeToPrefill, PrefillToDecode, RouterToWorker, WorkerToRouter

MAX_MESSAGE_BYTES = 16 << 20
"""A prompt of a million tokens is 5 MB; a manifest of 100,000 blocks 1.4 MB."""

Message_ = TypeVar("Message_")


def encode(message: BaseModel) -> bytes:
    """All fields, defaults included, in the order of the class. Raises OverflowError for integers beyond 64 bits."""
    packed: bytes = msgpack.packb(message.model_dump(), use_bin_type=True)
    return packed


class Decoder(Generic[Message_]):
    """Decodes one direction's union of messages."""

    def __init__(self, union: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._validate: Callable[[object], Message_] = TypeAdapter(union).validator.validate_python
        """The adapter's core, without the adapter: this runs for every token of every request."""
        self.max_bytes = max_bytes

    def decode(self, data: bytes) -> Message_:
        """Raises WireError for frames that are too long, malformed, of an unknown type, or with wrong, missing or extra fields."""
        if len(data) > self.max_bytes:
            raise WireError(f"message of {len(data)} bytes is longer than {self.max_bytes}")
        try:
            return self._validate(_unpack(data))
        except ValidationError as error:
            raise WireError(_told(error)) from None


def _unpack(data: bytes) -> object:
    limit = len(data)
    try:
        unpacked: object = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=False,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=limit,
            max_map_len=limit // 2,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map as the key of a map
        raise WireError(f"not a MessagePack message: {type(error).__name__}: {error}") from None
    if not isinstance(unpacked, dict):
        raise WireError(f"a message is a map, not {type(unpacked).__name__}")
    return unpacked


def _told(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "message"
    return f"{where}: {first['msg']}"


decode_from_worker: Decoder[WorkerToRouter] = Decoder(WorkerToRouter)
decode_from_router: Decoder[RouterToWorker] = Decoder(RouterToWorker)
decode_from_d: Decoder[DecodeToPrefill] = Decoder(DecodeToPrefill)
decode_from_p: Decoder[PrefillToDecode] = Decoder(PrefillToDecode)
