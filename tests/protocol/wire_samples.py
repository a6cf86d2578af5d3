"""One message of every type with every field set, and how to find them all. The golden bytes were made from these."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel

from protocol import messages as m
from protocol.codec import Decoder, decode_from_d, decode_from_p, decode_from_router, decode_from_worker
from protocol.ids import Epoch, RequestId
from protocol.sampling import SamplingParams

EPOCH = Epoch("00112233aabbccdd")
ABOUT: dict[str, Any] = {"epoch": EPOCH, "request_id": RequestId("req-7"), "generation": 2}
FINGERPRINT = m.Fingerprint(
    model_type="nemotron_h",
    config_digest="c0",
    weights_digest="w0",
    dtype="float32",
    state_dtype="float32",
    block_tokens=16,
    block_bytes=98304,
    slot_bytes=20_000_000,
    layout_digest="l0",
    mtp=True,
)
PLACE = m.PrefillPlace(worker_id="prefill-0", epoch=Epoch("ffee"), address="tcp://127.0.0.1:6000")
LOAD = m.Load(waiting=1, running=2, waiting_tokens=300, free_blocks=4, free_slots=5, held_for_peers=6)
TIMING = m.Timing(queue_s=0.5, prefill_s=0.25, transfer_s=0.125, decode_wait_s=0.0625, transfer_bytes=1 << 33)
SAMPLING = SamplingParams(
    max_tokens=5,
    min_tokens=1,
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    min_p=0.25,
    seed=2**63 - 1,
    logit_bias={7: -100.0, 70000: 1.5},
    repetition_penalty=1.25,
    presence_penalty=-1.0,
    frequency_penalty=0.5,
    stop_token_ids=(1, 2),
    ignore_eos=True,
    logprobs=2,
)
CACHE = m.CacheUse(enabled=False, salt="team-a")
LOGPROB = m.TokenLogprob(token_id=9, logprob=-0.5, top=((9, -0.5), (4, -1.25)))

FROM_WORKER: list[BaseModel] = [
    m.Hello(
        epoch=EPOCH,
        worker_id="prefill-0",
        role="prefill",
        fingerprint=FINGERPRINT,
        capacity=m.Capacity(max_model_len=4096, kv_blocks=100, state_slots=40, max_running=8, speculation=3, prefix_cache=True),
        peer_address="tcp://127.0.0.1:6000",
        info={"kernels": "native: AVX2"},
    ),
    m.Heartbeat(epoch=EPOCH, load=LOAD, draining=True, counters={"baton_tokens_total": 12.0}),
    m.Paired(epoch=EPOCH, peer=Epoch("ffee"), ok=False, field="dtype", reason="float32 here"),
    m.Admitted(**ABOUT, needs_prefill=False),
    m.Refused(**ABOUT, code="busy", message="no room"),
    m.Tokens(**ABOUT, index=3, token_ids=(9, 10), logprobs=(LOGPROB,), timing=TIMING, cached_tokens=17),
    m.Finished(**ABOUT, reason="stop", stop_token_id=2, steps=4, accepted_drafts=5, proposed_drafts=6),
    m.Failed(**ABOUT, code="prefill_lost", message="gone"),
    m.Cancelled(**ABOUT),
    m.PrefillDone(**ABOUT, timing=TIMING),
    m.CacheFlushed(epoch=EPOCH, number=3, freed_blocks=40, freed_snapshots=5, kept_blocks=2, kept_snapshots=1),
    m.AuditFound(
        epoch=EPOCH, purpose="publish", request_id=RequestId("req-7"), step=12, claimed=3920, held=3662, detail="detail", story="a; b"
    ),
    m.Goodbye(epoch=EPOCH),
]
FROM_ROUTER: list[BaseModel] = [
    m.Welcome(epoch=EPOCH, heartbeat_s=0.25),
    m.Unwelcome(epoch=EPOCH, field="weights_digest", message="another model"),
    m.Peers(epoch=EPOCH, prefill=(PLACE,)),
    m.Admit(**ABOUT, token_ids=(1, 2, 300000), sampling=SAMPLING, prefill=PLACE, local_tokens=64, cache=CACHE),
    m.Prefill(**ABOUT, token_ids=(1, 2), decode_epoch=Epoch("dd"), cache=CACHE),
    m.Cancel(**ABOUT, keep=True),
    m.FlushCache(epoch=EPOCH, number=3),
    m.Drain(epoch=EPOCH),
    m.HelloAgain(epoch=EPOCH),
]
FROM_D: list[BaseModel] = [
    m.PairHello(epoch=EPOCH, fingerprint=FINGERPRINT, data_address=b"\x00\xffaddress", transport="ucx"),
    m.Fetch(**ABOUT, have_blocks=3),
    m.Pull(**ABOUT, copies=(m.Copy(region="slots", offset=1 << 40, num_bytes=1 << 18, tag=2**64 - 1),)),
    m.Release(**ABOUT, ok=False, reason="cancelled"),
    m.PairBye(epoch=EPOCH),
    m.PeerPing(epoch=EPOCH),
]
FROM_P: list[BaseModel] = [
    m.PairWelcome(epoch=EPOCH, fingerprint=FINGERPRINT, data_address=b"\x01", transport="ucx"),
    m.PairRefused(epoch=EPOCH, field="mtp", message="differs"),
    m.Ready(**ABOUT, first_block=2, blocks=(7, 3)),
    m.Manifest(
        **ABOUT,
        position=31,
        token_digest="d0",
        fingerprint=FINGERPRINT,
        blocks=(7, 3),
        slot=4,
        block_checksums=(2**64 - 1, 0),
        slot_checksum=5,
        lease_s=30.0,
        timing=TIMING,
        cached_tokens=16,
    ),
    m.HandoffFailed(**ABOUT, code="lease_ended", message="too late"),
    m.PeerPong(epoch=EPOCH),
    m.NotPaired(epoch=EPOCH),
]
DIRECTIONS: list[tuple[Decoder[Any], Any, list[BaseModel]]] = [
    (decode_from_worker, m.WorkerToRouter, FROM_WORKER),
    (decode_from_router, m.RouterToWorker, FROM_ROUTER),
    (decode_from_d, m.DecodeToPrefill, FROM_D),
    (decode_from_p, m.PrefillToDecode, FROM_P),
]
SAMPLES = [(decoder, sample) for decoder, _, samples in DIRECTIONS for sample in samples]


def types_of(union: Any) -> set[type[BaseModel]]:
    """The message classes of an annotated union."""
    return set(get_args(get_args(union)[0]))
