"""Text over HTTP: OpenAI's ``/v1``, and Triton's ``generate`` and ``generate_stream``.

What OpenAI's clients may say and we do not do is refused by its name, in their form of an error.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from ..errors import InvalidInput, ModelNotFound, PipeSwitchError
from ..programs.answer import Ending
from ..programs.generation import CACHE, CACHE_NEW, LOGITS
from ..programs.sampling import MAX_SEED, Sampling
from ..roles import Standing
from ..units import nearest
from .feed import CONTENT_TYPE
from .http import Answer, Head, Work, json_answer, refusal
from .refusals import MethodNotAllowed, NotFound, TooLarge, body_of, status_of
from .service import Service
from .text_process import Begin, Step
from .texts import Answering, Texts

PREFIX: Final = "/v1/"
MAX_BODY_BYTES: Final = 1 << 20
MAX_MESSAGES: Final = 1024
WHOLE_CONTEXT: Final = 1 << 40  # of max_tokens: until the context ends
SHORT_TOKENS: Final = 16  # OpenAI's own, where a completion does not say
GUARDS: Final = (("Cache-Control", "no-cache"), ("X-Content-Type-Options", "nosniff"))
SIGNATURE: Final = ({"ids", "count", "used", CACHE}, {LOGITS, CACHE_NEW})  # ADR 49
# What asks for nothing that we would not do anyway, and what these may be at most.
IGNORED: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "suffix": ("",), "logit_bias": ({},), "frequency_penalty": (0,), "presence_penalty": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip
CODES: Final = {"Unauthenticated": "invalid_api_key", "ModelNotFound": "model_not_found"}

S = TypeVar("S", "Said", "Asked")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body, of either of OpenAI's; null is as if it were left out."""

    model: str
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Triton's body; its ``parameters`` may stand beside the text as well."""

    text_input: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None


class Completions:
    """The paths below ``/v1``, and two of a model."""

    def __init__(self, service: Service) -> None:
        self._service, self._texts = service, Texts(service)
        self._began_s = int(time.time())
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, head: Head, caller: Standing) -> Work:
        """What a request below ``/v1`` asks for.

        Raises:
            NotFound, MethodNotAllowed, TooLarge: nothing of its body is read.
        """
        verb: Callable[..., Awaitable[Answer]] = self._complete
        method, name = "POST", ""
        match head.path.rstrip("/").split("/")[2:]:
            case ["models", *rest] if len(rest) < 2:
                method, verb, name = "GET", self._models, "".join(rest)
            case ["completions"] | ["chat", "completions"]:
                pass
            case _:
                known = ["/v1/models", "/v1/completions", "/v1/chat/completions"]
                near = nearest(head.path, known)
                raise NotFound(f"no path {head.path[:200]!r}{near}", hint=", ".join(known))
        if head.method != method:
            raise MethodNotAllowed(head.method, head.path, method)
        _check_size(head.length or 0)

        async def work(body: Any) -> Answer:
            try:
                return await verb(caller, head, body, name)
            except PipeSwitchError as error:
                return refused(error)

        return work

    async def _models(self, caller: Standing, head: Head, body: Any, name: str) -> Answer:
        rows = [
            {"id": row["name"], "object": "model", "owned_by": "pipeswitch",
             "created": self._began_s}
            for row in await self._service.rows(caller)
            if ({*row["inputs"]}, {*row["outputs"]}) == SIGNATURE
        ]  # fmt: skip
        if not name:
            return json_answer({"object": "list", "data": rows})
        found = [row for row in rows if row["id"] == name]
        if not found:
            near = nearest(name, [str(row["id"]) for row in rows])
            raise ModelNotFound(f"no language model {name[:80]!r}{near}", hint="GET /v1/models")
        return json_answer(found[0])

    async def _complete(self, caller: Standing, head: Head, body: Any, _: str) -> Answer:
        said, is_chat = _said(body, Said), head.path.startswith("/v1/chat")
        if is_chat != (said.messages is not None) or is_chat != (said.prompt is None):
            wanted, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
            raise InvalidInput(f"{wanted} is what this path takes, not {other}", param=wanted)
        tokens = said.max_completion_tokens
        if tokens is None:
            tokens = said.max_tokens
        if tokens is None:
            tokens = WHOLE_CONTEXT if is_chat else SHORT_TOKENS
        prompt = "" if is_chat else _prompt(said.prompt)
        messages = None if said.messages is None else _messages(said.messages)
        begin = _begin(said, prompt, messages, tokens, temperature=1.0)
        answering = await self._texts.begin(
            caller, head.peer, said.model, begin, carrier=head.headers
        )
        form = _OpenAi(answering, said, has_ids=isinstance(prompt, list))
        return await self._answer(answering, form, is_stream=bool(said.stream))

    async def generate(
        self, caller: Standing, model: str, version: str, head: Head, body: Any,
        *, is_stream: bool,
    ) -> Answer:  # fmt: skip
        """Triton's, of one model."""
        _check_size(len(body))
        asked = _said(body, Asked)
        tokens = WHOLE_CONTEXT if asked.max_tokens is None else asked.max_tokens
        begin = _begin(asked, asked.text_input, None, tokens, temperature=0.0)
        answering = await self._texts.begin(
            caller, head.peer, model, begin, carrier=head.headers,
            version=version,
        )  # fmt: skip
        return await self._answer(answering, _Triton(answering), is_stream=is_stream)

    async def _answer(self, answering: Answering, form: _Form, *, is_stream: bool) -> Answer:
        """All of it, or what comes; its first token decides whether that is a refusal."""
        try:
            step, texts = await answering.next(), [""]
            if is_stream:
                events = _Events(_pieces(answering, form, step), partial(self._close, answering))
                return Answer(content_type=CONTENT_TYPE, headers=GUARDS, stream=events)
            while step is not None:
                texts.append(step.text)
                step = await answering.next()
        except BaseException:
            self._close(answering)
            raise
        await answering.close()
        return json_answer(form.whole("".join(texts)))

    def _close(self, answering: Answering) -> None:
        task = asyncio.get_running_loop().create_task(answering.close())
        self._closing.add(task)  # else nothing would hold it
        task.add_done_callback(self._closing.discard)


class _Form(Protocol):
    """How an answer is told."""

    def whole(self, text: str) -> dict[str, Any]: ...
    def first(self) -> list[dict[str, Any]]: ...
    def piece(self, step: Step) -> dict[str, Any] | None: ...
    def last(self) -> list[dict[str, Any]]: ...
    def failed(self, error: PipeSwitchError) -> dict[str, Any]: ...

    end: bytes


class _OpenAi:
    """Chats and completions."""

    end = b"data: [DONE]\n\n"

    def __init__(self, answering: Answering, said: Said, *, has_ids: bool) -> None:
        """``has_ids``: who asks in token ids is told them, beside the text."""
        self._answering, self._has_ids = answering, has_ids
        self._is_chat = said.messages is not None
        options = said.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        self._created_s = int(time.time())

    def whole(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        ids = {"token_ids": self._answering.tokens} if self._has_ids else {}
        said = {"message": message} if self._is_chat else {"text": text, **ids}
        return self._told([self._choice(said, self._answering.step.reason)], self._usage(), "")

    def first(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"delta": delta})] if self._is_chat else []

    def piece(self, step: Step) -> dict[str, Any] | None:
        if not step.text and not self._has_ids:
            return None
        ids = {"token_ids": [step.token]} if self._has_ids else {}
        delta = {"delta": {"content": step.text}}
        return self._chunk(delta if self._is_chat else {"text": step.text, **ids})

    def last(self) -> list[dict[str, Any]]:
        said: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        ended = self._chunk(said, self._answering.step.reason)
        usage = [self._told([], self._usage(), ".chunk")] if self._tells_usage else []
        return [ended, *usage]

    def failed(self, error: PipeSwitchError) -> dict[str, Any]:
        return openai_body(error)

    def _chunk(self, said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._told([self._choice(said, reason)], None, ".chunk")

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    def _told(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None, kind: str
    ) -> dict[str, Any]:
        is_chat, answering = self._is_chat, self._answering
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answering.id}",
            "object": f"chat.completion{kind}" if is_chat else "text_completion",
            "created": self._created_s,
            "model": answering.model,
            "choices": choices,
            **({"usage": usage} if usage or self._tells_usage else {}),
        }

    def _usage(self) -> dict[str, int]:
        asked, made = self._answering.step.prompt_count, len(self._answering.tokens)
        return {
            "prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made
        }  # fmt: skip


class _Triton:
    """Of ``generate`` and ``generate_stream``."""

    end = b""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def whole(self, text: str) -> dict[str, Any]:
        model, version = self._answering.model, self._answering.version
        return {"model_name": model, "model_version": str(version), "text_output": text}

    def first(self) -> list[dict[str, Any]]:
        return []

    def piece(self, step: Step) -> dict[str, Any] | None:
        return self.whole(step.text) if step.text else None

    def last(self) -> list[dict[str, Any]]:
        return []

    def failed(self, error: PipeSwitchError) -> dict[str, Any]:
        return body_of(error)


class _Events:
    """An answer as it comes; an ``http.Stream``."""

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._pieces, self.close = pieces, close

    async def next(self) -> bytes:
        return await anext(self._pieces, b"")


async def _pieces(answering: Answering, form: _Form, step: Step | None) -> AsyncIterator[bytes]:
    """Its events, and the last one's reason."""
    try:
        for one in form.first():
            yield _event(one)
        while step is not None:
            if (piece := form.piece(step)) is not None:
                yield _event(piece)
            step = await answering.next()
        for one in form.last():
            yield _event(one)
        if form.end:
            yield form.end
    except PipeSwitchError as error:
        yield _event(form.failed(error))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(value)


def openai_body(error: PipeSwitchError) -> dict[str, Any]:
    """OpenAI's form of an error."""
    name, status = type(error).__name__, status_of(error).http
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    told = {
        "message": str(error),
        "type": "server_error" if status >= 500 else kind,
        "param": error.data.get("param"),
        "code": CODES.get(name, name),
    }
    return {"error": told}


def refused(error: PipeSwitchError) -> Answer:
    """As ``http.refusal``, for OpenAI's clients."""
    return replace(refusal(error), parts=[msgspec.json.encode(openai_body(error))])


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise TooLarge(f"{size} bytes, and a prompt comes with {MAX_BODY_BYTES} at most")


def _said(body: Any, kind: type[S]) -> S:
    """
    Raises:
        InvalidInput: it is no such request, or asks for what is not done here.
    """
    _check_size(len(body))
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        if kind is Asked and isinstance(given.get("parameters", {}), dict):
            given |= given.pop("parameters", {})
        known = kind.__struct_fields__
        for name, value in given.items():
            if value is not None and name not in known and name not in IGNORED:
                _check_neutral(name, value, known)
        found = {name: value for name, value in given.items() if value is not None}
        return msgspec.convert(found, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = re.search(r"\$\.(\w+)", str(error))
        raise InvalidInput(
            f"the body is no such request: {error}", param=where and where[1]
        ) from None


def _check_neutral(name: str, value: Any, known: Iterable[str]) -> None:
    if name not in NEUTRAL:
        raise InvalidInput(f"no parameter {name[:80]!r}{nearest(name, known)}", param=name[:80])
    if value not in NEUTRAL[name]:
        hint = " or ".join(json.dumps(one) for one in NEUTRAL[name])
        raise InvalidInput(
            f"{name} is not done here", hint=hint and f"{hint}, or leave it out", param=name
        )


def _begin(
    said: Said | Asked, prompt: str | list[int], messages: list[dict[str, Any]] | None,
    max_tokens: int, *, temperature: float,
) -> Begin:  # fmt: skip
    if max_tokens < 1:
        raise InvalidInput(f"max_tokens is {max_tokens}, below 1", param="max_tokens")
    stop = said.stop or []
    return Begin(
        answer=0,
        prompt=prompt,
        messages=messages,
        sampling=Sampling(
            temperature=temperature if said.temperature is None else said.temperature,
            top_p=1.0 if said.top_p is None else said.top_p,
            seed=secrets.randbelow(MAX_SEED) if said.seed is None else said.seed,
        ),
        ending=Ending(
            max_new_tokens=max_tokens, stop=(stop,) if isinstance(stop, str) else (*stop,)
        ),
    )


def _prompt(given: Any) -> str | list[int]:
    """A text or ids; a list of one of these is that one, as some clients send it."""
    one = given[0] if isinstance(given, list) and len(given) == 1 else given
    found = given if isinstance(one, int) else one
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found and all(type(token) is int for token in found):
        return found
    raise InvalidInput("prompt must be one text, or a list of token ids", param="prompt")


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As templates take them: a content of several texts is one."""
    if not 0 < len(given) <= MAX_MESSAGES:
        raise InvalidInput(f"{len(given)} messages: 1 to {MAX_MESSAGES}", param="messages")
    return [{**one, "content": _content(one.get("content"))} for one in given]


def _content(given: Any) -> str:
    parts = given if isinstance(given, list) else [{"type": "text", "text": given or ""}]
    if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts):
        raise InvalidInput("a message's content is text", param="messages")
    return "".join(one["text"] for one in parts)
