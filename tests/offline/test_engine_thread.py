"""The engine thread: order of calls, idle rest, clean ends, and crashes that nobody can miss."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest

from engine.request import EngineEvent, StartedEvent
from engine.thread import EngineThread
from protocol.errors import EngineStopped
from protocol.ids import RequestId, RequestKey

WAIT_S = 60.0


def event(number: int) -> EngineEvent:
    return StartedEvent(key=RequestKey(RequestId("r"), number))


class CountingCore:
    """Has work for ``steps`` steps; each gives one event."""

    def __init__(self) -> None:
        self.steps = 0
        self.done = 0
        self.looked = 0
        self.threads: set[int] = set()
        self.in_step: Callable[[], None] = lambda: None

    def has_work(self) -> bool:
        self.looked += 1
        return self.done < self.steps

    def step(self) -> list[EngineEvent]:
        self.threads.add(threading.get_ident())
        self.in_step()
        self.done += 1
        return [event(self.done)] if self.done % 2 else []


def add_steps(count: int) -> Callable[[CountingCore], int]:
    def add(core: CountingCore) -> int:
        core.threads.add(threading.get_ident())
        core.steps += count
        return core.steps

    return add


@pytest.fixture
def core() -> CountingCore:
    return CountingCore()


@pytest.fixture
def engine(core: CountingCore) -> Iterator[EngineThread[CountingCore]]:
    thread = EngineThread(core)
    yield thread
    thread.stop(WAIT_S)
    assert not thread.running


def test_calls_and_steps_run_on_one_other_thread_and_events_arrive_in_order(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    seen: list[EngineEvent] = []
    enough = threading.Event()

    def collect(events: list[EngineEvent]) -> None:
        assert events
        seen.extend(events)
        if len(seen) == 3:
            enough.set()

    engine.on_events(collect)
    engine.start()
    assert engine.call(add_steps(6)).result(WAIT_S) == 6
    assert enough.wait(WAIT_S)
    assert seen == [event(1), event(3), event(5)]
    assert len(core.threads) == 1
    assert threading.get_ident() not in core.threads


def test_calls_keep_their_order_and_may_come_before_the_start(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    order: list[int] = []
    futures = [engine.call(lambda _, i=i: order.append(i)) for i in range(50)]  # type: ignore[misc]
    engine.start()
    futures += [engine.call(lambda _, i=i: order.append(i)) for i in range(50, 100)]  # type: ignore[misc]
    wait(futures, WAIT_S)
    assert order == list(range(100))


def test_calls_get_in_between_steps(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    core.steps = 1_000_000_000
    core.in_step = lambda: time.sleep(0.001)
    engine.start()
    first = engine.call(lambda core: core.done).result(WAIT_S)
    assert engine.call(lambda core: core.done).result(WAIT_S) >= first


def test_an_idle_engine_sleeps(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    engine.start()
    engine.call(lambda core: None).result(WAIT_S)
    before = core.looked
    time.sleep(0.1)
    assert core.looked - before <= 4  # one round at most before it falls asleep; spinning would be thousands


def test_an_exception_in_a_call_belongs_to_the_caller(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    def refuse(core: CountingCore) -> None:
        raise ValueError("no room")

    engine.start()
    with pytest.raises(ValueError, match="no room"):
        engine.call(refuse).result(WAIT_S)
    assert engine.call(add_steps(1)).result(WAIT_S) == 1
    assert engine.failed is None


def test_a_cancelled_call_is_not_run(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    future = engine.call(add_steps(5))
    assert future.cancel()
    engine.start()
    assert engine.call(lambda core: core.steps).result(WAIT_S) == 0


def test_stop_finishes_the_calls_made_before_and_refuses_those_after(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    core.steps = 1_000_000_000
    core.in_step = lambda: time.sleep(0.001)
    engine.start()
    before = [engine.call(lambda core: "done") for _ in range(20)]
    engine.stop(WAIT_S)
    engine.stop(WAIT_S)
    assert [future.result(0) for future in before] == ["done"] * 20
    with pytest.raises(EngineStopped, match="stopped"):
        engine.call(add_steps(1)).result(0)
    assert engine.failed is None


def test_stop_wakes_an_idle_engine_at_once(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    with engine:  # the end of this waits for the thread: one that slept on would hang here
        engine.call(lambda core: None).result(WAIT_S)
    assert not engine.running


def test_an_engine_that_never_started_refuses(engine: EngineThread[CountingCore]) -> None:
    early = engine.call(add_steps(1))
    engine.stop(WAIT_S)
    for future in (early, engine.call(add_steps(1))):
        with pytest.raises(EngineStopped, match="never started"):
            future.result(0)


def test_stop_says_when_a_step_does_not_end(core: CountingCore, engine: EngineThread[CountingCore]) -> None:
    release = threading.Event()
    core.steps, core.in_step = 1, lambda: assert_set(release)
    engine.start()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        engine.stop(0.05)
    release.set()


def assert_set(release: threading.Event) -> None:
    assert release.wait(WAIT_S)


class TestCrash:
    @pytest.fixture(autouse=True)
    def log(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.CRITICAL, logger="engine.thread")
        return caplog

    def crash(self, core: CountingCore, engine: EngineThread[CountingCore]) -> list[BaseException]:
        """Crash in a step while calls are pending. Returns what the failure callback got."""
        told: list[BaseException] = []
        reached, release = threading.Event(), threading.Event()

        def fail() -> None:
            reached.set()
            assert release.wait(WAIT_S)
            raise ZeroDivisionError("in the step")

        core.in_step = fail
        engine.on_failed(told.append)
        engine.start()
        engine.call(add_steps(1)).result(WAIT_S)
        assert reached.wait(WAIT_S)
        self.pending = [engine.call(lambda core: None) for _ in range(3)]
        release.set()
        wait(self.pending, WAIT_S)
        engine.stop(WAIT_S)
        return told

    def test_reaches_pending_and_later_calls_the_property_the_callback_and_the_log(
        self, core: CountingCore, engine: EngineThread[CountingCore], log: pytest.LogCaptureFixture
    ) -> None:
        told = self.crash(core, engine)
        assert isinstance(engine.failed, ZeroDivisionError)
        assert told == [engine.failed]
        for future in (*self.pending, engine.call(lambda core: None)):
            with pytest.raises(EngineStopped, match=r"ZeroDivisionError.*in the step") as caught:
                future.result(0)
            assert caught.value.__cause__ is engine.failed
        assert "the engine thread failed" in log.text
        assert not engine.running

    def test_of_an_event_callback_counts_as_one(self, core: CountingCore, engine: EngineThread[CountingCore]) -> None:
        def fail(events: list[EngineEvent]) -> None:
            raise KeyError("callback")

        failed = threading.Event()
        engine.on_events(fail)
        engine.on_failed(lambda error: failed.set())
        engine.start()
        engine.call(add_steps(1))
        assert failed.wait(WAIT_S)
        assert isinstance(engine.failed, KeyError)
