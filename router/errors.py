"""What a client is told when something is wrong: one JSON shape, that of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from router.events import Ending, FailCode
from router.json_text import shown

MAX_PARAM = 200
"""Longer names of fields are cut: keys are the client's."""


class ApiError(Exception):
    """Becomes ``{"error": {message, type, param, code}}`` with this status, or an error event once a stream has begun."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after_s = status, message, code, retry_after_s
        self.param = param[:MAX_PARAM] if param else None

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class _Outcome(NamedTuple):
    status: int
    retry: bool = False


_OUTCOMES: dict[FailCode, _Outcome] = {
    "bad_request": _Outcome(400),
    "busy": _Outcome(429, retry=True),
    "queue_full": _Outcome(429, retry=True),
    "no_capacity": _Outcome(503, retry=True),
    "draining": _Outcome(503, retry=True),
    "stopping": _Outcome(503, retry=True),
    "prefill_lost": _Outcome(502),
    "decode_lost": _Outcome(502),
    "transfer_failed": _Outcome(502),
    "lease_ended": _Outcome(502),
    "mismatch": _Outcome(502),
    "deadline": _Outcome(504),
    "internal": _Outcome(500),
}


def invalid(param: str | None, message: str) -> ApiError:
    """An impossible value."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing(param: str) -> ApiError:
    return ApiError(400, f"{param} is missing", param=param, code="missing_field")


def not_served_here(model: str, served: str) -> ApiError:
    return ApiError(404, f"model {shown(model)} is not served here, {shown(served)} is", param="model", code="model_not_found")


def unsupported(param: str, what: str) -> ApiError:
    """A possible value that Baton doesn't serve and that would change the answer if it were ignored."""
    return ApiError(400, f"{param}: {what}", param=param, code="unsupported_value")


def from_ending(ending: Ending, retry_after_s: int) -> ApiError:
    """Of a failed request."""
    assert ending.code is not None
    outcome = _OUTCOMES[ending.code]
    return ApiError(outcome.status, ending.message, code=ending.code, retry_after_s=retry_after_s if outcome.retry else None)


def from_validation(error: ValidationError, names: Mapping[str, str] | None = None) -> ApiError:
    """The first wrong field, by the name that the client used (``names`` has those that differ)."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    path[:1] = [(names or {}).get(part, part) for part in path[:1]]
    param = ".".join(path) or None
    if first["type"] == "missing":
        return missing(".".join(path))
    told = _IN_JSON_WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    return invalid(param, f"{(param or 'the body')[:MAX_PARAM]}={shown(first['input'])} is not possible: {told}")


_IN_JSON_WORDS = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "float_type": "it must be a number",
    "int_type": "it must be a whole number",
    "list_type": "it must be an array",
    "model_type": "it must be an object",
    "string_type": "it must be a string",
    "too_short": "it must not be empty",
}
"""For kinds of errors that pydantic tells in terms of Python."""


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    if status == 504:
        return "timeout_error"
    return "server_error" if status >= 500 else "invalid_request_error"
