"""``baton chat``: a conversation on the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import httpx
import typer

from baton.console import baton_command, err, fail, out
from baton.sse import TIMEOUT, ServerError, error_text, stream_json

HELP = "/new forgets the conversation, /system TEXT sets the system prompt, /exit or Ctrl-D leaves; Ctrl-C stops an answer."


def command(
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's first.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default=False)] = None,
) -> None:
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    name = model or _first_model(url)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body: dict[str, Any] = {"model": name} | {key: value for key, value in options.items() if value is not None}
    err.print(f"[bold]{name}[/bold] at {url}")
    err.print(HELP, style="dim")
    _converse(url, body, system)


def _converse(url: str, body: dict[str, Any], system: str | None) -> None:
    history = _fresh(system)
    while True:
        try:
            text = out.input("[bold cyan]you ›[/bold cyan] ").strip()
        except KeyboardInterrupt:  # as in a shell: forget the line, not the conversation
            out.print()
            continue
        except EOFError:
            out.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            history = _fresh(system)
            err.print("[dim]a new conversation[/dim]")
        elif text.startswith("/system "):
            system = text.removeprefix("/system ")
            history = _fresh(system)
            err.print("[dim]a new conversation with that system prompt[/dim]")
        elif text.startswith("/"):
            err.print(HELP)
        elif text:
            history.append({"role": "user", "content": text})
            answer = asyncio.run(_answer(url, body | {"messages": history}))
            if answer is None:
                history.pop()
            else:
                history.append({"role": "assistant", "content": answer})


def _fresh(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


async def _answer(url: str, body: dict[str, Any]) -> str | None:
    """Stream one answer to the terminal. None: nothing usable came. Ctrl-C stops the answer and keeps what was said."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    said: list[str] = []
    out.print("[bold magenta]model ›[/bold magenta] ", end="")
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            async for event in stream_json(client, f"{url}/v1/chat/completions", body):
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    said.append(piece)
                    out.print(piece, end="", markup=False)
    except asyncio.CancelledError:
        out.print(" [dim](stopped)[/dim]", end="")
    except (ServerError, httpx.TransportError) as error:
        err.print(f"\n[bold red]error:[/bold red] {error}")
        return "".join(said) or None
    out.print()
    return "".join(said)


def _first_model(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=5.0, trust_env=False)
    except httpx.TransportError as error:
        fail(f"no server at {url} ({error}); start one with: {baton_command()} up")
    if answer.status_code != httpx.codes.OK:
        fail(error_text(answer.content, answer.status_code))
    return str(answer.json()["data"][0]["id"])
