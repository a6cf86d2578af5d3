"""Questions behind worked examples, the same ones in all prompts. Each has one to six steps, so lengths are mixed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from loadgen.prompts import Prompt
from loadgen.swe.words import WORDS

MOST_STEPS = 6
MOST_AT_ONCE = 40
NAMES = ("Ada", "Bruno", "Carla", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Lars")


def fewshot_prompts(seed: int, shots: int, questions: int, max_tokens: int) -> Iterator[Prompt]:
    """The same shots for every seed's questions, and other shots for another seed."""
    random = Random(seed)
    shared = "".join(f"{question}\nAnswer: {answer}\n\n" for question, answer in (_exercise(random) for _ in range(shots)))
    for _ in range(questions):
        yield Prompt(f"{shared}{_exercise(random)[0]}\nAnswer:", max_tokens)


def _exercise(random: Random) -> tuple[str, str]:
    """A question and its answer, step by step."""
    name, thing = random.choice(NAMES), random.choice(WORDS)
    total = random.randint(1, MOST_AT_ONCE)
    told, steps = [f"{name} starts with {total} of the {thing} kind."], []
    for _ in range(random.randint(1, MOST_STEPS)):
        count, comes = random.randint(1, MOST_AT_ONCE), random.random() < 0.6 or total < MOST_AT_ONCE
        before, total = total, total + count if comes else total - count
        told.append(f"{name} {'gets' if comes else 'gives away'} {count}.")
        steps.append(f"{before} {'plus' if comes else 'minus'} {count} is {total}.")
    return f"Question: {' '.join(told)} How many are there now?", f"{' '.join(steps)} #### {total}"
