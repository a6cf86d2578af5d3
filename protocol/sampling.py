"""How tokens are chosen: the one definition, used by the router, on the wire and by the engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_LOGPROBS = 20
MAX_COUNT = 2**31
"""Counts and token ids stay below: whatever is valid here can be sent and computed with."""

Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_COUNT)]


class SamplingParams(BaseModel):
    """Parameters of one generated sequence. A token is a function of (logits, these, seed, position) only.

    Raises pydantic.ValidationError, which names the field and the allowed values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1, lt=MAX_COUNT)] = 16
    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """0 is greedy."""
    top_k: Count = 0
    """0 means all. (-1 from clients is mapped to 0 by the router.)"""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Over prompt and output. Logits are divided by it, so it is well away from 0."""
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Over output."""
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Over output."""
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """None: no log-probabilities. n: of the chosen token and the n likeliest, before penalties, bias and temperature."""

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        return self
