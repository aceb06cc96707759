"""Text over HTTP: OpenAI's ``/v1``, and Triton's ``generate`` and ``generate_stream``.

OpenAI's options that are not supported are refused by name, with errors in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from ...base.codec import UNREADABLE, check_memory, encode_json
from ...base.errors import InvalidInput, ModelNotFound
from ...base.roles import Principal
from ...base.units import nearest
from ...gateway.doors import DoorContext
from ...gateway.http.http_parser import Head
from ...gateway.http.http_server import Response, json_answer
from ...gateway.http.offload import OffloadThread
from ...gateway.router import check_size
from ...gateway.routes import Door, Request, Route
from ...gateway.serving.oip import LONG_BYTES
from ...gateway.serving.service import Service
from ...programs.interface.layout import CACHE
from .answer_formats import (
    AnswerFormat,
    OpenAiFormat,
    StreamedAnswer,
    TritonFormat,
    refused,
    without_effect,
)
from .answer_stream import Answers
from .choices import (
    MAX_CHOICES,
    ParallelAnswers,
    check_count,
    logprob_count,
)
from .decoding.generation_settings import CACHE_NEW, LOGITS, MAX_EOS
from .decoding.model_config import LanguageModelConfig
from .decoding.output import MAX_STOPS, StopCriteria
from .decoding.sampling import MAX_BIASES, MAX_SEED, Options, Sampling
from .embeddings import MAX_TEXTS, Embed, embedded
from .tokenizer_worker import StartGeneration
from .tokenizers import config_of
from .tools import MAX_TOOLS_BYTES, AnswerForm, ResponseFormat, Tool, Tools, form_of
from .translation import ABSENT, Dialect, fields_of, is_neutral, table

PREFIX: Final = "/v1"
MODELS, TEXT, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
EMBED: Final = "/v1/embeddings"
PATHS: Final = (MODELS, TEXT, CHAT, EMBED, "/v1/responses", "/v1/messages")
OLLAMAS: Final = re.compile("/api/(embeddings|pull|push|create|copy|delete|blobs/.*)")
MAX_BODY_BYTES: Final = 1 << 20
MAX_EMBED_BYTES: Final = 8 << 20  # 2,048 texts of 4 KB
MAX_FIELDS: Final = 256
MAX_LIST_BYTES: Final = 16 << 10  # limit of these fields; ``tools`` have a limit of their own
LONG_FIELDS: Final = (
    *("logit_bias", "stop_token_ids", "response_format", "tools"),
    *("chat_template_kwargs", "reasoning_effort"),
)
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for completions
NO_LIMIT: Final = 1 << 40
SIGNATURE: Final = ({"ids", "count", "used", CACHE}, {LOGITS, CACHE_NEW})  # language model (ADR 49)
_NEUTRAL: Final = """
user metadata safety_identifier request_id prompt_cache_key prompt_cache_retention = "*"
keep_alive ttl = "*"
stream_options.include_obfuscation parallel_tool_calls = true false
length_penalty = 1
priority top_logprobs = 0
store use_beam_search include_stop_str_in_output logprobs = false
continue_final_message return_token_ids return_tokens_as_token_ids = false
stream_options.continuous_usage_stats chat.add_special_tokens enable_response_messages = false
skip_special_tokens spaces_between_special_tokens add_special_tokens include_reasoning = true
add_generation_prompt exclude_input_in_output = true
tools functions documents bad_words logits_processors previous_input_messages = []
mm_processor_kwargs media_io_kwargs vllm_xargs = {}
kv_transfer_params = {}
tool_choice function_call = "none" "auto"
verbosity = "medium"
service_tier = "auto" "default"
modalities = ["text"]
response_format = {"type":"text"}
suffix = ""
truncate_prompt_tokens = -1
"""
NEUTRAL: Final[Mapping[str, Sequence[Any]]] = table(_NEUTRAL)
"""Unsupported options of OpenAI and vLLM, each with the values that change no answer (``*``: all).
These values and null are accepted; any other value is refused by name."""
S = TypeVar("S", "CompletionRequest", "TritonRequest", Embed)
log = logging.getLogger(__name__)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class TritonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Triton's body. Its ``parameters`` may also be fields of the body itself."""

    text_input: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_EOS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None


class CompletionRequest(TritonRequest, frozen=True, kw_only=True):
    """OpenAI's body of a completion or a chat; null means absent."""

    model: str
    prompt: list[str | list[int]] | None = None  # a single prompt becomes a list: ``_prompts``
    echo: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: str | Tool | None = None
    n: int | None = None
    best_of: int | None = None
    messages: msgspec.Raw = ABSENT  # decoded in the text process, because it may be large
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, msgspec.Raw] | None = None
    stream_options: StreamOptions | None = None

    @property
    def form(self) -> AnswerForm:
        """Form of the answer. InvalidInput: the tools or the response format are not valid."""
        return form_of(self.response_format, self.tools or [], self.tool_choice)

    @property
    def settings(self) -> bytes:
        """Settings of the chat's template, as JSON; empty: none."""
        effort = self.reasoning_effort
        named = {} if effort is None else {"reasoning_effort": effort}
        settings = named | (self.chat_template_kwargs or {})
        return encode_json(settings) if settings else b""

    @property
    def is_chat(self) -> bool:
        return self.messages != ABSENT

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


Prompts, Inputs = (
    msgspec.defstruct(
        "Prompts",
        [(f"prompt_{number}", str | list[int], "") for number in range(most)],
        array_like=True,
        forbid_unknown_fields=True,
    )
    for most in (MAX_CHOICES, MAX_TEXTS)
)
"""Types of lists with a maximum length; decoding stops when it is exceeded."""


def text_door(context: DoorContext) -> Door:
    """Return the door of ``/v1`` and of ``generate``."""
    completions = shared(context.service, context.aside)
    return Door(
        prefix=PREFIX,
        hint=", ".join(PATHS),
        routes=[*completions.routes()],
        refused=refused,
        advice=_advice,
    )


def _advice(path: str) -> str:
    """Return what to use in place of a path of Ollama, or of one without ``/v1``."""
    if OLLAMAS.fullmatch(path):
        return "use pipeswitch run or unregister; /api has chat, generate, embed, tags, show"
    for one in sorted(PATHS, key=len, reverse=True):  # ``/completions`` also ends a chat's path
        if path.endswith(one.removeprefix(PREFIX)):  # the most frequent mistake
            base = "has no /v1" if one.endswith("messages") else f"ends with one {PREFIX}"
            return f"use {one}: this client's base URL {base}"
    return ""


@lru_cache(maxsize=1)
def shared(service: Service, aside: OffloadThread) -> Completions:
    """Return what all doors to texts of a gateway share, such as the limit of their answers."""
    return Completions(service, aside)


class Completions:
    """Paths below ``/v1``, and ``generate`` and ``generate_stream`` of a model."""

    def __init__(self, service: Service, aside: OffloadThread) -> None:
        self._service, self._answers, self._aside = service, Answers(service), aside
        self._began_s = int(time.time())
        self._closing: set[asyncio.Task[None]] = set()

    def routes(self) -> Iterator[Route]:
        yield Route(method="GET", path=MODELS, run=self._models)
        yield Route(method="GET", path=f"{MODELS}/{{model...}}", run=self._models)
        for path, run, max_bytes in (
            (EMBED, self._embed, MAX_EMBED_BYTES),
            (TEXT, partial(self._complete, is_chat=False), MAX_BODY_BYTES),
            (CHAT, partial(self._complete, is_chat=True), MAX_BODY_BYTES),
        ):
            yield Route(method="POST", path=path, run=run, max_bytes=max_bytes)
        for version in ("", "/versions/{version}"):
            for name, is_stream in (("generate", False), ("generate_stream", True)):
                run = partial(self._generate, is_stream=is_stream)
                path = f"/v2/models/{{model}}{version}/{name}"
                yield Route(method="POST", path=path, run=run, max_bytes=MAX_BODY_BYTES)

    async def _embed(self, incoming: Request, body: Any) -> Response:
        return json_answer(await self.embed(incoming, body))

    async def embed(self, incoming: Request, body: Any) -> dict[str, Any]:
        """Return embeddings in OpenAI's form."""
        request = await self._read(incoming.head, body, Embed)
        return await embedded(self._answers, incoming.caller, incoming.head, request)

    async def facts(self, caller: Principal, name: str) -> LanguageModelConfig:
        """Return the facts about a language model."""
        return await config_of(self._service, caller, name, "", tokenizer=True)

    async def models(self, caller: Principal) -> dict[str, Mapping[str, Any]]:
        """Return the row of each model for texts, by its names."""
        rows: dict[str, Mapping[str, Any]] = {
            name: row
            for row in await self._service.rows(caller)
            if ({*row["inputs"]}, {*row["outputs"]}) == SIGNATURE or row.get("embeds")
            for name in (row["name"], *row.get("aliases", ()))
        }
        for alias, model in self._service.aliases.items():
            if model in rows:
                rows.setdefault(alias, rows[model])
        return rows

    async def _models(self, incoming: Request, body: Any) -> Response:
        name = incoming.names.get("model", "")
        common = {"object": "model", "owned_by": "pipeswitch", "created": self._began_s}
        rows = {one: {"id": one, **common} for one in await self.models(incoming.caller)}
        if not name:
            return json_answer({"object": "list", "data": [*rows.values()]})
        if name not in rows:
            raise ModelNotFound(f"no model {name[:80]!r} for texts{nearest(name, rows)}")
        return json_answer(rows[name])

    async def _complete(self, incoming: Request, body: Any, *, is_chat: bool) -> Response:
        request = await self._read(incoming.head, body, CompletionRequest)
        return await self.complete(incoming, request, OpenAiFormat, is_chat=is_chat)

    async def read(
        self, incoming: Request, body: Any, dialect: Dialect
    ) -> tuple[Any, dict[str, Any], list[str]]:
        """Decode a request of another protocol; see ``Dialect.read``."""
        if len(body) <= LONG_BYTES:
            return dialect.read(body)
        return await self._aside.run(incoming.head.peer, dialect.read, body)

    async def chat(
        self,
        incoming: Request,
        fields: Mapping[str, Any],
        kind: Callable[..., AnswerFormat],
        ignored: Iterable[str] = (),
    ) -> Response:
        """Answer another protocol's request that is translated to OpenAI's fields.

        Args:
            kind: returns the answer's format, as in ``complete``.
            ignored: fields of the request that have no effect; the answer names them.
        """
        request = await self._read(incoming.head, encode_json(fields), CompletionRequest)
        answer = await self.complete(incoming, request, kind, is_chat="messages" in fields)
        headers = [*answer.headers, *without_effect(ignored)]
        return replace(answer, headers=headers)

    async def count(self, incoming: Request, fields: Mapping[str, Any]) -> int:
        """Return the number of tokens of such a request's prompt."""
        request = await self._read(
            incoming.head, encode_json({**fields, "max_tokens": 1}), CompletionRequest
        )

        def begin(*, own: Mapping[str, Any]) -> StartGeneration:
            begin = _begin(request, "", bytes(request.messages), own=own)
            return replace(begin, tools=request.form.rendered, settings=request.settings)

        caller, head, model = incoming.caller, incoming.head, request.model
        answering = await self._answers.begin(caller, head, model, begin)
        try:
            return answering.step.prompt_count
        finally:
            await answering.close()

    async def complete(
        self,
        incoming: Request,
        request: CompletionRequest,
        kind: Callable[..., AnswerFormat],
        *,
        is_chat: bool,
    ) -> Response:
        """Answer a request in the wire format ``kind(request, prompts, n)``."""
        caller, head = incoming.caller, incoming.head
        needed, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
        absent = None, ABSENT
        if getattr(request, needed) in absent or getattr(request, other) not in absent:
            raise InvalidInput(f"this path takes {needed}, and no {other}", param=needed)
        if request.max_completion_tokens is not None:
            request = replace(request, max_tokens=request.max_completion_tokens)
        prompts = request.prompt or [""]
        check_count(len(prompts), n := _first(request.n, 1))
        has_ids = not all(isinstance(one, str) for one in prompts)
        if request.echo and (is_chat or (has_ids and request.logprobs is None)):
            raise InvalidInput("echo needs texts or logprobs", param="echo")
        count = logprob_count(request.logprobs, request.top_logprobs, is_chat=is_chat)
        request = replace(request, logprobs=count)
        answer_form = request.form
        if answer_form.names and not is_chat:
            raise InvalidInput("tools are for chats", hint=CHAT, param="tools")
        form = kind(request, prompts, n)
        if form.hides:
            request = replace(request, max_tokens=1)
        if request.best_of not in (None, n):
            raise InvalidInput("best_of is not supported", hint="leave it out", param="best_of")
        messages = bytes(request.messages) if is_chat else None
        tokens = None if is_chat else DEFAULT_MAX_TOKENS

        def begin_of(prompt: str | list[int], seed: int | None, *, own: Any) -> StartGeneration:
            own = {**own, "json_schema": answer_form.schema}
            begin = _begin(request, prompt, messages, own=own, tokens=tokens, seed=seed)
            return replace(begin, tools=answer_form.rendered, settings=request.settings)

        seeds = [None if request.seed is None else request.seed + one for one in range(n)]
        begins = [
            partial(
                self._answers.begin, caller, head, request.model, partial(begin_of, prompt, seed)
            )
            for prompt in prompts
            for seed in seeds
        ]
        try:
            form.choices = await ParallelAnswers.begin(begins, n)
            return await self._answer(form.choices, form, is_stream=bool(request.stream))
        except InvalidInput as error:
            if answer_form.is_forced and error.data.get("param") == "response_format":
                error.data["param"] = "tools"  # the schema is that of the tools
            raise

    async def _read(self, head: Head, body: Any, kind: type[S]) -> S:
        """Decode a request. A long one is decoded on another thread, where addresses take turns."""
        check_size(len(body), MAX_EMBED_BYTES if kind is Embed else MAX_BODY_BYTES)
        if len(body) <= LONG_BYTES:
            request = _said(body, kind)
        else:
            request = await self._aside.run(head.peer, _said, body, kind)
        alias = getattr(request, "model", "")
        if alias in self._service.aliases:
            request = replace(request, model=self._service.aliases[alias])
        return request

    async def _generate(self, incoming: Request, body: Any, *, is_stream: bool) -> Response:
        caller, head, names = incoming.caller, incoming.head, incoming.names
        model, version = names["model"], names.get("version", "")
        request = await self._read(head, body, TritonRequest)
        begin = partial(_begin, request, request.text_input, temperature=0.0, seed=request.seed)
        choices = ParallelAnswers([await self._answers.begin(caller, head, model, begin, version)])
        return await self._answer(choices, TritonFormat(choices.first), is_stream=is_stream)

    async def _answer(
        self, choices: ParallelAnswers, form: AnswerFormat, *, is_stream: bool
    ) -> Response:
        """Return the whole answer or a stream. Errors before the first tokens are raised."""
        try:
            await choices.start()
            if is_stream:
                stream = StreamedAnswer(choices, form, partial(self._close, choices))
                cut = lambda error: form.encode(form.failed(error))  # noqa: E731
                kind, headers = form.content_type, without_effect(choices.first.unused)
                return Response(content_type=kind, headers=headers, stream=stream, cut=cut)
            texts: list[list[str]] = [[] for _ in choices.answerings]
            while came := await choices.next():
                index, token = came
                if token is not None:
                    texts[index].append(token.text)
        except BaseException:
            self._close(choices)
            raise
        await choices.close()
        answer = form.whole(["".join(one) for one in texts])
        return json_answer(answer, headers=without_effect(choices.first.unused))

    def _close(self, choices: ParallelAnswers) -> None:
        task = asyncio.get_running_loop().create_task(choices.close())
        self._closing.add(task)  # otherwise the task might be garbage-collected
        task.add_done_callback(self._closing.discard)


def _said(body: Any, kind: type[S]) -> S:
    """Decode a request; raise InvalidInput if it is malformed, or has an unsupported option."""
    check_memory(len(body))
    try:
        fields = fields_of(body)
        if kind is TritonRequest and "parameters" in fields:
            parameters = fields_of(fields.pop("parameters"))
            for name in sorted(name[:80] for name in fields.keys() & parameters.keys()):
                what = f"{name!r} is in the body and in its parameters"
                raise InvalidInput(what, hint=f"give {name!r} once", param=name)
            fields |= parameters
        if len(fields) > MAX_FIELDS:
            raise InvalidInput(f"{len(fields)} fields in a request; the limit is {MAX_FIELDS}")
        known: list[str] = [field.name for field in msgspec.structs.fields(kind)]
        for name in fields.keys() - {*known}:
            _check_neutral(name, fields[name], known, is_chat="messages" in fields)
        options = bytes(fields.get("stream_options", b""))
        for name, value in fields_of(options).items() if options[:1] == b"{" else ():
            if name not in StreamOptions.__struct_fields__:
                _check_neutral(f"stream_options.{name}", value, known)
        for name in LONG_FIELDS:
            most = MAX_TOOLS_BYTES if name == "tools" else MAX_LIST_BYTES
            if len(fields.get(name, b"")) > most:
                raise InvalidInput(f"{name} is longer than {most} bytes", param=name)
        for name, listed in (("prompt", Prompts), ("input", Inputs)):
            if name in fields and name in known:
                fields[name] = _prompts(name, fields[name], listed)
        known_fields = {name: fields[name] for name in known if name in fields}
        return msgspec.json.decode(encode_json(known_fields), type=kind)
    except UNREADABLE as error:
        where = re.search(r"\$\.(\w+)", str(error))
        raise InvalidInput(f"invalid request: {error}", param=where[1] if where else None) from None


def _check_neutral(
    name: str, raw: msgspec.Raw, known: Iterable[str], *, is_chat: bool = False
) -> None:
    """Raise InvalidInput if an unsupported option has a value that would change the answer."""
    neutral = NEUTRAL.get(f"chat.{name}" if is_chat else name, NEUTRAL.get(name, ()))
    if not is_neutral(raw, neutral):
        near = nearest(name, known)
        hint = ", or ".join(["leave it out", *map(json.dumps, neutral)])
        raise InvalidInput(f"{name[:80]!r} is not supported{near}", hint=hint, param=name[:80])


def _begin(
    request: TritonRequest,
    prompt: str | list[int],
    messages: bytes | None = None,
    *,
    own: Mapping[str, Any],
    tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> StartGeneration:
    """Return the message that starts the requested answer.

    Options that the request omits come from ``tokens`` and ``temperature``; if these are None, from
    the model's author (``own``), else from OpenAI's defaults.
    """
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidInput(f"max_tokens is {request.max_tokens}, below 1", param="max_tokens")
    stop = request.stop or []
    return StartGeneration(
        answer=0,
        prompt=prompt,
        messages=messages,
        sampling=Sampling(
            temperature=_first(request.temperature, temperature, own.get("temperature"), 1.0),
            top_p=_first(request.top_p, own.get("top_p"), 1.0),
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed % (MAX_SEED + 1),
            options=_options(request, own),
        ),
        ending=StopCriteria(
            max_new_tokens=_first(request.max_tokens, tokens, own.get("max_new_tokens"), NO_LIMIT),
            stop=(stop,) if isinstance(stop, str) else (*stop,),
            eos_ids=tuple(request.stop_token_ids or ()),
            min_new_tokens=request.min_tokens or 0,
            ignore_eos=bool(request.ignore_eos),
        ),
    )


def _options(request: TritonRequest, own: Mapping[str, Any]) -> Options | None:
    """Return the rarer options of a request, or of the model's author; None: there are none."""
    named = {name: getattr(request, name, None) for name in Options.__struct_fields__}
    values = {**own, **{name: value for name, value in named.items() if value is not None}}
    values["top_k"] = max(values.get("top_k", 0), 0)  # -1 means all, like 0
    options = Options(**{name: values[name] for name in named if name in values})
    return None if options == Options() else options


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _prompts(name: str, prompt: msgspec.Raw, most: Any) -> msgspec.Raw:
    """Return a request's prompts as a list.
    Raises InvalidInput: it is neither one prompt nor a list; decoding stops as soon as that is
    clear."""
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(prompt, type=str | list[int])
        return msgspec.Raw(b"[%b]" % bytes(prompt))
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(prompt, type=most)
        return prompt
    raise InvalidInput(
        f"{name} must be one text, a list of token ids, or a list of at most "
        f"{len(most.__struct_fields__)} of these",
        param=name,
    )
