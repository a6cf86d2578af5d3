"""``baton bench serve``: plain prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from baton import load_options as options
from baton.console import errors_as_exit
from baton.load import Load, Output, drive
from baton.local_server import LocalOptions, Target
from loadgen.plain import sessions_of
from loadgen.prompts import MEANS, Lengths, Shape, file_prompts, random_prompts, read_prompts
from loadgen.report import Slo


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
    requests: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 100,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="One prompt per line, or .jsonl with strings or {prompt}. Default: random words.", show_default=False),
    ] = None,
    lengths: Annotated[Shape, typer.Option(help="uniform: mean ± half; sharegpt: lognormal, with a long tail.")] = Shape.UNIFORM,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Mean words of a random prompt. Default 128; sharegpt 161.", show_default=False)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=2, help="Mean tokens of an answer. Default 64; sharegpt 338.", show_default=False)
    ] = None,
    seed: options.Seed = 0,
    arrival: options.ArrivalOption = options.ArrivalKind.CLOSED,
    rate: options.Rate = None,
    concurrency: options.Concurrency = 8,
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
        reproduce=reproduce,
    )
    with errors_as_exit():
        drawn = Lengths(lengths, prompt_tokens or MEANS[lengths][0], output_tokens or MEANS[lengths][1])
        prompts = list(
            file_prompts(read_prompts(prompts_file), seed, requests, drawn) if prompts_file else random_prompts(seed, requests, drawn)
        )
        load = Load(
            title="bench serve",
            target=Target(url=url, model_name=model_name, api_key_env=api_key_env, local=local),
            arrival=options.arrival_of(arrival, rate, concurrency, seed),
            request={"temperature": temperature},
            timeout_s=timeout,
            sessions=requests,
            make_work=partial(sessions_of, prompts),
            settings={"lengths": lengths, "prompt_tokens": drawn.prompt, "output_tokens": drawn.output},
        )
    drive(load, Output(as_json=as_json, plot=plot, slo=Slo(slo_ttft, slo_itl), tokens=tokens))
