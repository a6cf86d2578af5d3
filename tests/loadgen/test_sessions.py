"""The agent loop over HTTP: with a server that plays the expert, and with servers that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadgen import metrics
from loadgen.client import Client, find_server, http_client
from loadgen.record import Session
from loadgen.recorded import Conversation, read_conversations, replay, write_conversations
from loadgen.run import Arrival, Run, Work
from loadgen.sse import ServerError
from loadgen.swe.agent import GO_ON, fix
from loadgen.swe.expert import expert_messages, foretell
from loadgen.swe.instance import Instance, make_instance
from loadgen.swe.tools import TOOLS
from tests.loadgen.expert_server import ExpertServer, call_in_one, call_in_pieces, serving

SEEDS = range(4)
MakeWork = Callable[[Client], Sequence[tuple[Session, Work]]]


async def run(server: ExpertServer, make_work: MakeWork, timeout_s: float = 100.0) -> Run:
    result = Run()
    async with http_client(None) as http:
        client = Client(http, await find_server(http, server.url), {"temperature": 0}, timeout_s)
        await result.go(make_work(client), Arrival(concurrency=3))
    return result


def agents(client: Client, max_turns: int = 16, retries: int = 0) -> list[tuple[Session, Work]]:
    """Without running any test: what the server says decides."""
    instances = [make_instance(seed) for seed in SEEDS]
    return [
        (Session(name=str(one.seed)), partial(fix, one, client, max_turns=max_turns, retries=retries, run_tests=foretell(one)))
        for one in instances
    ]


def real_agents(client: Client) -> list[tuple[Session, Work]]:
    return [(Session(name=str(seed)), partial(fix, make_instance(seed), client)) for seed in SEEDS]


def turns_of(run: Run) -> list[Any]:
    return [turn for session in run.sessions for turn in session.turns]


def without_ids(messages: list[dict[str, Any]]) -> list[Any]:
    def names(message: dict[str, Any]) -> list[Any]:
        return [call["function"] for call in message.get("tool_calls", ())]

    return [(message["role"], message["content"], names(message)) for message in messages]


@pytest.mark.parametrize("call", [call_in_one, call_in_pieces])
async def test_a_perfect_model_resolves_everything(call: Callable[[str, str], list[dict[str, Any]]]) -> None:
    with serving(ExpertServer(SEEDS, call=call)) as server:
        result = await run(server, real_agents)
    assert [session.resolved for session in result.sessions] == [True] * len(SEEDS)
    assert all(session.submitted for session in result.sessions)
    turns = turns_of(result)
    assert not metrics.count_symptoms(turns)
    assert not metrics.count_failures(turns)
    assert all(turn.ttft_s is not None and turn.ttft_s > 0 for turn in turns)
    assert sum(turn.cached_tokens for turn in turns) == 3 * len(turns)


async def test_a_session_is_what_the_training_data_is() -> None:
    with serving(ExpertServer(SEEDS)) as server:
        result = await run(server, real_agents)
    for session in result.sessions:
        assert without_ids(session.messages) == without_ids(expert_messages(make_instance(int(session.name))))


async def test_requests_have_nothing_that_only_some_servers_know() -> None:
    with serving(ExpertServer(SEEDS)) as server:
        await run(server, agents)
    known = {"model", "messages", "tools", "temperature", "seed", "stream", "stream_options"}
    assert {key for body in server.bodies for key in body} == known


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("429", "http 429"),
        ("500", "http 500"),
        ("disconnect", "connection"),
        ("error event", "error event"),
        ("no end", "stream"),
        ("not json", "stream"),
        ("hang", "timeout"),
    ],
)
async def test_a_failure_is_counted_and_ends_its_session_alone(fault: str, kind: str) -> None:
    def third_answer_of_one(instance: Instance, number: int) -> str | None:
        return fault if instance.seed == 2 and number == 2 else None

    with serving(ExpertServer(SEEDS, third_answer_of_one)) as server:
        result = await run(server, agents, timeout_s=1.0 if fault == "hang" else 100.0)
    assert metrics.count_failures(turns_of(result)) == {kind: 1}
    assert {session.name for session in result.sessions if not session.resolved} == {"2"}
    (failed,) = [session for session in result.sessions if session.failure]
    assert (failed.name, len(failed.turns)) == ("2", 3)


async def test_another_try_is_counted_too_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.swe.agent.RETRY_AFTER_S", 0.0)
    failed: list[int] = []

    def once(instance: Instance, number: int) -> str | None:
        if instance.seed == 2 and number == 2 and not failed:
            failed.append(number)
            return "500"
        return None

    with serving(ExpertServer(SEEDS, once)) as server:
        result = await run(server, partial(agents, retries=1))
    assert metrics.count_failures(turns_of(result)) == {"http 500": 1}
    assert all(session.resolved and session.failure is None for session in result.sessions)


@pytest.mark.parametrize(
    ("said", "symptoms"),
    [
        ('<tool_call>\n{"name": "te', {"tool markup in text", "missing tool call"}),
        ("caf\ufffd", {"replacement characters", "missing tool call"}),
        ("a\x00b", {"broken bytes", "missing tool call"}),
        ("", {"empty answer", "missing tool call"}),
        ("Let me see.", {"missing tool call"}),
    ],
)
async def test_symptoms_are_counted_and_the_session_goes_on(said: str, symptoms: set[str]) -> None:
    with serving(ExpertServer(SEEDS, lambda instance, number: said if instance.seed == 1 and number == 1 else None)) as server:
        result = await run(server, agents)
    assert metrics.count_symptoms(turns_of(result)) == dict.fromkeys(symptoms, 1)
    assert all(session.resolved for session in result.sessions)
    (told,) = [session.messages for session in result.sessions if session.name == "1"]
    assert {"role": "user", "content": GO_ON} in told


async def test_calls_that_are_none_are_answered_with_errors() -> None:
    def broken(name: str, arguments: str) -> list[dict[str, Any]]:
        return call_in_one("tset" if name == "test" else name, arguments[:-1])

    with serving(ExpertServer(SEEDS, call=broken)) as server:
        result = await run(server, partial(agents, max_turns=4))
    assert not any(session.resolved or session.submitted for session in result.sessions)
    assert metrics.count_symptoms(turns_of(result)) == {"call that is none": 4 * len(SEEDS)}
    answers = {message["content"] for session in result.sessions for message in session.messages if message["role"] == "tool"}
    assert answers == {"error: there is no tool 'tset'", "error: the arguments are not JSON"}


async def test_recorded_conversations_are_the_same_load_again(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    with serving(ExpertServer(SEEDS)) as server:
        first = await run(server, agents)
        write_conversations(path, [Conversation(session.name, session.messages, TOOLS) for session in first.sessions])
        asked = list(server.bodies)
        server.bodies.clear()
        again = await run(
            server, lambda client: [(Session(name=one.name), partial(replay, one, client)) for one in read_conversations(path)]
        )
    assert all(session.resolved is None for session in again.sessions)
    assert not metrics.count_symptoms(turns_of(again))

    def key(body: dict[str, Any]) -> str:
        return str(body["messages"])

    assert sorted(map(key, server.bodies)) == sorted(map(key, asked))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no conversations"),
        ("{", "line 1 is not JSON"),
        ('\n{"messages": 1}', "line 2 has no array of messages"),
        ('{"messages": [{"role": "user"}]}', "line 1 has no assistant message"),
    ],
)
def test_a_bad_recording_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        read_conversations(path)


async def test_no_server_is_said_plainly() -> None:
    async with http_client(None) as http:
        with pytest.raises(ServerError, match="no server at"):
            await find_server(http, "http://127.0.0.1:9")
