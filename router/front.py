"""The endpoints that generate, and those that only tokenise: a body in, an answer out."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protocol.ids import RequestId
from router.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from router.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from router.cluster import Cluster
from router.errors import MAX_PARAM, ApiError, invalid, not_served_here, unsupported
from router.generation import Generation
from router.json_text import JsonAnswer, NotUnicode, parse_json, shown
from router.logprobs import as_token_ids
from router.model_files import ModelFiles
from router.parameters import TextRules, cache_use, nth, sampling_params
from router.prefixes import chain_of
from router.prompts import Prompt, chat_prompt, check_token_ids, completion_prompts, tokenize_text
from router.request import Order
from router.sequence import Sequence

MAX_BODY_BYTES = 32 << 20
MAX_SEQUENCES = 256
"""Prompts times n of one request."""


@dataclass(frozen=True, slots=True)
class Front:
    """What the endpoints work with."""

    files: ModelFiles
    cluster: Cluster

    @property
    def max_model_len(self) -> int:
        return self.cluster.max_model_len(self.files.max_model_len)

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await read_json_body(request), COMPLETION_NEUTRAL)
        self._check_common(body)
        if body.echo and body.logprobs is not None:
            raise unsupported("echo", "echo with logprobs (log-probabilities of the prompt) is not served; ask for one of them")
        prompts = await completion_prompts(body, self.files, self.max_model_len)
        if body.echo:
            prompts = [self._with_text(prompt) for prompt in prompts]
        options = self._options(body, "cmpl", want_logprobs=body.logprobs is not None, echo=bool(body.echo))
        return self._generation(body, prompts, CompletionAnswer(options), options.answer_id)

    async def chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await read_json_body(request), CHAT_NEUTRAL)
        self._check_common(body)
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt = await chat_prompt(body, self.files, self.max_model_len, tools)
        options = self._options(
            body,
            "chatcmpl",
            want_logprobs=bool(body.logprobs),
            parse_tools=tools is not None,
            one_tool=body.parallel_tool_calls is False,
        )
        return self._generation(body, [prompt], ChatAnswer(options), options.answer_id)

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_json_body(request))
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            token_ids = list((await chat_prompt(body, self.files, self.max_model_len, body.tools)).token_ids)
        else:
            token_ids = await tokenize_text(body.prompt or "", self.files, add_special_tokens=body.add_special_tokens is not False)
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = self.files.tokenizer.tokens(token_ids)
        return JsonAnswer(answer)

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_json_body(request))
        self._check_model(body.model)
        check_token_ids(body.tokens, "tokens", self.files.vocab_size)
        return JsonAnswer({"prompt": self.files.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    # ---- from a checked body to a running generation

    def _check_common(self, body: GenerationBody) -> None:
        self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "stream_options needs stream=true")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.files.name:
            raise not_served_here(name, self.files.name)

    def _with_text(self, prompt: Prompt) -> Prompt:
        if prompt.text is not None:
            return prompt
        return Prompt(prompt.token_ids, self.files.tokenizer.decode(prompt.token_ids))

    def _options(self, body: GenerationBody, prefix: str, **wanted: bool) -> AnswerOptions:
        stream_options = body.stream_options
        describe = self.files.tokenizer.describe
        return AnswerOptions(
            answer_id=f"{prefix}-{secrets.token_hex(12)}",
            model=self.files.name,
            describe=as_token_ids(describe) if body.return_tokens_as_token_ids else describe,
            want_token_ids=bool(body.return_token_ids),
            want_timings=bool(body.return_timings),
            include_usage=bool(stream_options and stream_options.include_usage),
            continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
            **wanted,
        )

    def _generation(self, body: CompletionBody | ChatBody, prompts: list[Prompt], answer: Answer, answer_id: str) -> Generation:
        """Raises ApiError. Nothing runs before the framework calls what this returns. Sequences are named after the answer, so that
        logs of all processes can be found by what the client has.
        """
        n = body.n or 1
        if len(prompts) * n > MAX_SEQUENCES:
            raise invalid("n", f"{len(prompts)} prompts with n={shown(n)} are too many sequences, at most {MAX_SEQUENCES} are possible")
        options = body.stream_options
        generation = Generation(
            self.cluster,
            answer,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        )
        orders: list[tuple[Order, Sequence]] = []
        for prompt in prompts:
            orders += self._orders(body, prompt, n, f"{answer_id}-{len(orders) // n}", len(orders), generation)
        generation.start_with(orders)
        return generation

    def _orders(
        self, body: CompletionBody | ChatBody, prompt: Prompt, n: int, stem: str, first: int, generation: Generation
    ) -> list[tuple[Order, Sequence]]:
        """The n choices of one prompt."""
        sampling = sampling_params(body, prompt, self.files, self.max_model_len)
        rules = TextRules.of(body, sampling, self.files.eos_token_ids)
        cache = cache_use(body)
        chain = chain_of(prompt.token_ids, cache)
        orders = []
        for choice in range(n):
            detokenizer = self.files.tokenizer.detokenizer(prompt.token_ids, skip_special_tokens=rules.skip_special_tokens)
            sequence = Sequence(first + choice, prompt, rules, detokenizer, generation)
            order = Order(RequestId(f"{stem}-{choice}"), prompt.token_ids, nth(sampling, choice), cache, chain)
            orders.append((order, sequence))
        return orders


async def read_json_body(request: Request) -> object:
    """Raises ApiError: too large, not JSON, or with text that isn't valid Unicode."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    try:
        return parse_json(data.decode("utf-8"))
    except NotUnicode as error:
        param = ".".join(error.path) or None
        raise invalid(param, f"{(param or 'the body')[:MAX_PARAM]}: {error}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
