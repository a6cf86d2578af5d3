"""Base of the pure state machines: one door, a table of legal moves, and a story for the error message.

A lifecycle never awaits, reads a clock or draws a random number. What happened comes in as an event (with its time, where time
matters), what has to be done goes out as commands, and a thin shell does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from protocol.errors import IllegalTransition

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event")
Command = TypeVar("Command")

STORY_LENGTH = 32
MAX_LINE = 200


class Lifecycle(Generic[State, Event, Command]):
    """A subclass fills ``MOVES`` and ``HANDLERS``.

    MOVES[state][event type] is the set of states that the event may lead to; an absent entry makes the event illegal there.
    HANDLERS[event type] sets ``self.state`` and returns the commands.
    """

    MOVES: ClassVar[Mapping[Any, Mapping[type[Any], AbstractSet[Any]]]]
    HANDLERS: ClassVar[Mapping[type[Any], Callable[[Any, Any], list[Any]]]]

    def __init__(self, name: str, state: State) -> None:
        self.name = name
        self.state = state
        self._story: deque[tuple[State, State, Event]] = deque(maxlen=STORY_LENGTH)
        """Kept as it came and told only when asked for: an event may come with every token."""

    def handle(self, event: Event) -> list[Command]:
        """The one door. Raises IllegalTransition with the last events when ``event`` is not allowed in this state."""
        before = self.state
        allowed = self.MOVES[before].get(type(event))
        if allowed is None:
            raise IllegalTransition(self.name, before.name, event, self.story)
        commands = self.HANDLERS[type(event)](self, event)
        assert self.state in allowed, f"{self.name}: {type(event).__name__} led from {before.name} to {self.state.name}"
        self._story.append((before, self.state, event))
        return commands

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first."""
        return tuple(f"{before.name} -> {after.name}: {str(event)[:MAX_LINE]}" for before, after, event in self._story)


def leading_to(*states: Enum, events: Iterable[type[Any]]) -> dict[type[Any], frozenset[Enum]]:
    """A row of MOVES for events that may all lead to the same states."""
    return dict.fromkeys(events, frozenset(states))
