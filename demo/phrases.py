"""How text is cut into pieces before BPE: where copying matters, the same word has to be the same token wherever it stands.

So words, spaces, marks and numbers are pieces of their own, and the fixed text of tool calls, schemas and the driver's
small grammar comes in long ones. A fix then follows its docstring token by token.
"""

from __future__ import annotations

import re

from loadgen.swe.words import WORDS

_CALLS = (
    '<tool_call>\n{"name": "', '", "arguments": {', '}\n</tool_call>', '"}}\n</tool_call>', '}}\n</tool_call>',
    '"path": "', '", "function": "', '", "old": "', '", "new": "',
)  # fmt: skip
_TURNS = ("system\n", "user\n", "assistant\n", "tool\n")
_SCHEMA = (
    '{"type": "function", "function": {"name": "', '", "description": "', '", "parameters": {"type": "object", "properties": {',
    '": {"type": "string"}', '}, "required": ["', '", "', '"]}}}\n', '}}}}\n',
    "You can call these functions:\n<tools>\n", "</tools>\nTo call one, write\n",
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>',
)  # fmt: skip
_CODE = (
    "return ", "import ", "from ", "def ", "class ", "self", "self.", "if ", "elif ", "for ", "while ", "not ", "raise ", "sum(",
    ' for i in range(', " + 1))", '"""', '"""\n', '."""\n', "):\n", "):", "()", "((", "))", "[:-", "[:", "[-", ":]", "{}", ", ", ": ",
    " (", ".py", "\n    ", "\n        ", "\n            ", "\n\n", "\n\n\n", "\n\n    ",
)  # fmt: skip
_OPERATORS = tuple(f" {sign} " for sign in ("+", "-", "*", "/", "%", "<", ">", "<=", ">=", "=", "==", "!=", "->"))
_GRAMMAR = (
    "Return ", "Return the sum of ", "Return whether ", "Return the first ", "Return the last ", " plus ", " minus ", " times ",
    " is at least ", " is at most ", " is above ", " is below ", " for i from ", " without the first ", " without the last ",
    ", plus ", ", minus ", ", times ",
)  # fmt: skip
_TOOL_RESULTS = (
    "FAILED ", ": expected ", ", got ", ": NameError: name '", "' is not defined\n", " tests failed", " tests passed", "OK: ",
    "submit", "submitted", "replaced", "test_visible.py", "error: ",
)  # fmt: skip
_ISSUES = (
    " gives a wrong result.", "Please fix ", "The tests of ", " fail. Something is wrong with ", " does not do what its docstring says.",
    "There is a bug in ", ". Please fix it.", "Since the last change ", " is wrong and a test fails.", "Fixed ",
)  # fmt: skip
_LINKS = (
    " a ", " an ", " and ", " as ", " at ", " be ", " by ", " for ", " if ", " in ", " is ", " it ", " of ", " on ", " or ", " that ",
    " the ", " to ", " with ",
)  # fmt: skip
_NUMBERS = tuple(str(number) for number in range(10, 100))

PHRASES = (*_CALLS, *_TURNS, *_SCHEMA, *_CODE, *_OPERATORS, *_GRAMMAR, *_TOOL_RESULTS, *_ISSUES, *_LINKS)
WHOLE = tuple(dict.fromkeys((*PHRASES, *_NUMBERS, *WORDS)))
"""Pieces that are tokens whatever BPE learns."""
PIECE = "|".join(
    [
        *(re.escape(phrase).replace("\\\n", r"\n") for phrase in sorted(set(PHRASES), key=lambda phrase: (-len(phrase), phrase))),
        r"\p{L}+",
        r"[0-9]{1,2}",
        r"\n+ *",
        r" +",
        r"[\s\S]",
    ]
)
"""For the tokenizers library's regular expressions (Oniguruma)."""
