"""The wire format: what it is, that it goes round, and that nothing else is let in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol.codec import Decoder, decode_from_d, decode_from_router, decode_from_worker, encode
from protocol.errors import WireError
from protocol.messages import Admit, Fetch, Manifest, RouterToWorker, Tokens
from tests.protocol.wire_samples import ABOUT, DIRECTIONS, SAMPLES, SAMPLING, types_of

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden_bytes.json").read_text())


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, BaseModel) else ""


def test_every_message_has_a_sample() -> None:
    for _, union, samples in DIRECTIONS:
        assert {type(sample) for sample in samples} == types_of(union)


def test_every_field_of_a_sample_is_set() -> None:
    for _, sample in SAMPLES:
        assert sample.model_fields_set | {"type"} == set(type(sample).model_fields), name_of(sample)


@pytest.mark.parametrize(("decoder", "sample"), SAMPLES, ids=name_of)
def test_the_bytes_are_the_ones_agreed_on(decoder: Decoder[Any], sample: BaseModel) -> None:
    """A failure means that the wire format has changed: raise PROTOCOL_VERSION and write the new bytes, on purpose."""
    golden = bytes.fromhex(GOLDEN[name_of(sample)])
    assert encode(sample) == golden
    assert decoder.decode(golden) == sample


def test_there_are_no_other_golden_bytes() -> None:
    assert set(GOLDEN) == {name_of(sample) for _, sample in SAMPLES}


@pytest.mark.parametrize(("decoder", "sample"), SAMPLES, ids=name_of)
def test_each_direction_refuses_the_others_messages(decoder: Decoder[Any], sample: BaseModel) -> None:
    for other, _, samples in DIRECTIONS:
        if sample not in samples:
            with pytest.raises(WireError):
                other.decode(encode(sample))


@pytest.mark.parametrize(("decoder", "sample"), SAMPLES, ids=name_of)
def test_a_truncated_message_is_refused(decoder: Decoder[Any], sample: BaseModel) -> None:
    data = encode(sample)
    for stop in range(len(data)):
        with pytest.raises(WireError):
            decoder.decode(data[:stop])


@pytest.mark.parametrize(("decoder", "sample"), SAMPLES, ids=name_of)
def test_more_after_a_message_is_refused(decoder: Decoder[Any], sample: BaseModel) -> None:
    with pytest.raises(WireError):
        decoder.decode(encode(sample) + b"\xc0")


@pytest.mark.parametrize(("decoder", "sample"), SAMPLES, ids=name_of)
def test_unknown_and_missing_fields_are_refused_by_name(decoder: Decoder[Any], sample: BaseModel) -> None:
    fields = sample.model_dump()
    with pytest.raises(WireError, match="surprise"):
        decoder.decode(msgpack.packb({**fields, "surprise": 1}))
    del fields["epoch"]
    with pytest.raises(WireError, match="epoch"):
        decoder.decode(msgpack.packb(fields))


WORDS = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 2**31), max_size=50).map(tuple)


@given(request_id=WORDS, generation=st.integers(0, 2**40), token_ids=TOKENS, index=st.integers(0, 2**40), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=100)
def test_messages_go_round(request_id: str, generation: int, token_ids: tuple[int, ...], index: int, seed: int) -> None:
    about = {**ABOUT, "request_id": request_id, "generation": generation}
    tokens = Tokens(**about, index=index, token_ids=token_ids)
    admit = Admit(**about, token_ids=token_ids, sampling=SAMPLING.model_copy(update={"seed": seed}))
    assert decode_from_worker.decode(encode(tokens)) == tokens
    assert decode_from_router.decode(encode(admit)) == admit


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_garbage_is_a_wire_error(data: bytes) -> None:
    for decoder, _, _ in DIRECTIONS:
        with pytest.raises(WireError):
            decoder.decode(data)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=500)
def test_a_changed_byte_gives_a_message_or_a_wire_error(sample: tuple[Decoder[Any], BaseModel], data: st.DataObject) -> None:
    decoder, message = sample
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decoder.decode(bytes(damaged))
    except WireError:
        return
    assert isinstance(decoded, BaseModel)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=300)
def test_a_field_of_another_type_gives_a_message_or_a_wire_error(sample: tuple[Decoder[Any], BaseModel], data: st.DataObject) -> None:
    decoder, message = sample
    fields = message.model_dump()
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(NESTED)
    try:
        decoded = decoder.decode(msgpack.packb(fields))
    except WireError:
        return
    assert isinstance(decoded, BaseModel)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion elements that aren't there
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\xff\xff\xff\xff",  # as long a string
        b"\x91" * 5000,  # nested lists without end
        b"\x81\x80\x01",  # a map whose key is a map
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x93\x01\x02\x03",  # no map
        b"",
    ],
)
def test_tricks_are_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_d.decode(data)


def test_a_message_over_the_limit_is_not_even_read() -> None:
    small: Decoder[Any] = Decoder(RouterToWorker, max_bytes=1000)
    with pytest.raises(WireError, match=re.escape("longer than 1000")):
        small.decode(bytes(1001))


def test_long_prompts_and_manifests_fit() -> None:
    long = 100_000
    admit = Admit(**ABOUT, token_ids=tuple(range(long)), sampling=SAMPLING)
    assert decode_from_router.decode(encode(admit)) == admit
    manifest = next(sample for _, sample in SAMPLES if isinstance(sample, Manifest))
    huge = manifest.model_copy(update={"blocks": tuple(range(long)), "block_checksums": (2**64 - 1,) * long})
    assert DIRECTIONS[3][0].decode(encode(huge)) == huge


def test_the_error_names_the_field() -> None:
    fields = Fetch(**ABOUT).model_dump() | {"generation": -1}
    with pytest.raises(WireError, match="generation"):
        decode_from_d.decode(msgpack.packb(fields))
