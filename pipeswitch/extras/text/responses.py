"""OpenAI's ``/v1/responses``, without state: each request has the whole conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final, Literal

import msgspec

from ...base.errors import PipeSwitchError
from ...gateway.doors import DoorContext
from ...gateway.http.http_server import Response
from ...gateway.routes import Door, Request, Route
from .answer_formats import Block, ChatFormat, named_event, openai_body, refused
from .completions import MAX_BODY_BYTES, shared
from .translation import ABSENT, Dialect, Fields, Texts, call_of, filled, joined, table, tool_of

RESPONSES: Final = "/v1/responses"
STATIC: Final[Fields] = msgspec.json.decode(
    b'{"object":"response","error":null,"parallel_tool_calls":true,"previous_response_id":null,'
    b'"store":false,"truncation":"disabled","user":null,"metadata":{}}'
)


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message, call, result of a call or thought of a conversation."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Texts | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    output: Texts = ""
    summary: msgspec.Raw = ABSENT
    encrypted_content: msgspec.Raw = ABSENT


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Function that the model may call; tools that OpenAI's servers run have other types."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = ABSENT

    def translated(self) -> Fields:
        return tool_of(self.name, self.description, self.parameters)


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: msgspec.Raw = ABSENT

    def translated(self) -> Fields:
        named = {"name": self.name, "strict": self.strict, "schema": self.schema}
        is_named = self.type == "json_schema"
        return {"type": self.type, **({"json_schema": filled(named)} if is_named else {})}


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextFormat = TextFormat(type="text")
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the model's thoughts."""

    effort: str | None = None


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Translated fields."""

    input: str | list[Item]
    instructions: str | None = None
    tools: list[ResponsesTool] = []
    tool_choice: str | ResponsesTool | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()

    def translated(self) -> Fields:
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [Item(content=self.input)] if isinstance(self.input, str) else self.input
        tools, choice = [one for one in self.tools if one.type == "function"], self.tool_choice
        fields = {
            "tools": [one.translated() for one in tools],
            "tool_choice": choice if isinstance(choice, str | None) else tool_of(choice.name),
            "response_format": self.text.format.translated(),
            "reasoning_effort": self.reasoning.effort,
        }
        if not tools:
            del fields["tool_choice"]
        return {"messages": [*first, *_messages(items)], **filled(fields)}

    def ignored(self) -> Iterator[str]:
        """Yield the options and tools that have no effect."""
        if self.text.verbosity not in (None, "medium"):
            yield "text.verbosity"
        yield from (f"tools.{one.type}" for one in self.tools if one.type != "function")


DIALECT: Final = Dialect(
    Own,
    {**{one: one for one in ("model", "stream", "temperature", "top_p")}}
    | {"max_output_tokens": "max_tokens"},
    table("""
metadata user safety_identifier prompt_cache_key prompt_cache_retention client_metadata = "*"
store parallel_tool_calls include stream_options = "*"
service_tier truncation = "auto" "default" "disabled"
max_tool_calls top_logprobs = 0
background = false
"""),
    refused=("background",),
)


def _messages(items: Iterable[Item]) -> Iterator[Fields]:
    """Yield the messages of a chat; calls that follow each other belong to one message."""
    calls: list[Fields] = []
    for one in [*items, Item(type="reasoning")]:
        if one.type == "function_call":
            calls.append(call_of(one.call_id, one.name, one.arguments.encode()))
        elif calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if one.type == "function_call_output":
            yield {"role": "tool", "tool_call_id": one.call_id, "content": joined(one.output)}
        elif one.type == "message":
            role = "system" if one.role == "developer" else one.role
            yield {"role": role, "content": joined(one.content or "")}


class ResponsesFormat(ChatFormat):
    """Wire format of ``/v1/responses``."""

    encode = staticmethod(named_event)

    def __init__(self, own: Own, *rest: Any) -> None:
        super().__init__(*rest)
        self._own, self._numbers = own, count()

    def failed(self, error: PipeSwitchError) -> Fields:
        own = {"type": "error", "sequence_number": next(self._numbers)}
        return {**openai_body(error)["error"], **own}

    def message(self) -> Fields:
        status = "incomplete" if self.reason == "length" else "completed"
        return self._response(status, [self._item(one) for one in self.blocks])

    def _item(self, block: Block, status: str = "completed") -> Fields:
        if block.name:
            own = {"type": "function_call", "id": f"fc_{block.id}", "call_id": block.id}
            return {**own, "status": status, "name": block.name, "arguments": block.text}
        own = {"type": "message", "id": f"msg_{block.number}_{self.choices.first.id}"}
        content = [_text(block)] if block.text else []
        return {**own, "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, items: list[Fields]) -> Fields:
        own, request, first = self._own, self.request, self.choices.first
        prompt, answer = self.choices.prompt_count, self.choices.token_count
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        }
        return STATIC | {
            "id": f"resp_{first.id}",
            "created_at": self.created_s,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": own.instructions,
            "max_output_tokens": request.max_tokens,
            "model": first.model,
            "output": items,
            "reasoning": {"effort": own.reasoning.effort, "summary": None},
            "temperature": request.temperature,
            "text": {"format": own.text.format},
            "tool_choice": own.tool_choice or "auto",
            "tools": own.tools,
            "top_p": request.top_p,
            "usage": None if status == "in_progress" else usage,
        }

    def _event(self, kind: str, **fields: Any) -> Fields:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def begin(self) -> Iterable[Fields]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))

    def _place(self, block: Block) -> Fields:
        place = {"item_id": self._item(block)["id"], "output_index": block.number}
        return place if block.name else {**place, "content_index": 0}

    def opened(self, block: Block) -> Iterable[Fields]:
        item = self._item(block, "in_progress")
        yield self._event("output_item.added", output_index=block.number, item=item)
        if not block.name:
            yield self._event("content_part.added", **self._place(block), part=_text(block))

    def grown(self, block: Block, piece: str) -> Iterable[Fields]:
        kind = "function_call_arguments" if block.name else "output_text"
        more: Fields = {} if block.name else {"logprobs": []}
        yield self._event(f"{kind}.delta", **self._place(block), delta=piece, **more)

    def closed(self, block: Block) -> Iterable[Fields]:
        place, item = self._place(block), self._item(block)
        if block.name:
            own = {"name": block.name, "arguments": block.text}
            yield self._event("function_call_arguments.done", **place, **own)
        else:
            yield self._event("output_text.done", **place, text=block.text, logprobs=[])
            yield self._event("content_part.done", **place, part=_text(block))
        yield self._event("output_item.done", output_index=block.number, item=item)

    def finish(self) -> Iterable[Fields]:
        response = self.message()
        yield self._event(response["status"], response=response)


def _text(block: Block) -> Fields:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def responses_door(context: DoorContext) -> Door:
    """Return the door of ``/v1/responses``."""
    completions = shared(context.service, context.aside)

    async def create(incoming: Request, body: Any) -> Response:
        own, copied, ignored = await completions.read(incoming, body, DIALECT)
        fields, kind = {**copied, **own.translated()}, partial(ResponsesFormat, own)
        return await completions.chat(incoming, fields, kind, [*ignored, *own.ignored()])

    route = Route(method="POST", path=RESPONSES, run=create, max_bytes=MAX_BODY_BYTES)
    return Door(prefix=RESPONSES, hint=RESPONSES, routes=[route], refused=refused)
