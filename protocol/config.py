"""Settings of every process, and the one place that reads flags, environment and file.

Flags win over ``BATON_*`` variables, those over the TOML file, that over defaults. A file has keys that hold for all processes and
optional tables for one kind of process, which win over the former::

    model = "/models/nemotron"
    [decode]
    speculation = 3

A key means the same in every process. One that no process knows is an error that names it, wherever it stands, so a misspelt
key is never ignored; one that only another process knows is left to that process.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigError

Process = Literal["router", "prefill", "decode", "baton"]
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_PORT = 65535
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]


def check_address(text: str) -> str:
    """Raises ValueError unless it can be dialed or bound: tcp://HOST:PORT."""
    match = re.fullmatch(r"tcp://[^:/\s]+:(\d{1,5})", text)
    if match is None or int(match[1]) > MAX_PORT:
        raise ValueError(f"it must look like tcp://HOST:PORT, with a port up to {MAX_PORT}")
    return text


Address = Annotated[str, AfterValidator(check_address)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
HIDDEN = "hidden"
"""Marks a setting that ``--help`` doesn't show: it is for experiments."""

ENVIRONMENT_PREFIX = "BATON_"
CONFIG_VARIABLE = "BATON_CONFIG"
"""Path of the file, when no flag gives it."""
DEFAULT_CONTROL = "tcp://127.0.0.1:5550"


class Settings(BaseModel):
    """Base of one process's settings. Frozen; build it with ``load_settings``. A field's docstring is its flag's help too."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    log_level: LogLevel = "info"
    """How much is said on standard error."""


class RouterSettings(Settings):
    model: Path
    """Checkpoint directory. The router reads the tokenizer, the chat template and the lengths, no weights."""
    host: str = "127.0.0.1"
    """Address of the HTTP API."""
    port: Port = 8000
    """Of the HTTP API; 0 takes a free one."""
    control: Address = DEFAULT_CONTROL
    """Where workers dial; the router binds it. IPv4."""
    served_model_name: str | None = None
    """None: the directory's name."""
    queue_limit: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait for room; more get 429."""
    request_timeout_s: Seconds = 600.0
    """From arrival to the last token."""
    receive_timeout_s: Seconds = 60.0
    """How long a client may take to send a request, from connecting or from its first byte; then the connection is closed."""
    min_prefill: Annotated[int, Field(ge=0)] = 0
    """Prefill workers without which /ready says no."""
    min_decode: Positive = 1
    """Decode workers without which /ready says no."""
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    """Prompts up to this length are prefilled by the decode worker itself."""
    local_tail_tokens: Annotated[int, Field(ge=0)] = 64
    """A prompt of which the decode worker's cache lacks no more than so many tokens is completed by the decode worker itself."""
    drain_timeout_s: Seconds = 30.0
    """At shutdown: how long running requests may go on."""


class WorkerSettings(Settings):
    """Of both worker kinds. The engine's keys mean what ``engine.config`` says; ``None`` lets the engine derive them."""

    model: Path
    """Checkpoint directory."""
    control: Address = DEFAULT_CONTROL
    """The router's address for workers, to dial."""
    worker_id: str | None = None
    """Name in logs and metrics. Default: role, host and process id."""
    transport: Literal["ucx"] = "ucx"
    """What carries hand-offs."""
    checksums: bool = True
    """Check every block and slot after it has travelled."""
    health_file: Path | None = None
    """Touched with each heartbeat that the worker sends as a member of the cluster, for container health checks."""
    drain_timeout_s: Seconds = 30.0
    """After SIGTERM: how long running requests and hand-offs may go on."""

    mtp: bool | None = None
    """Keep MTP KV. Default: whenever the checkpoint has an MTP module."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Positions in one block of KV. The same for all workers."""
    kv_blocks: Annotated[int, Field(ge=2)] | None = None
    """Blocks in the KV pool. Default: room for max_running requests of full length, within kv_bytes."""
    kv_bytes: Positive = 2 << 30
    """Bound for the default kv_blocks only."""
    state_slots: Annotated[int, Field(ge=3)] | None = None
    """Slots in the state pool. Default: enough for max_running requests."""
    max_running: Positive = 16
    """Requests that are computed at the same time."""
    step_tokens: Positive = 512
    """Token budget of one step."""
    max_prefill_chunk: Positive = 256
    """Longest chunk of one prompt in one step."""
    prefill_token_budget: Positive | None = None
    """Most prompt tokens of a step in which others decode. Default: no bound but step_tokens."""
    prefix_cache: bool = True
    """Keep computed and fetched prefixes for later requests that begin alike."""
    snapshot_tokens: Positive = 256
    """Grid of the cache: chunks prefer to end on its multiples, and states are kept there."""
    snapshot_slots: Annotated[int, Field(ge=0)] | None = None
    """Most states that the cache keeps. Default: 8 for each of max_running, within snapshot_bytes."""
    snapshot_bytes: Positive = 1 << 30
    """Bound for the default snapshot_slots only."""
    chunk_policy: Literal["soft", "strict"] = "soft"
    """strict: only a prompt's last chunk may end off the grid; a chunk that can't reach it waits."""
    backoff_tokens: Annotated[int, Field(ge=0)] = 0
    """The last kept state of a prompt lies so many tokens before its last grid position."""
    snapshot_dir: Path | None = None
    """Directory for what the prefix cache has no room for; it comes back from there, after a restart too. Default: none."""
    snapshot_dir_bytes: Annotated[int, Field(ge=0)] = 8 << 30
    """Most bytes of files in snapshot_dir that this worker knows of. Workers that share it may together leave more there."""
    audit_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the prefix cache's hits that are computed again in the background and compared, for instance 0.01."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Bound for prompt and output together. Default: the checkpoint's."""
    kernels: Literal["auto", "native", "torch", "reference"] = "auto"
    """Which implementation of the ops."""
    threads: Positive | None = None
    """Threads for the kernels. Default: all cores."""
    policies: Annotated[str | None, HIDDEN] = None
    """MODULE:ATTRIBUTE of decisions to run instead of the engine's own, to re-create a fault. The answers can't be trusted then."""

    def engine_values(self) -> dict[str, Any]:
        """The keywords for EngineConfig."""
        return {key: getattr(self, key) for key in ENGINE_KEYS if key in type(self).model_fields}


class PrefillSettings(WorkerSettings):
    peer_host: str | None = None
    """IPv4 address or name under which decode workers reach this worker. None: the local address from which it reaches the router.
    It binds this address too unless ``peer_bind`` is given."""
    peer_bind: str | None = None
    """IPv4 address to bind when it differs from the one that peers dial, for instance 0.0.0.0 in a container."""
    peer_port: Port = 0
    """0 takes a free one; the router tells it to decode workers."""
    lease_s: Seconds = 30.0
    """How long a sealed hand-off is kept for a decode worker that doesn't come."""


class DecodeSettings(WorkerSettings):
    speculation: Annotated[int, Field(ge=0, le=7)] = 0
    """K, draft tokens per step."""
    tail_padding: Literal["auto", "always", "never"] = "auto"
    """When a prompt's last token runs in a window of K+1 positions."""


class UpSettings(Settings):
    """``baton up``: what the launcher itself decides. It hands file and environment on to the processes that it starts."""

    model: Path | None = None
    """Checkpoint directory; None: the shipped one."""
    prefill: Annotated[int, Field(ge=0)] = 1
    """Prefill workers; 0: decode workers prefill by themselves."""
    decode: Positive = 1
    speculation: Annotated[int, Field(ge=0, le=7)] | None = None
    """K, draft tokens per step. None: 3 for a checkpoint with MTP, else 0."""
    host: str = "127.0.0.1"
    port: Port = 8000
    control: Address | None = None
    """None: a free port of 127.0.0.1."""
    served_model_name: str | None = None
    prefix_cache: bool = True
    """Of all workers, as the following two."""
    audit_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of hits that are computed again and compared."""
    snapshot_dir: Path | None = None
    """Directory for what the prefix cache has no room for."""
    threads: Positive | None = None
    """Per worker; None: the cores divided by the workers."""


SETTINGS: dict[Process, type[Settings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "baton": UpSettings,
}
ENGINE_KEYS = (
    "model",
    "speculation",
    "mtp",
    "block_tokens",
    "kv_blocks",
    "kv_bytes",
    "state_slots",
    "max_running",
    "step_tokens",
    "max_prefill_chunk",
    "prefill_token_budget",
    "prefix_cache",
    "snapshot_tokens",
    "snapshot_dir",
    "snapshot_dir_bytes",
    "audit_sample",
    "snapshot_slots",
    "snapshot_bytes",
    "chunk_policy",
    "backoff_tokens",
    "max_model_len",
    "tail_padding",
    "kernels",
    "threads",
)
KNOWN_KEYS = frozenset(key for cls in SETTINGS.values() for key in cls.model_fields)

SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    cls: type[SettingsT],
    process: Process,
    flags: Mapping[str, object],
    config_file: Path | None,
    environ: Mapping[str, str],
) -> SettingsT:
    """Flags that are None were not given; an empty variable counts as unset.

    Raises ConfigError: an unknown key, an impossible or missing value, a file that can't be read. It names key, value and source.
    """
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    found: dict[str, tuple[object, str]] = {}
    if config_file is not None:
        found |= _from_file(config_file, process)
    found |= _from_environment(environ)
    found |= _from_flags(flags, cls)
    return _build(cls, {key: value for key, value in found.items() if key in cls.model_fields})


def _from_file(path: Path, process: Process) -> dict[str, tuple[object, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    found = {}
    for key, value in content.items():
        if key not in tables:
            _require_known(key, KNOWN_KEYS, f"{path}")
            found[key] = (value, f"{path}")
    for name, table in tables.items():
        found |= dict(_from_table(path, name, table, wanted=name == process))
    return found


def _from_table(path: Path, name: str, table: dict[str, object], *, wanted: bool) -> Iterator[tuple[str, tuple[object, str]]]:
    source = f"{path} [{name}]"
    cls = next((cls for process, cls in SETTINGS.items() if process == name), None)
    if cls is None:
        raise ConfigError(f"{path}: unknown table [{name}]{_suggest(name, SETTINGS)}; tables are {', '.join(SETTINGS)}")
    for key, value in table.items():
        _require_known(key, cls.model_fields, source)
        if wanted:
            yield key, (value, source)


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    known = {f"{ENVIRONMENT_PREFIX}{key.upper()}": key for key in KNOWN_KEYS}
    found: dict[str, tuple[object, str]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        _require_known(variable, known, "the environment")
        if text != "":
            found[known[variable]] = (text, variable)
    return found


def _from_flags(flags: Mapping[str, object], cls: type[Settings]) -> dict[str, tuple[object, str]]:
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        _require_known(key, cls.model_fields, "the command line")
    return {key: (value, f"--{key.replace('_', '-')}") for key, value in given.items()}


def _build(cls: type[SettingsT], found: Mapping[str, tuple[object, str]]) -> SettingsT:
    for key, (value, source) in found.items():
        # pydantic would take true for 1
        if isinstance(value, bool) and cls.model_fields[key].annotation not in (bool, bool | None):
            raise ConfigError(f"{key}={value!r} (from {source}) is not possible: it isn't a yes-or-no setting")
    try:
        return cls.model_validate({key: value for key, (value, _) in found.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if first["type"] == "missing":
            variable = f"{ENVIRONMENT_PREFIX}{key.upper()}"
            raise ConfigError(f"{key} is not set: give --{key.replace('_', '-')}, {variable} or {key} in the config file") from None
        value, source = found[key]
        raise ConfigError(f"{key}={value!r} (from {source}) is not possible: {first['msg'].removeprefix('Value error, ')}") from None


def _require_known(key: str, known: Mapping[str, object] | frozenset[str], source: str) -> None:
    if key not in known:
        raise ConfigError(f"unknown key {key!r} in {source}{_suggest(key, known)}")


def _suggest(key: str, known: Mapping[Any, object] | frozenset[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
