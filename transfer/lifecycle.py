"""The door that both hand-off lifecycles share: which event is legal in which state, and a story for the day that one isn't."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from protocol.errors import IllegalTransition

STORY_LENGTH = 32
StateT = TypeVar("StateT", bound=Enum)


class Lifecycle(Generic[StateT]):
    """``handle(event) -> commands``: no await, no clock, no randomness. Subclasses give the two tables and ``_on_<Event>`` methods.

    ``events`` says what may happen in a state; ``moves`` where a state may go. Anything else raises IllegalTransition.
    """

    events: ClassVar[Mapping[Any, frozenset[type]]]
    moves: ClassVar[Mapping[Any, frozenset[Any]]]

    def __init__(self, name: str, state: StateT) -> None:
        self.name, self.state = name, state
        self._story: deque[tuple[StateT, object]] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: object) -> list[Any]:
        if type(event) not in self.events[self.state]:
            raise IllegalTransition(self.name, self.state.name, event, self.story())
        self._story.append((self.state, event))
        commands: list[Any] = getattr(self, f"_on_{type(event).__name__}")(event)
        return commands

    def story(self) -> tuple[str, ...]:
        """The last events, each with the state that it met. Told only when asked: a manifest's text is long."""
        return tuple(f"{state.name}: {_brief(event)}" for state, event in self._story)

    def _move(self, state: StateT) -> None:
        assert state in self.moves[self.state], f"{self.name}: {self.state.name} -> {state.name}"
        self.state = state


def _brief(event: object) -> str:
    text = repr(event)
    return text if len(text) <= 200 else f"{text[:200]}..."
