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

from baton import load_options as options
from baton.cluster import ClusterError
from baton.console import EXIT_STOPPED, complain, err, errors_as_exit, fail, harmless, out
from baton.conversation import Conversation, read_tools
from baton.line_input import LineInput, coloured, state_file
from baton.local_server import LocalOptions, Target
from baton.own_cluster import cluster_in_background
from baton.reply import Reply, figures
from loadgen.client import Server, find_server, http_client
from loadgen.record import Turn, turn_of
from loadgen.sse import ServerError, stream_json

CYAN = 36
YELLOW = 33


def command(
    url: Annotated[str | None, typer.Option(help="A running server. Default: start a cluster for this chat.", show_default=False)] = None,
    model_name: options.ModelName = None,
    api_key_env: options.ApiKeyEnv = "OPENAI_API_KEY",
    model: options.Model = None,
    speculation: options.Speculation = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON array of functions that the model may call; you give the results.", show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.", show_default=False)] = None,
    temperature: options.Temperature = 0.7,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default=False)] = None,
) -> None:
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {key: value for key, value in fields.items() if value is not None}
    target = Target(url=url, model_name=model_name, api_key_env=api_key_env, local=LocalOptions(model=model, speculation=speculation))
    with errors_as_exit():
        conversation = Conversation(system, read_tools(tools) if tools else [])
        plan = target.check()
    try:
        lines = LineInput(state_file("chat_history"), list(COMMANDS))
    except OSError as error:
        fail(f"the history of earlier chats can't be used: {error}")
    if plan:
        err.print("[dim]starting a cluster for this chat; --url talks to one that runs already …[/dim]")
    try:
        with cluster_in_background(plan) if plan else nullcontext():
            server = asyncio.run(_find(plan.url if plan else target.running_url, target))
            Chat(server, target.api_key(), given, conversation, lines).run()
    except ClusterError as error:
        fail(str(error))
    except ServerError as error:
        fail(f"{error}; without --url a cluster is started for this chat")
    except KeyboardInterrupt:  # while the cluster started
        fail("stopped", EXIT_STOPPED)


async def _find(url: str, target: Target) -> Server:
    async with http_client(target.api_key()) as http:
        return await find_server(http, url, target.model_name)


@dataclass(slots=True)
class Chat:
    server: Server
    api_key: str | None
    fields: dict[str, Any]
    """Of each request, from the command line."""
    conversation: Conversation
    lines: LineInput
    answered: list[Turn] = field(default_factory=list)

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
            reply = asyncio.run(self._answer(self.fields | self.conversation.body(*new)))
            if reply is None:
                del turns[before:]
                return
            turns += [*new, reply.answer.message()]
            self.answered.append(turn_of(reply.answer, reply.answer.asked_at))
            if not reply.answer.calls:
                return
            new = tuple(self._result(call.name, call.call_id) for call in reply.answer.calls)

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
            async with http_client(self.api_key) as http:
                request = {"model": self.server.model} | self.server.extensions | body
                async for event in stream_json(http, f"{self.server.url}/v1/chat/completions", request):
                    self._show(reply.take(event))
        except asyncio.CancelledError:
            how = "stopped"
        except (ServerError, httpx.HTTPError) as error:
            self._show("\n" if reply.answer.text else "")
            complain(harmless(str(error) or type(error).__name__))
            return None
        self._show(reply.finish() + ("\n" if reply.answer.text or how else ""))
        for call in reply.calls:
            out.print(f"→ {harmless(call.name)} {harmless(call.arguments)}", markup=False, style="yellow")
        if reply.answer.finish_reason == "length":
            how = "max tokens reached"
        told = figures([turn_of(reply.answer, reply.answer.asked_at)])
        err.print(" · ".join(part for part in (told, how) if part), style="dim")
        return reply if reply.answer.text or reply.answer.calls else None

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
        err.print(" · ".join(part for part in (f"{len(self.answered)} answers", figures(self.answered)) if part))

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
