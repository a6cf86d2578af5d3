"""One plain prompt as a session of one turn."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.client import AskError, Client
from loadgen.prompts import Prompt
from loadgen.record import Session, turn_of
from loadgen.run import Work
from loadgen.symptoms import Symptom, symptoms


def sessions_of(prompts: Sequence[Prompt], client: Client) -> list[tuple[Session, Work]]:
    return [(Session(name=str(number)), complete(prompt, client)) for number, prompt in enumerate(prompts)]


def complete(prompt: Prompt, client: Client) -> Work:
    """The answer has all the tokens that were asked for, where the server can be told to go on after an end token."""
    more = {"ignore_eos": True} if client.server.knows_extensions else {}

    async def fill(session: Session, began_at: float) -> None:
        try:
            answer = await client.complete(prompt.text, max_tokens=prompt.max_tokens, **more)
        except AskError as error:
            session.turns.append(turn_of(error.answer, began_at, failure=error.kind))
            return
        found = [symptom for symptom in symptoms(answer, expects_call=False) if symptom is not Symptom.CUT_OFF]
        session.turns.append(turn_of(answer, began_at, found))

    return fill
