"""``baton bench swe``: agents that fix bugs, and how many of them do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from baton import load_options as options
from baton.console import errors_as_exit
from baton.load import Load, MakeWork, Output, drive
from baton.local_server import LocalOptions, Target
from loadgen.client import Client
from loadgen.record import Session
from loadgen.recorded import Conversation, read_conversations, replay, write_conversations
from loadgen.report import Slo
from loadgen.run import Work
from loadgen.swe.agent import MAX_TURNS, fix
from loadgen.swe.instance import FIRST_TRAINING_SEED, make_instance
from loadgen.swe.tools import TOOLS

MAX_TOKENS = 256


def command(
    url: options.Url = None,
    model_name: options.ModelName = None,
    api_key_env: options.ApiKeyEnv = "OPENAI_API_KEY",
    model: options.Model = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    speculation: options.Speculation = None,
    threads: options.Threads = None,
    prefix_cache: options.PrefixCache = None,
    reproduce: options.Reproduce = None,
    instances: Annotated[int, typer.Option(min=1, help="How many bugs.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the first instance; the next ones count up.")] = 0,
    arrival: options.ArrivalOption = options.ArrivalKind.CLOSED,
    rate: options.Rate = None,
    concurrency: options.Concurrency = 8,
    temperature: options.Temperature = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = MAX_TOKENS,
    max_turns: Annotated[int, typer.Option(min=1, help="Answers in a session, at most.")] = MAX_TURNS,
    timeout: options.Timeout = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="More tries after an answer that failed; each failure is counted.")] = 0,
    sessions_file: Annotated[
        Path | None, typer.Option(help="Recorded conversations to play instead, one JSON object per line.", show_default=False)
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the conversations there, for --sessions-file.", show_default=False)] = None,
    as_json: options.Json = False,
    tokens: options.Tokens = False,
    plot: options.Plot = None,
    slo_ttft: options.SloTtft = None,
    slo_itl: options.SloItl = None,
) -> None:
    local = LocalOptions(
        model=model,
        prefill=prefill,
        decode=decode,
        speculation=speculation,
        threads=threads,
        prefix_cache=prefix_cache,
        reproduce=reproduce,
    )
    recorded: list[Conversation] = []
    with errors_as_exit():
        if sessions_file and record:
            raise ValueError("--record has nothing to write with --sessions-file")
        sessions, make_work = _recorded(sessions_file) if sessions_file else _instances(seed, instances, max_turns, retries)
        load = Load(
            title="bench swe",
            target=Target(url=url, model_name=model_name, api_key_env=api_key_env, local=local),
            arrival=options.arrival_of(arrival, rate, concurrency, seed),
            request={"temperature": temperature, "max_tokens": max_tokens},
            timeout_s=timeout,
            sessions=sessions,
            make_work=make_work,
            settings={"max_turns": max_turns, "retries": retries},
            on_session=lambda session: recorded.append(Conversation(session.name, session.messages, TOOLS)),
        )
    try:
        drive(load, Output(as_json=as_json, plot=plot, slo=Slo(slo_ttft, slo_itl), tokens=tokens))
    finally:
        if record:
            with errors_as_exit():
                write_conversations(record, recorded)


def _instances(seed: int, count: int, max_turns: int, retries: int) -> tuple[int, MakeWork]:
    if seed + count > FIRST_TRAINING_SEED:
        raise ValueError(f"--seed and --instances reach {seed + count}: seeds from {FIRST_TRAINING_SEED} on are for training")

    def make_work(client: Client) -> Sequence[tuple[Session, Work]]:
        found = [make_instance(number) for number in range(seed, seed + count)]
        return [
            (Session(name=str(one.seed), kind=one.kind), partial(fix, one, client, max_turns=max_turns, retries=retries)) for one in found
        ]

    return count, make_work


def _recorded(path: Path) -> tuple[int, MakeWork]:
    conversations = read_conversations(path)

    def make_work(client: Client) -> Sequence[tuple[Session, Work]]:
        return [(Session(name=one.name), partial(replay, one, client)) for one in conversations]

    return len(conversations), make_work
