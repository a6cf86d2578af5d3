"""``baton chat`` at a real terminal: what a person sees, and what the server gets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cli.terminal_kit import (
    CTRL_C,
    CTRL_D,
    CUT,
    HANG,
    PATIENCE_S,
    UP,
    Terminal,
    delta,
    environment,
    says,
    scrambled_model,
    scripted_server,
)

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "prices.py"}}\n</tool_call>'


@pytest.fixture
def state(tmp_path: Path) -> str:
    """Where the history of earlier chats lies."""
    return str(tmp_path / "state")


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_cluster_of_its_own_answers_and_ctrl_c_frees_what_the_answer_held(state: str, tmp_path: Path) -> None:
    model = scrambled_model(tmp_path / "endless")
    with Terminal("chat", "--model", str(model), "--seed", "1", "--max-tokens", "3000", XDG_STATE_HOME=state) as chat:
        url = chat.expect(r"endless at (http://\S+)").group(1)
        chat.expect("you ›")
        children = psutil.Process(chat.process.pid).children()
        chat.enter("Tell me everything")
        chat.expect(r"everything\n.{60}")  # its echo, then a few steps' tokens
        chat.type(CTRL_C)
        chat.expect(r"\d+ tokens · first after \d+ ms[^\n]* · stopped")
        until_whole(url)
        chat.expect("you ›")
        chat.enter("/stats")
        chat.expect(r"1 answers · \d+ tokens")
        chat.expect("you ›")
        chat.type(CTRL_D)
        assert chat.exit_code() == 0
    assert len(children) == 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def until_whole(url: str) -> None:
    """No request runs, and every page of every worker is free."""
    until = time.monotonic() + PATIENCE_S
    while True:
        health = httpx.get(f"{url}/health", timeout=5).json()
        free = all(
            worker["load"]["free_blocks"] == worker["capacity"]["kv_blocks"] - 1
            and worker["load"]["free_slots"] == worker["capacity"]["state_slots"] - 1
            for worker in health["workers"]
        )
        if free and health["requests"] == {"running": 0, "waiting": 0}:
            return
        assert time.monotonic() < until, health
        time.sleep(0.05)


def test_a_conversation_goes_on_until_it_is_forgotten_and_can_be_saved(state: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answers = [says("bl", "ue", usage={"completion_tokens": 2}), says("deep"), says("new")]
    with scripted_server(answers) as server, Terminal("chat", "--url", server.url, "--system", "Be brief", XDG_STATE_HOME=state) as chat:
        chat.enter("Which colour?")
        chat.expect(r"blue\n2 tokens · first after")
        chat.enter("Which tone?")
        chat.expect(r"deep\n")
        chat.enter(f"/save {file}")
        chat.expect("saved 4 messages")
        chat.enter("/system Be long")
        chat.expect("system prompt: Be long")
        chat.enter("/new")
        chat.expect("a new conversation")
        chat.enter("From here \\")
        chat.enter("on")
        chat.expect(r"new\n")
        chat.enter("/nonsense")
        chat.expect("there is no /nonsense")
        chat.enter("/help")
        chat.expect("/save FILE")
        chat.enter("/quit")
        assert chat.exit_code() == 0
    first, second, third = server.heard
    assert contents(first) == ["Be brief", "Which colour?"]
    assert contents(second) == ["Be brief", "Which colour?", "blue", "Which tone?"]
    assert contents(third) == ["Be long", "From here \non"]
    assert first["temperature"] == 0.7
    assert json.loads(file.read_text())["messages"] == [*second["messages"], {"role": "assistant", "content": "deep"}]


def test_ctrl_c_leaves_the_server_before_the_first_token_and_the_chat_goes_on(state: str) -> None:
    answers = [[HANG], [delta(content="half an answer"), HANG], says("whole")]
    with scripted_server(answers) as server, Terminal("chat", "--url", server.url, XDG_STATE_HOME=state) as chat:
        chat.expect("you ›")
        chat.enter("first")
        until_heard(server.heard, 1)
        chat.type(CTRL_C)
        chat.expect("stopped")
        assert server.left.wait(PATIENCE_S)
        chat.enter("second")
        chat.expect("half an answer")
        chat.type(CTRL_C)
        chat.expect("stopped")
        chat.enter("third")
        chat.expect("whole")
        assert chat.process.poll() is None
    assert contents(server.heard[2]) == ["second", "half an answer", "third"], "what was said is kept, a question without answer isn't"


def until_heard(heard: list[Any], count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(heard) < count:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_errors_are_told_plainly_and_what_failed_is_not_kept(state: str) -> None:
    answers = [
        (400, {"error": {"message": "too long by half", "type": "x", "code": "y"}}),
        (502, "no such luck"),
        [delta(content="some"), {"error": {"message": "the decode worker was lost"}}],
        [delta(content="some"), CUT],
        ["{not json"],
        says("at last"),
    ]
    with scripted_server(answers) as server, Terminal("chat", "--url", server.url, XDG_STATE_HOME=state) as chat:
        for told in ("too long by half .HTTP 400.", "HTTP 502: .no such luck", "decode worker was lost", r"without \[DONE\]", "isn't JSON"):
            chat.enter("question")
            chat.expect(f"error: [^\n]*{told}")
        chat.enter("again")
        chat.expect("at last")
        assert contents(server.heard[-1]) == ["again"]
    assert chat.process.returncode == -9, "it was still there"


def test_a_server_that_goes_away_is_an_error_and_not_the_end(state: str) -> None:
    with scripted_server([]) as server:
        chat = Terminal("chat", "--url", server.url, XDG_STATE_HOME=state)
        chat.expect("you ›")
    with chat:
        chat.enter("anybody?")
        chat.expect("error: ")
        chat.expect("you ›")
        chat.type(CTRL_D)
        assert chat.exit_code() == 0


def test_calls_are_shown_as_calls_and_their_results_go_back(state: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "list", "parameters": {"type": "object"}}}]))
    called = [
        delta(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "list", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"all": true}'}}]),
        "[DONE]",
    ]
    answers = [called, says("two files"), says("Look: ", CALL[:20], CALL[20:])]
    with (
        scripted_server(answers) as server,
        Terminal("chat", "--url", server.url, "--tools", str(tools), XDG_STATE_HOME=state) as chat,
    ):
        chat.enter("What is there?")
        chat.expect(r'→ list \{"all": true\}')
        chat.expect("result of list ›")
        chat.enter("a.py b.py")
        chat.expect("two files")
        chat.enter("And markup")
        shown = chat.expect(r'Look:(.*)→ read \{"path": "prices.py"\}').group(1)
        assert "tool_call" not in shown
    first, second, third = server.heard
    assert first["tools"] == json.loads(tools.read_text())
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "list", "arguments": '{"all": true}'}
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "a.py b.py"}
    assert third["messages"][-2]["content"] == "two files"


def test_lines_of_an_earlier_chat_come_back(state: str) -> None:
    with scripted_server([says("one"), says("two")]) as server:
        for keys, told in (("a remarkable line", "one"), (UP, "two")):
            with Terminal("chat", "--url", server.url, XDG_STATE_HOME=state) as chat:
                chat.expect("you ›")
                chat.enter(keys)
                chat.expect(f"{told}\n.*you ›")
                chat.type(CTRL_D)
                assert chat.exit_code() == 0
    assert [contents(body) for body in server.heard] == [["a remarkable line"]] * 2


def test_a_pipe_gets_the_answers_alone_and_nothing_can_steer_a_terminal(state: str) -> None:
    with scripted_server([says("first \x1b[2J:warning: [bold]"), says("second")]) as server:
        told = subprocess.run(
            [sys.executable, "-m", "baton", "chat", "--url", server.url],
            input="one\ntwo\n", capture_output=True, text=True, timeout=PATIENCE_S, env=environment(XDG_STATE_HOME=state),
        )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert told.stdout == "first ␛[2J:warning: [bold]\nsecond\n"
    assert contents(server.heard[1]) == ["one", "first \x1b[2J:warning: [bold]", "two"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--url", "http://127.0.0.1:9", "--model", "/tmp"), "--model: "),
        (("--tools", "/nowhere"), "tools=/nowhere"),
        (("--speculation", "9"), "speculation=9"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(args: tuple[str, ...], named: str, state: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "baton", "chat", *args], capture_output=True, text=True, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL, env=environment(XDG_STATE_HOME=state),
    )  # fmt: skip
    assert told.returncode == 2, told.stderr
    assert named in told.stderr, told.stderr
    assert "Traceback" not in told.stderr
