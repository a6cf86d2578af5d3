"""What the shipped model is trained on: copying, episodes of the scripted agent, and the standard library as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics
from random import Random

from tokenizers import Tokenizer

from demo.tokenizer import SPECIAL_TOKENS, TURN_END, TURN_START, library_texts
from loadgen.swe.bugs import BugKind, break_formula, broken_line
from loadgen.swe.expert import Message, call_message, expert_messages
from loadgen.swe.formula import Call, Function
from loadgen.swe.functions import draw_functions
from loadgen.swe.instance import ALL_SHAPES, FIRST_TRAINING_SEED, WITH_MODULE, Instance, make_instance
from loadgen.swe.outcome import Failure, Outcome, unequal
from loadgen.swe.tools import SYSTEM_PROMPT, TOOLS
from loadgen.swe.words import WORDS
from router.chat_template import ChatTemplate

TEXT_BYTES = 6_000_000
PROSE_SHARE = 0.3
NUM_TRAINING_SEEDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a batch."""

    token_ids: list[int]
    wanted: list[bool]
    """Which of them the model shall predict."""


class Recipe:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._starts = tokenizer.token_to_id(TURN_START), tokenizer.encode("assistant\n").ids
        self._end = tokenizer.token_to_id(TURN_END)
        self.symbols = [token for word in (*WORDS, *map(str, range(100))) for token in tokenizer.encode(word).ids]
        """Tokens that episodes copy."""
        self._system: Message = {"role": "system", "content": SYSTEM_PROMPT}
        self.beginning = self._tokens_of([self._system])
        """Tokens that all episodes begin with: system prompt and tools."""

    def episode(self, instance: Instance) -> Example:
        """Without the common beginning. The assistant's tokens are wanted, the ends of its turns among them."""
        return self._after_beginning(expert_messages(instance))

    def random_episode(self, random: Random) -> Example:
        return self.episode(make_instance(FIRST_TRAINING_SEED + random.randrange(NUM_TRAINING_SEEDS)))

    def drill(self, random: Random) -> Example:
        """A module in which each function has a bug, and the fix of each: the hardest calls of an episode, several times over.

        An episode's policy, for more than one bug: after each fix test again, and fix what the test names next.
        """
        path, functions = f"{random.choice(WORDS)}.py", _draw_functions(random)
        messages = [self._system, _asked(random, functions[0].name, path)]
        for number, function in enumerate(functions):
            line = _broken_line(random, function)
            messages += [call_message("test", {}), _failed(random, function.name, path, len(functions) - number)]
            shown = {"role": "tool", "content": function.text(line).rstrip("\n")}
            messages += [call_message("read", {"path": path, "function": function.name}), shown]
            fix = {"path": path, "old": line, "new": function.line()}
            messages += [call_message("replace", fix), {"role": "tool", "content": "replaced"}]
        return self._after_beginning(messages)

    def copying(self, random: Random, num_symbols: int) -> Example:
        """A few random sequences; then each again after its first token, in another order. The repetitions are wanted."""
        lists = [[random.choice(self.symbols[:num_symbols]) for _ in range(random.randint(3, 9))] for _ in range(random.randint(3, 5))]
        mark = SPECIAL_TOKENS.index("<s>")
        tokens: list[int] = []
        wanted: list[bool] = []
        for again, order in ((False, lists), (True, random.sample(lists, len(lists)))):
            for symbols in order:
                tokens += [mark, *symbols]
                wanted += [False, False, *[again] * (len(symbols) - 1)]
        return Example(tokens, wanted)

    def text(self, random: Random, length: int) -> Example:
        """Some of the standard library's source, or of its prose. All of it is wanted but the first token."""
        text = self._prose if random.random() < PROSE_SHARE else self._source
        start = random.randrange(len(text) - length)
        return Example(text[start : start + length], [False] + [True] * (length - 1))

    @cached_property
    def _source(self) -> list[int]:
        tokens: list[int] = self._tokenizer.encode("".join(library_texts(TEXT_BYTES))).ids
        return tokens

    @cached_property
    def _prose(self) -> list[int]:
        """What ``help()`` knows of the language."""
        tokens: list[int] = self._tokenizer.encode("".join(text for _, text in sorted(topics.items()))).ids
        return tokens

    def _after_beginning(self, messages: Sequence[Message]) -> Example:
        tokens = self._tokens_of(messages)
        assert tokens[: len(self.beginning)] == self.beginning
        tokens = tokens[len(self.beginning) :]
        return Example(tokens, self._of_assistant(tokens))

    def _tokens_of(self, messages: Sequence[Message]) -> list[int]:
        text = self._template.render(messages, tools=TOOLS, extra={"add_generation_prompt": False})
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def _of_assistant(self, tokens: Sequence[int]) -> list[bool]:
        start, role = self._starts
        wanted = [False] * len(tokens)
        place = 0
        while place < len(tokens):
            if tokens[place] == start and tokens[place + 1 : place + 1 + len(role)] == role:
                place += 1 + len(role)
                end = tokens.index(self._end, place)
                wanted[place : end + 1] = [True] * (end + 1 - place)
                place = end
            place += 1
        return wanted


def _draw_functions(random: Random) -> list[Function]:
    """Calls are the rarest shape in episodes and the hardest one, so here they come more often."""
    functions = draw_functions(random, random.choices((*ALL_SHAPES, Call), k=random.randint(2, 3)))
    return random.sample(functions, len(functions))


def _broken_line(random: Random, function: Function) -> str:
    """By a kind of bug that this function can have. What follows a call is learned last, so it is wrong more often there."""
    kinds = random.sample(tuple(BugKind), len(BugKind))
    if isinstance(function.formula, Call) and random.random() < 0.6:
        kinds.insert(0, BugKind.OPERATOR)
    for kind in kinds:
        formula = break_formula(random, kind, function)
        if formula is not None:
            return broken_line(kind, formula)
    raise AssertionError("a return can always be missing")


def _asked(random: Random, function: str, path: str) -> Message:
    return {"role": "user", "content": random.choice(WITH_MODULE).format(function=function, module=path)}


def _failed(random: Random, function: str, path: str, num_failed: int) -> Message:
    """The numbers are any: nothing depends on them."""
    failure = Failure(f"{function} in {path}", unequal(random.randint(0, 40), random.randint(0, 40)))
    return {"role": "tool", "content": Outcome(num_failed + random.randint(0, 4), (failure,)).text()}
