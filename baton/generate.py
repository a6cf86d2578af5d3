"""``baton generate``: answers in this single process, without a server. The plain process that the cluster must agree with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from baton.console import err, errors_as_exit, out
from baton.models import resolve_model
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine import Completion, Engine

Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts. Without any, standard input is one prompt.", show_default=False)]
Model = Annotated[Path | None, typer.Option(help="Checkpoint directory. Default: the shipped model.", show_default=False)]
PromptsFile = Annotated[Path | None, typer.Option(help="One prompt per line.", show_default=False)]


def command(
    prompts: Prompts = None,
    model: Model = None,
    prompts_file: PromptsFile = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1.0: all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's probability.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.")] = 0,
    speculation: Annotated[int, typer.Option(help="K, draft tokens per step, 0..7.")] = 0,
    kernels: Annotated[str, typer.Option(help="auto, native, torch or reference.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Default: all cores.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt on standard output.")] = False,
    policies: Annotated[str | None, typer.Option(envvar="BATON_POLICIES", hidden=True)] = None,
) -> None:
    with errors_as_exit():
        params = _params(max_tokens, temperature, top_k, top_p, min_p, seed)
        path = resolve_model(model)
        texts = _prompts(prompts, prompts_file)
        from engine import Engine
        from engine.policies import load_policies

        with Engine(path, policies=load_policies(policies), speculation=speculation, kernels=kernels, threads=threads) as engine:
            err.print(f"[dim]{path.name}: {engine.core.kernels.name} kernels ({engine.core.kernels.reason})[/dim]")
            if policies is not None:
                err.print(f"[bold red]policies from {policies} instead of ours: these answers can't be trusted[/bold red]")
            if len(texts) == 1 and not as_json:
                _stream(engine, texts[0], params)
            else:
                answers = engine.generate(texts, params, progress=len(texts) > 1 and sys.stderr.isatty())
                for text, answer in zip(texts, answers, strict=True):
                    _show(text, answer, as_json)


def _stream(engine: Engine, prompt: str, params: SamplingParams) -> None:
    out.print(prompt, style="dim", markup=False, end="")
    with engine.stream(prompt, params) as pieces:
        for piece in pieces:
            out.print(piece.text, markup=False, end="")
    out.print()


def _params(max_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> SamplingParams:
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"--{'.'.join(map(str, first['loc'])).replace('_', '-')}: {first['msg']}, not {first['input']!r}") from None


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    texts = list(given or ())
    if file is not None:
        try:
            texts += filter(None, _text(file.read_bytes(), f"prompts_file={file}").splitlines())
        except OSError as error:
            raise ValueError(f"prompts_file={file}: {error.strerror}") from None
    elif not texts:
        texts = [text] if (text := _text(sys.stdin.buffer.read(), "standard input")) else []
    if not texts:
        raise ValueError("no prompt: give it as an argument, with --prompts-file or on standard input")
    for text in texts:
        _text(text.encode(errors="surrogateescape"), f"prompt {text!r}")
    return texts


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def _show(prompt: str, answer: Completion, as_json: bool) -> None:
    if as_json:
        record = {"prompt": prompt, "text": answer.text, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason}
        print(json.dumps(record, ensure_ascii=False))
    else:
        out.print(prompt, style="dim", markup=False, end="")
        out.print(answer.text, markup=False)
