"""``baton chat``: a conversation on the terminal, with an OpenAI-compatible server or with a cluster of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from baton.cluster import ClusterError
from baton.console import baton_command, complain, err, errors_as_exit, fail, harmless, out
from baton.conversation import Conversation, read_tools
from baton.line_input import LineInput, coloured, state_file
from baton.own_cluster import cluster_in_background, plan_own_cluster
from baton.reply import Figures, Reply
from loadgen.sse import TIMEOUT, ServerError, error_text, stream_json

EXIT_STOPPED = 130
CYAN = 36
YELLOW = 33


def command(
    url: Annotated[str | None, typer.Option(help="A running server. Default: start a cluster for this chat.", show_default=False)] = None,
    model_name: Annotated[str | None, typer.Option(help="With --url: which model. Default: its first.", show_default=False)] = None,
    model: Annotated[
        Path | None, typer.Option(help="Without --url: checkpoint directory. Default: the shipped model.", show_default=False)
    ] = None,
    speculation: Annotated[int | None, typer.Option(help="Without --url: K, draft tokens per step, 0..7.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON array of functions that the model may call; you give the results.", show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default=False)] = None,
) -> None:
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {key: value for key, value in options.items() if value is not None}
    with errors_as_exit():
        conversation = Conversation(system, read_tools(tools) if tools else [])
        if url is not None and (model is not None or speculation is not None):
            raise ValueError("--model and --speculation are for a cluster of its own; with --url there is --model-name")
        if url is None and model_name is not None:
            raise ValueError("--model-name goes with --url; a cluster of its own has one model, --model")
        plan = None if url else plan_own_cluster(model, speculation)
    try:
        lines = LineInput(state_file("chat_history"), list(COMMANDS))
    except OSError as error:
        fail(f"the history of earlier chats can't be used: {error}")
    if plan:
        err.print("[dim]starting a cluster for this chat; --url talks to one that runs already …[/dim]")
    try:
        with cluster_in_background(plan) if plan else nullcontext():
            server = Server.find(plan.url if plan else _with_scheme(url or ""), model_name)
            Chat(server, given, conversation, lines).run()
    except ClusterError as error:
        fail(str(error))
    except KeyboardInterrupt:  # while the cluster started
        fail("stopped", EXIT_STOPPED)


def _with_scheme(url: str) -> str:
    return url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: str
    extensions: dict[str, Any]
    """Of the request, for servers that are known to have them."""

    @classmethod
    def find(cls, url: str, model: str | None) -> Server:
        """Ends the command when there is none."""
        try:
            answer = httpx.get(f"{url}/v1/models", timeout=5.0, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fail(f"no server at {url} ({error}); start one with: {baton_command()} up")
        if answer.status_code != httpx.codes.OK:
            fail(error_text(answer.content, answer.status_code))
        try:
            cards = answer.json()["data"]
            first = cards[0]
            name, owner = str(first["id"]), first.get("owned_by")
        except (ValueError, LookupError, TypeError, AttributeError):
            fail(f"{url}/v1/models doesn't list models; is it an OpenAI-compatible server?")
        usage = {"include_usage": True}
        if owner == "baton":
            return cls(url, model or name, {"stream_options": usage | {"continuous_usage_stats": True}, "return_timings": True})
        return cls(url, model or name, {"stream_options": usage})


@dataclass(slots=True)
class Chat:
    server: Server
    options: dict[str, Any]
    """Of each request, from the command line."""
    conversation: Conversation
    lines: LineInput
    figures: list[Figures] = field(default_factory=list)

    def run(self) -> None:
        """Until Ctrl-D or /quit."""
        err.print(f"[bold]{harmless(self.server.model)}[/bold] at {self.server.url}")
        if self.lines.is_terminal:
            err.print("[dim]/help tells what there is; Ctrl-C stops an answer, Ctrl-D leaves[/dim]")
        while True:
            try:
                self._turn(self.lines.read(coloured("you › ", CYAN)).strip())
            except KeyboardInterrupt:  # as in a shell: forget the line, not the conversation
                out.print()
            except EOFError:
                if self.lines.is_terminal:
                    out.print()
                return

    def _turn(self, line: str) -> None:
        if not line.startswith("/"):
            if line:
                self._ask({"role": "user", "content": line})
            return
        name, _, rest = line.partition(" ")
        if name not in COMMANDS:
            err.print(f"there is no {harmless(name)}; /help tells what there is", markup=False)
            return
        COMMANDS[name].run(self, rest.strip())

    def _ask(self, *new: dict[str, Any]) -> None:
        """Send what was said and show the answer, as long as the model calls functions. An exchange that fails isn't kept."""
        turns = self.conversation.turns
        before = len(turns)
        while True:
            reply = asyncio.run(self._answer(self.options | self.conversation.body(*new)))
            if reply is None:
                del turns[before:]
                return
            turns += [*new, reply.message()]
            self.figures.append(reply.figures)
            if not reply.awaited:
                return
            new = tuple(self._result(call.name, call.call_id) for call in reply.awaited)

    def _result(self, name: str, call_id: str) -> dict[str, Any]:
        """Ctrl-C and Ctrl-D answer with nothing: the conversation can't go on without any result."""
        try:
            text = self.lines.read(coloured(f"result of {harmless(name)} › ", YELLOW))
        except (KeyboardInterrupt, EOFError):
            out.print()
            text = ""
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    async def _answer(self, body: dict[str, Any]) -> Reply | None:
        """Stream one answer to the terminal. None: nothing to keep. Ctrl-C stops the answer and keeps what was said."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        reply, how = Reply(), ""
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
                request = {"model": self.server.model} | self.server.extensions | body
                async for event in stream_json(client, f"{self.server.url}/v1/chat/completions", request):
                    self._show(reply.take(event))
        except asyncio.CancelledError:
            how = "stopped"
        except (ServerError, httpx.HTTPError) as error:
            self._show("\n" if reply.content else "")
            complain(harmless(str(error) or type(error).__name__))
            return None
        self._show(reply.finish() + ("\n" if reply.content or how else ""))
        for call in reply.calls:
            out.print(f"→ {harmless(call.name)} {harmless(call.arguments)}", markup=False, style="yellow")
        if reply.finish_reason == "length":
            how = "max tokens reached"
        err.print(" · ".join(part for part in (str(reply.figures), how) if part), style="dim")
        return reply if reply.content or reply.calls else None

    def _show(self, text: str) -> None:
        out.print(harmless(text), end="", markup=False)

    # ---- commands

    def _help(self, _: str) -> None:
        for name, described in COMMANDS.items():
            err.print(f"  {name + described.takes:16}{described.about}", markup=False)
        err.print("  a backslash at a line's end goes on in the next; ↑ brings back earlier lines", markup=False)

    def _new(self, _: str) -> None:
        self.conversation.turns.clear()
        err.print("[dim]a new conversation[/dim]")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        err.print(f"system prompt: {harmless(self.conversation.system or '(none)')}", markup=False)

    def _save(self, name: str) -> None:
        if not name:
            err.print("/save needs a file's name")
            return
        try:
            self.conversation.save(Path(name).expanduser())
        except OSError as error:
            err.print(f"not saved: {name}: {error.strerror}", markup=False)
        else:
            err.print(f"saved {len(self.conversation.turns)} messages in {name}", markup=False)

    def _stats(self, _: str) -> None:
        err.print(f"{len(self.figures)} answers · {Figures.total(self.figures)}".removesuffix(" · "), markup=False)

    def _quit(self, _: str) -> None:
        raise EOFError


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[Chat, str], None]
    about: str
    takes: str = ""


COMMANDS = {
    "/help": Command(Chat._help, "this"),
    "/new": Command(Chat._new, "forget the conversation, keep the system prompt"),
    "/clear": Command(Chat._new, "the same"),
    "/system": Command(Chat._system, "show or set the system prompt", " [TEXT]"),
    "/save": Command(Chat._save, "write the conversation to a file, as JSON that can be sent again", " FILE"),
    "/stats": Command(Chat._stats, "tokens, speed and drafts of all answers so far"),
    "/quit": Command(Chat._quit, "leave, like Ctrl-D"),
    "/exit": Command(Chat._quit, "the same"),
}
