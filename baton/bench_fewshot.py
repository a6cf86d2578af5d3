"""``baton bench fewshot``: many questions behind the same worked examples, and what the state audit says to that."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import httpx
import typer

from baton import load_options as options
from baton.console import errors_as_exit
from baton.load import Load, Output, drive
from baton.local_server import LocalOptions, Target
from loadgen.client import Client
from loadgen.fewshot import fewshot_prompts
from loadgen.plain import sessions_of
from loadgen.report import Slo

STEP_TOKENS = 8192


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
    step_tokens: options.StepTokens = None,
    reproduce: options.Reproduce = None,
    questions: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 200,
    shots: Annotated[int, typer.Option(min=0, help="Worked examples before each question, the same for all.")] = 20,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    seed: options.Seed = 0,
    arrival: options.ArrivalOption = options.ArrivalKind.CLOSED,
    rate: options.Rate = None,
    concurrency: options.Concurrency = 32,
    temperature: options.Temperature = 0.0,
    timeout: options.Timeout = 600.0,
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
        step_tokens=step_tokens or (STEP_TOKENS if url is None else None),
        max_running=concurrency if url is None else None,
        reproduce=reproduce,
    )
    with errors_as_exit():
        prompts = list(fewshot_prompts(seed, shots, questions, output_tokens))
        load = Load(
            title="bench fewshot",
            target=Target(url=url, model_name=model_name, api_key_env=api_key_env, local=local),
            arrival=options.arrival_of(arrival, rate, concurrency, seed),
            request={"temperature": temperature},
            timeout_s=timeout,
            sessions=questions,
            make_work=partial(sessions_of, prompts),
            settings={"shots": shots, "output_tokens": output_tokens},
            ask_afterwards=audit_of,
        )
    drive(load, Output(as_json=as_json, plot=plot, slo=Slo(slo_ttft, slo_itl), tokens=tokens))


async def audit_of(client: Client) -> dict[str, Any]:
    """What a Baton's state audit has found, for the report; nothing for other servers."""
    if client.server.owner != "baton":
        return {}
    answer = await client.http.get(f"{client.server.url}/audit")
    return {"audit": answer.json()} if answer.status_code == httpx.codes.OK else {}
