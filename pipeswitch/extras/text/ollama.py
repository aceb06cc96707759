"""Ollama's ``/api``, for its clients, Open WebUI and editors. Answers are lines of JSON."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from ...base.codec import encode_json
from ...base.errors import ModelNotFound, PipeSwitchError
from ...base.units import nearest
from ...gateway.doors import DoorContext
from ...gateway.http.http_server import Response, json_answer
from ...gateway.routes import Door, Request, Route
from .answer_formats import Block, ChatFormat
from .completions import MAX_BODY_BYTES, MAX_EMBED_BYTES, NO_LIMIT, Completions, shared
from .translation import Dialect, Fields, filled, is_neutral, table

PREFIX: Final = "/api"
LATEST: Final = ":latest"  # the tag that clients add to a name without one
SAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
OPTIONS: Final = {
    **dict(zip(SAME, SAME, strict=True)),
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
"""Ollama's options, with OpenAI's or vLLM's names; others have no effect."""
EMPTY, JSON = msgspec.Raw(b'""'), msgspec.Raw(b'"json"')  # as in ``format``
DETAILS: Final = {"parent_model": "", "format": "pipeswitch", "family": "", "families": []}


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Translated fields of ``/api/chat`` and ``/api/generate``."""

    model: str
    stream: bool = True
    format: msgspec.Raw = EMPTY
    options: dict[str, msgspec.Raw] = {}
    think: bool | str | None = None
    prompt: str = ""
    system: str = ""
    raw: bool = False

    def translated(self) -> Fields:
        """Return OpenAI's fields."""
        options = {to: self.options[name] for name, to in OPTIONS.items() if name in self.options}
        if bytes(options.get("max_tokens", b"")).startswith(b"-"):
            del options["max_tokens"]  # -1 and -2: as many as fit
        fields: Fields = {"stream": self.stream}
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        if self.format == JSON:
            fields["response_format"] = {"type": "json_object"}
        elif self.format != EMPTY:
            named = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        if self.raw:
            fields |= {"prompt": self.prompt, "max_tokens": NO_LIMIT}
        elif self.prompt:
            pairs = ("system", self.system), ("user", self.prompt)
            fields["messages"] = [{"role": role, "content": text} for role, text in pairs if text]
        return {**fields, **options}


CHAT: Final = Dialect(
    Own,
    {"messages": "messages", "tools": "tools"},
    table('keep_alive = "*"\nlogprobs = false\ntop_logprobs = 0'),
)
GENERATE: Final = Dialect(
    Own,
    {},
    {**CHAT.neutral} | table('suffix template = ""\ncontext images = []'),
    refused=("suffix", "template", "context", "images"),
)
NAMED: Final = msgspec.defstruct("Named", [("model", str, ""), ("name", str, "")])
EMBED: Final = Dialect(
    NAMED, {"input": "input"}, table('keep_alive options truncate = "*"\ndimensions = 0')
)
SHOW: Final = Dialect(NAMED, {}, table('verbose system template options = "*"'))


class OllamaFormat(ChatFormat):
    """Wire format of ``/api/chat``, and with ``is_plain`` of ``/api/generate``."""

    content_type = "application/x-ndjson"

    def __init__(self, name: str, is_plain: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self._name, self._is_plain, self._began_s = name, is_plain, time.monotonic()
        self._first_s = 0.0  # time of the first token

    @staticmethod
    def failed(error: PipeSwitchError) -> Fields:
        return {"error": str(error)}

    @staticmethod
    def encode(value: Mapping[str, Any]) -> bytes:
        return encode_json(value) + b"\n"

    def _line(self, blocks: Iterable[Block], *, is_last: bool = False) -> Fields:
        text = "".join(one.text for one in blocks if not one.name)
        calls = [
            {"id": one.id, "function": {"name": one.name, "arguments": one.arguments}}
            for one in blocks
            if one.name
        ]
        message = {"role": "assistant", "content": text, **filled({"tool_calls": calls})}
        answer = {"response": text} if self._is_plain else {"message": message}
        line = {"model": self._name, "created_at": _now(), **answer, "done": is_last}
        if not is_last:
            return line
        now_s = time.monotonic()
        first_s = self._first_s or now_s
        return line | {
            "done_reason": "length" if self.reason == "length" else "stop",
            "total_duration": _ns(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": self.choices.prompt_count,
            "prompt_eval_duration": _ns(first_s - self._began_s),
            "eval_count": self.choices.token_count,
            "eval_duration": _ns(now_s - first_s),
        }

    def message(self) -> Fields:
        return self._line(self.blocks, is_last=True)

    def opened(self, block: Block) -> Iterable[Fields]:
        self._first_s = self._first_s or time.monotonic()
        return ()

    def grown(self, block: Block, piece: str) -> Iterable[Fields]:
        if not block.name:
            yield self._line([Block(text=piece)])

    def closed(self, block: Block) -> Iterable[Fields]:
        if block.name:  # a call is sent as a whole
            yield self._line([block])

    def finish(self) -> Iterable[Fields]:
        yield self._line([], is_last=True)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class Ollama:
    """Handlers of the routes."""

    def __init__(self, completions: Completions, version: str) -> None:
        self._completions, self._version, self._began = completions, version, _now()

    async def version(self, incoming: Request, body: Any) -> Response:
        return json_answer({"version": self._version})

    async def tags(self, incoming: Request, body: Any) -> Response:
        rows = await self._completions.models(incoming.caller)
        common = {"modified_at": self._began, "details": DETAILS}
        models = [
            {**common, "name": name, "model": name, "digest": row.get("digest", "")}
            | {"size": row.get("bytes", 0)}
            for name, row in rows.items()
        ]
        return json_answer({"models": models})

    async def show(self, incoming: Request, body: Any) -> Response:
        own, _, _ = await self._completions.read(incoming, body, SHOW)
        name, row = await self._known(incoming, own.model or own.name)
        template, capabilities, info = "", ["embedding"], {}
        if not row.get("embeds"):
            facts = await self._completions.facts(incoming.caller, name)
            template, info = facts.chat_template, {"pipeswitch.context_length": facts.context}
            capabilities = ["completion", *["tools"] * ("tools" in template)]
        fields = {"template": template, "model_info": info, "capabilities": capabilities}
        return json_answer({**fields, "details": DETAILS, "modified_at": self._began})

    async def _known(self, incoming: Request, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return a model's name and row; clients add a tag to names without one."""
        rows = await self._completions.models(incoming.caller)
        for one in (name, name.removesuffix(LATEST)):
            if one in rows:
                return one, rows[one]
        raise ModelNotFound(f"model {name[:80]!r} not found{nearest(name, rows)}")

    async def answer(self, dialect: Dialect, incoming: Request, body: Any) -> Response:
        """Answer ``/api/chat`` or ``/api/generate``."""
        own, copied, ignored = await self._completions.read(incoming, body, dialect)
        name, _ = await self._known(incoming, own.model)
        fields, kind = own.translated(), partial(OllamaFormat, own.model, dialect is GENERATE)
        if "messages" in copied and is_neutral(copied["messages"], [[]]):
            del copied["messages"]
        fields |= copied
        if not {"messages", "prompt"} & fields.keys():  # it loads the model, which is ready
            empty = {"response": "", "message": {"role": "assistant", "content": ""}}
            line = {"model": own.model, "created_at": _now(), **empty}
            return json_answer({**line, "done": True, "done_reason": "load"})
        ignored += [f"options.{one}" for one in sorted(own.options.keys() - OPTIONS.keys())]
        return await self._completions.chat(incoming, {**fields, "model": name}, kind, ignored)

    async def embed(self, incoming: Request, body: Any) -> Response:
        own, copied, _ = await self._completions.read(incoming, body, EMBED)
        began_s = time.monotonic()
        name, _ = await self._known(incoming, own.model)
        answer = await self._completions.embed(incoming, encode_json({**copied, "model": name}))
        fields = {"model": own.model, "embeddings": [one["embedding"] for one in answer["data"]]}
        counts = {"prompt_eval_count": answer["usage"]["prompt_tokens"], "load_duration": 0}
        return json_answer({**fields, **counts, "total_duration": _ns(time.monotonic() - began_s)})


def ollama_door(context: DoorContext) -> Door:
    """Return the door of Ollama's paths."""
    ollama = Ollama(shared(context.service, context.aside), context.service.version)
    routes = [
        Route(method=method, path=f"{PREFIX}/{name}", run=run, max_bytes=max_bytes)
        for method, name, run, max_bytes in (
            ("GET", "version", ollama.version, 0),
            ("GET", "tags", ollama.tags, 0),
            ("POST", "show", ollama.show, MAX_BODY_BYTES),
            ("POST", "chat", partial(ollama.answer, CHAT), MAX_BODY_BYTES),
            ("POST", "generate", partial(ollama.answer, GENERATE), MAX_BODY_BYTES),
            ("POST", "embed", ollama.embed, MAX_EMBED_BYTES),
        )
    ]
    return Door(prefix=PREFIX, hint="GET /api/tags lists models for texts", routes=routes)
