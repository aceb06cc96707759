"""Anthropic's ``/v1/messages``, for its clients and coding assistants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from ...base.codec import encode_json
from ...base.errors import InvalidInput, PipeSwitchError
from ...gateway.doors import DoorContext
from ...gateway.http.http_errors import status_of
from ...gateway.http.http_server import Response, json_answer, refusal
from ...gateway.routes import Door, Request, Route
from .answer_formats import Block, ChatFormat, named_event
from .completions import MAX_BODY_BYTES, shared
from .translation import ABSENT, Dialect, Fields, Texts, call_of, filled, joined, table, tool_of

MESSAGES: Final = "/v1/messages"
STOPS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> type of Anthropic's errors; others are ``api_error``."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message's content."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: Texts = ""
    is_error: bool | None = None
    thinking: str = ""
    signature: msgspec.Raw = ABSENT
    citations: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Part]

    def translated(self) -> Iterator[Fields]:
        """Yield OpenAI's messages: each result of a tool is one of its own."""
        content = self.content
        blocks = [Part(type="text", text=content)] if isinstance(content, str) else content
        results = [one for one in blocks if one.type == "tool_result"]
        for one in results:
            text = joined(one.content)
            yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": text}
        text = "".join(one.text for one in blocks)
        uses = [one for one in blocks if one.type == "tool_use"]
        calls = [call_of(one.id, one.name, one.input) for one in uses]
        thoughts = "".join(one.thinking for one in blocks)
        if text or calls or not results:
            more = {"tool_calls": calls, "reasoning_content": thoughts}
            yield {"role": self.role, "content": text, **filled(more)}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True):
    """Function that the model may call; tools that Anthropic's servers run have other types."""

    name: str
    input_schema: msgspec.Raw = ABSENT
    type: str = "custom"
    description: str | None = None

    def translated(self) -> Fields:
        if self.type != "custom" or self.input_schema == ABSENT:
            text = f"tools: {self.name[:80]!r} has no input_schema, or runs on Anthropic's servers"
            raise InvalidInput(text, hint="leave it out", param="tools")
        return tool_of(self.name, self.description, self.input_schema)


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Translated fields."""

    messages: list[Message]
    system: Texts = ""
    tools: list[AnthropicTool] = []
    tool_choice: Choice | None = None

    def translated(self) -> Fields:
        system, chosen = joined(self.system), self.tool_choice
        rows = [one for row in self.messages for one in row.translated()]
        choice = chosen and self.tools and (CHOICES.get(chosen.type) or tool_of(chosen.name))
        fields = {"tools": [one.translated() for one in self.tools], "tool_choice": choice}
        first = [{"role": "system", "content": system}] if system else []
        return {"messages": [*first, *rows], **filled(fields)}


COPIED: Final = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
DIALECT: Final = Dialect(
    Own,
    {**dict(zip(COPIED, COPIED, strict=True)), "stop_sequences": "stop"},
    table("""
metadata = "*"
service_tier = "auto" "standard_only"
thinking = {"type":"disabled"}
context_management output_config = {}
"""),
)


class AnthropicFormat(ChatFormat):
    """Wire format of ``/v1/messages``."""

    encode = staticmethod(named_event)

    @staticmethod
    def failed(error: PipeSwitchError) -> Fields:
        kind = KINDS.get(status_of(error).http, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def message(self) -> Fields:
        blocks = [_block(one, one.arguments) for one in self.blocks]
        return self._message(blocks, self._ending(), self.choices.token_count)

    def _message(
        self, content: Sequence[Fields], ending: Mapping[str, Any], output_count: int
    ) -> Fields:
        first = self.choices.first
        usage = {"input_tokens": self.choices.prompt_count, "output_tokens": output_count}
        own = {"id": f"msg_{first.id}", "type": "message", "role": "assistant"}
        return {**own, "model": first.model, "content": content, **ending, "usage": usage}

    def _ending(self) -> Fields:
        if (text := self.choices.first.step.stop) and self.reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        return {"stop_reason": STOPS[self.reason], "stop_sequence": None}

    def begin(self) -> Iterable[Fields]:
        ending = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message((), ending, 0)}

    def _event(self, kind: str, **fields: Any) -> Fields:
        return {"type": f"content_block_{kind}", "index": len(self.blocks) - 1, **fields}

    def opened(self, block: Block) -> Iterable[Fields]:
        yield self._event("start", content_block=_block(block, {}))

    def grown(self, block: Block, piece: str) -> Iterable[Fields]:
        kind, name = ("input_json", "partial_json") if block.name else ("text", "text")
        yield self._event("delta", delta={"type": f"{kind}_delta", name: piece})

    def closed(self, block: Block) -> Iterable[Fields]:
        yield self._event("stop")

    def finish(self) -> Iterable[Fields]:
        usage = {"output_tokens": self.choices.token_count}
        yield {"type": "message_delta", "delta": self._ending(), "usage": usage}
        yield {"type": "message_stop"}


def _block(block: Block, arguments: Any) -> Fields:
    if not block.name:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def refused(error: PipeSwitchError) -> Response:
    """Return ``http_server.refusal`` of an error, with the body in Anthropic's form."""
    return replace(refusal(error), parts=[encode_json(AnthropicFormat.failed(error))])


def anthropic_door(context: DoorContext) -> Door:
    """Return the door of ``/v1/messages``."""
    completions = shared(context.service, context.aside)

    async def create(incoming: Request, body: Any) -> Response:
        own, copied, ignored = await completions.read(incoming, body, DIALECT)
        if "max_tokens" not in copied:
            raise InvalidInput("max_tokens is missing", param="max_tokens")
        fields = {**copied, **own.translated()}
        return await completions.chat(incoming, fields, AnthropicFormat, ignored)

    async def count(incoming: Request, body: Any) -> Response:
        own, copied, _ = await completions.read(incoming, body, DIALECT)
        tokens = await completions.count(incoming, {**copied, **own.translated()})
        return json_answer({"input_tokens": tokens})

    routes = [
        Route(method="POST", path=path, run=run, max_bytes=MAX_BODY_BYTES)
        for path, run in ((MESSAGES, create), (f"{MESSAGES}/count_tokens", count))
    ]
    return Door(prefix=MESSAGES, hint=MESSAGES, routes=routes, refused=refused)
