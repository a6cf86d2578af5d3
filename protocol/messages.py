"""Every message between processes, typed. One tagged union per direction; unknown types and fields are refused.

Directions: worker -> router, router -> worker, D -> P, P -> D. Control travels over ZeroMQ as MessagePack maps with a
``type`` tag (``protocol.codec``); bulk data travels over UCX and is described here only by tag, region and size.

Every message about a request carries (request_id, generation) and the sender's epoch; stale ones are rejected by value.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.ids import Epoch, RequestId, RequestKey
from protocol.sampling import SamplingParams

PROTOCOL_VERSION = 2
MAX_DETAIL, MAX_STORY = 1024, 8192
"""Characters of what an audit tells."""

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]
ErrorCode = Literal[
    "bad_request", "busy", "prefill_lost", "decode_lost", "transfer_failed", "mismatch", "lease_ended", "draining", "internal"
]


class Message(BaseModel):
    """Base: frozen, no unknown fields. ``epoch`` is the sender's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: Epoch


class RequestMessage(Message):
    """A message about one attempt of one request."""

    request_id: RequestId
    generation: Annotated[int, Field(ge=0)]

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.generation)


class Part(BaseModel):
    """Base of the records inside messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fingerprint(Part):
    """What two processes must share before a hand-off may pass between them. Compared field by field, in this order."""

    protocol_version: int = PROTOCOL_VERSION
    model_type: str
    config_digest: str
    weights_digest: str
    dtype: str
    """Of KV, conv window and hidden tail."""
    state_dtype: str
    """Of the matrix state."""
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    layout_digest: str
    """Of transfer.layout: the order and sizes of all parts of a block and a slot."""
    mtp: bool


class Capacity(Part):
    max_model_len: int
    kv_blocks: int
    state_slots: int
    max_running: int
    speculation: int
    """K; 0 on prefill workers."""
    prefix_cache: bool = False
    """It keeps what it has computed or fetched for later requests that begin alike."""


class Load(Part):
    """The worker's own count, sent with each heartbeat."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    """Prompt tokens admitted but not yet computed."""
    free_blocks: int = 0
    """Those that the prefix cache would give up included, here and below."""
    free_slots: int = 0
    held_for_peers: int = 0
    """Sealed hand-offs under lease (P) or reservations awaiting a hand-off (D)."""


class Timing(Part):
    """Seconds, measured by the monotonic clock of the process that did the work."""

    queue_s: float = 0.0
    """Waiting on P (or on D for local prefill) before the first chunk."""
    prefill_s: float = 0.0
    """First chunk started to sealed."""
    transfer_s: float = 0.0
    """Sealed on P to committed on D: the tail that the overlap didn't hide."""
    decode_wait_s: float = 0.0
    """Committed on D to first token."""
    transfer_bytes: int = 0


class CacheUse(Part):
    """What the prefix cache may do for a request."""

    enabled: bool = True
    """False: nothing is looked up for it and nothing of it is kept."""
    salt: str | None = None
    """Only requests with the same salt share anything."""


class TokenLogprob(Part):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, best first."""


class PrefillPlace(Part):
    """Where D finds P. Always the router's word, never a client's."""

    worker_id: str
    epoch: Epoch
    address: str
    """P's ZeroMQ address for D workers."""


# ---- worker -> router ------------------------------------------------------------------------------------------------


class Hello(Message):
    type: Literal["hello"] = "hello"
    worker_id: str
    role: Role
    fingerprint: Fingerprint
    capacity: Capacity
    peer_address: str | None = None
    """P only: where D workers dial."""
    info: dict[str, str] = Field(default_factory=dict)
    """For /health: kernels chosen and why, transport, versions."""


class Heartbeat(Message):
    type: Literal["heartbeat"] = "heartbeat"
    load: Load
    draining: bool = False
    counters: dict[str, float] = Field(default_factory=dict)
    """Monotonic totals for /metrics, by metric name."""


class Paired(Message):
    """D tells how its pairing with a P went. Only paired P and D are used together."""

    type: Literal["paired"] = "paired"
    peer: Epoch
    ok: bool
    field: str | None = None
    reason: str | None = None


class Admitted(RequestMessage):
    type: Literal["admitted"] = "admitted"
    needs_prefill: bool
    """P is to compute [0, N-1). False: D has it already, or computes what it lacks by itself."""


class Refused(RequestMessage):
    """D or P takes nothing of this request. ``busy`` and ``draining`` of D, and ``decode_lost`` of P (it isn't paired with that D), are
    placed anew; the other codes go to the client.
    """

    type: Literal["refused"] = "refused"
    code: ErrorCode
    message: str


class Tokens(RequestMessage):
    type: Literal["tokens"] = "tokens"
    index: int
    """How many output tokens came before these: gaps and repeats are visible."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    timing: Timing | None = None
    """With the first tokens only."""
    cached_tokens: int | None = None
    """With the first tokens only: so many of the prompt's tokens nobody computed for this attempt."""


class Finished(RequestMessage):
    type: Literal["finished"] = "finished"
    reason: FinishReason
    stop_token_id: int | None = None
    steps: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0


class Failed(RequestMessage):
    type: Literal["failed"] = "failed"
    code: ErrorCode
    message: str


class Cancelled(RequestMessage):
    type: Literal["cancelled"] = "cancelled"


class PrefillDone(RequestMessage):
    """P: the hand-off is sealed. For metrics and the request's story."""

    type: Literal["prefill_done"] = "prefill_done"
    timing: Timing


class CacheFlushed(Message):
    """The answer to FlushCache. What running requests and hand-offs use stays until they end, and is nobody's afterwards."""

    type: Literal["cache_flushed"] = "cache_flushed"
    number: int
    freed_blocks: int
    freed_snapshots: int
    kept_blocks: int
    kept_snapshots: int


class AuditFound(Message):
    """A state that was claimed to be another one than it is. Told once, when it was found."""

    type: Literal["audit_found"] = "audit_found"
    purpose: Annotated[str, Field(max_length=64)]
    """What the state was to be used for."""
    request_id: RequestId
    step: int
    """The worker's count."""
    claimed: int
    """Position."""
    held: int | None
    """The position that the state truly holds, when that is known."""
    detail: Annotated[str, Field(max_length=MAX_DETAIL)] = ""
    story: Annotated[str, Field(max_length=MAX_STORY)] = ""
    """The request's last events."""


class Goodbye(Message):
    """The worker leaves in good order: drained, nothing held."""

    type: Literal["goodbye"] = "goodbye"


WorkerToRouter = Annotated[
    Hello
    | Heartbeat
    | Paired
    | Admitted
    | Refused
    | Tokens
    | Finished
    | Failed
    | Cancelled
    | PrefillDone
    | CacheFlushed
    | AuditFound
    | Goodbye,
    Field(discriminator="type"),
]

# ---- router -> worker ------------------------------------------------------------------------------------------------


class Welcome(Message):
    type: Literal["welcome"] = "welcome"
    heartbeat_s: float = 0.5


class Unwelcome(Message):
    """The router won't have this worker: another protocol version or another model than the rest of the cluster."""

    type: Literal["unwelcome"] = "unwelcome"
    field: str
    message: str


class Peers(Message):
    """All live prefill workers; D pairs with new ones and drops those that are gone."""

    type: Literal["peers"] = "peers"
    prefill: tuple[PrefillPlace, ...]


class Admit(RequestMessage):
    """Router -> D. ``prefill`` None: D prefills by itself."""

    type: Literal["admit"] = "admit"
    token_ids: tuple[int, ...]
    """The whole prompt, [0, N)."""
    sampling: SamplingParams
    prefill: PrefillPlace | None = None
    local_tokens: int = 0
    """When D holds [0, N-1) but for so many tokens or fewer, it computes them itself and P isn't asked."""
    cache: CacheUse = CacheUse()


class Prefill(RequestMessage):
    """Router -> P: compute [0, N-1), seal, keep for ``decode_epoch``."""

    type: Literal["prefill"] = "prefill"
    token_ids: tuple[int, ...]
    """[0, N-1), at least one token."""
    decode_epoch: Epoch
    cache: CacheUse = CacheUse()


class Cancel(RequestMessage):
    type: Literal["cancel"] = "cancel"
    keep: bool = False
    """Only the router found the end of the answer: what is computed may stay in the cache, a next turn may want it."""


class FlushCache(Message):
    """Forget all cached prefixes. Answered by CacheFlushed with the same number."""

    type: Literal["flush_cache"] = "flush_cache"
    number: int


class Drain(Message):
    type: Literal["drain"] = "drain"


class HelloAgain(Message):
    """The router doesn't know the sender (it restarted): say hello again."""

    type: Literal["hello_again"] = "hello_again"


RouterToWorker = Annotated[
    Welcome | Unwelcome | Peers | Admit | Prefill | Cancel | FlushCache | Drain | HelloAgain, Field(discriminator="type")
]

# ---- D -> P ----------------------------------------------------------------------------------------------------------


class PairHello(Message):
    type: Literal["pair_hello"] = "pair_hello"
    fingerprint: Fingerprint
    data_address: bytes
    """The transport's address, opaque here."""
    transport: str


class Fetch(RequestMessage):
    """D is ready to receive this request's hand-off. May arrive before the router's Prefill."""

    type: Literal["fetch"] = "fetch"
    have_blocks: int = 0
    """D already holds the first so many blocks; h(N-1) always travels."""


class Copy(Part):
    """One contiguous piece. Offsets are into P's region; D posted receives for it under ``tag`` and
    those after it, one per message of the transport."""

    region: Literal["blocks", "slots"]
    offset: int
    num_bytes: int
    tag: int


class Pull(RequestMessage):
    """D has posted receives for these copies; P checks that they lie in this request's ready pages, then sends."""

    type: Literal["pull"] = "pull"
    copies: tuple[Copy, ...]


class Release(RequestMessage):
    """D is done with the hand-off, well (``ok``) or not. P frees once its own sends have ended. Sent exactly once per Fetch."""

    type: Literal["release"] = "release"
    ok: bool
    reason: str = ""


class PairBye(Message):
    type: Literal["pair_bye"] = "pair_bye"


class PeerPing(Message):
    """Keeps the pairing observed in both directions; answered by PeerPong."""

    type: Literal["ping"] = "ping"


DecodeToPrefill = Annotated[PairHello | Fetch | Pull | Release | PairBye | PeerPing, Field(discriminator="type")]

# ---- P -> D ----------------------------------------------------------------------------------------------------------


class PairWelcome(Message):
    type: Literal["pair_welcome"] = "pair_welcome"
    fingerprint: Fingerprint
    data_address: bytes
    transport: str


class PairRefused(Message):
    type: Literal["pair_refused"] = "pair_refused"
    field: str
    message: str


class Ready(RequestMessage):
    """These blocks are final and may be pulled, while later chunks still run."""

    type: Literal["ready"] = "ready"
    first_block: int
    """Index within the request."""
    blocks: tuple[int, ...]
    """P's block ids for request blocks [first_block, first_block + len)."""


class Manifest(RequestMessage):
    """P sealed: everything about the hand-off. D commits only if all of it checks out."""

    type: Literal["manifest"] = "manifest"
    position: int
    """N-1: the tag of the slot."""
    token_digest: str
    """xxh3-128 of the tokens [0, N-1) as little-endian int64."""
    fingerprint: Fingerprint
    blocks: tuple[int, ...]
    """P's block ids for [0, N-1), all of them."""
    slot: int
    block_checksums: tuple[int, ...]
    """xxh3-64 of each block's slab; empty when checksums are off."""
    slot_checksum: int | None
    lease_s: float
    timing: Timing
    cached_tokens: int
    """So many of the N-1 tokens P didn't have to compute."""


class HandoffFailed(RequestMessage):
    """P can't give (any more): cancelled, lease ended, stale, refused or failed. Terminal for this attempt."""

    type: Literal["handoff_failed"] = "handoff_failed"
    code: ErrorCode
    message: str


class PeerPong(Message):
    type: Literal["pong"] = "pong"


class NotPaired(Message):
    """P doesn't know the D that spoke (any more): pair anew; what was said is dropped."""

    type: Literal["not_paired"] = "not_paired"


PrefillToDecode = Annotated[
    PairWelcome | PairRefused | NotPaired | Ready | Manifest | HandoffFailed | PeerPong, Field(discriminator="type")
]
