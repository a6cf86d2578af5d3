"""How corrupted state shows in answers, after the report in which it did."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from loadgen.answer import Answer

_REPLACEMENT = re.compile("\ufffd")
# control characters, halves of surrogate pairs, a byte-level vocabulary's own letters, UTF-8 read as Latin-1
_BROKEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u0120\u010a]|<0x[0-9A-Fa-f]{2}>|[ÂÃ][\x80-\u00bf]|â€")
_MARKUP = re.compile(r"</?tool_call>|</?tools>|<\|\w+\|>|</?function\b|\[TOOL_CALLS\]|\"arguments\": ?\{")


class Symptom(StrEnum):
    REPLACEMENT_CHARACTER = "replacement characters"
    BROKEN_BYTES = "broken bytes"
    MARKUP_IN_TEXT = "tool markup in text"
    MISSING_CALL = "missing tool call"
    BAD_CALL = "call that is none"
    EMPTY = "empty answer"
    CUT_OFF = "never ends"


def symptoms(answer: Answer, *, expects_call: bool) -> list[Symptom]:
    """Of one answer. ``expects_call``: without a tool call the session doesn't get on."""
    written = answer.text + "".join(call.name + call.arguments for call in answer.calls)
    found = {
        Symptom.REPLACEMENT_CHARACTER: _REPLACEMENT.search(written),
        Symptom.BROKEN_BYTES: _BROKEN.search(written),
        Symptom.MARKUP_IN_TEXT: _MARKUP.search(answer.text),
        Symptom.MISSING_CALL: expects_call and not answer.calls,
        Symptom.BAD_CALL: not all(_is_object(call.arguments) for call in answer.calls),
        Symptom.EMPTY: not answer.text.strip() and not answer.calls,
        Symptom.CUT_OFF: answer.finish_reason == "length",
    }
    return [symptom for symptom, there in found.items() if there]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False
