"""OpenAI's ``response_format`` and ``tools``: which schema an answer follows, and what it calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from ...base.codec import encode_json
from ...base.errors import InvalidInput

MOST_TOOLS: Final = 128  # as OpenAI has it
MARK: Final = "<tool_call>"  # in templates of Qwen, Hermes and others, around a call
CALL: Final = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, or the choice of one."""

    type: Literal["function"]
    function: Function


class Calling(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that an answer may call."""

    names: tuple[str, ...] = ()
    schema: str = ""  # of an answer that must be a call, or of one in a response format
    rendered: bytes = b""  # JSON, for the chat's template
    is_forced: bool = False

    def calls_in(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text beside an answer's calls, and the calls in OpenAI's form."""
        if self.is_forced:
            found, rest = [text], ""
        else:
            found, rest = CALL.findall(text), CALL.sub("", text).strip()
        calls = []
        for one in found:
            try:
                call = json.loads(one)
                name, arguments = call["name"], call.get("arguments", {})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return text, []
            if name not in self.names:
                return text, []
            function = {"name": name, "arguments": encode_json(arguments).decode()}
            calls.append(
                {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            )
        return (rest, calls) if calls else (text, [])


def calling(
    response_format: ResponseFormat | None,
    tools: Sequence[msgspec.Raw],
    choice: str | Tool | None,
) -> Calling:
    """Return what a request's answer must follow, and may call.

    Raises:
        InvalidInput: the two do not fit each other, or a tool is unknown.
    """
    try:
        given = [msgspec.json.decode(one, type=Tool).function for one in tools]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"tools: {error}", param="tools") from None
    names = tuple(one.name for one in given)
    how = choice.function.name if isinstance(choice, Tool) else choice or "auto"
    is_named = isinstance(choice, Tool)
    is_forced = is_named or how == "required"
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidInput(f"no tool_choice {choice[:40]!r}", hint="auto", param="tool_choice")
    if is_forced and (how not in names if is_named else not names):
        raise InvalidInput(f"tools has no {how[:80]!r}", param="tool_choice")
    schema = schema_of(response_format)
    if schema and is_forced:
        raise InvalidInput("a forced tool_choice has no response_format", param="response_format")
    if how == "none" or not names:
        return Calling(schema=schema)
    if is_forced:
        wanted = [one for one in given if not is_named or how == one.name]
        schema = encode_json({"anyOf": [_of_call(one) for one in wanted]}).decode()
    rendered = b"[%b]" % b",".join(bytes(one) for one in tools)
    return Calling(names=names, schema=schema, rendered=rendered, is_forced=is_forced)


def schema_of(response_format: ResponseFormat | None) -> str:
    """Return a response format's JSON schema; empty: any text.

    Raises:
        InvalidInput: it has the type ``json_schema``, and no schema.
    """
    if response_format is None or response_format.type == "text":
        return ""
    if response_format.type == "json_object":
        return '{"type":"object"}'
    schema = (response_format.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidInput(
            "response_format has no json_schema.schema",
            param="response_format",
            hint='{"type": "json_schema", "json_schema": {"name": "a", "schema": {…}}}',
        )
    return encode_json(schema).decode()


def _of_call(function: Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    properties = {"name": {"const": function.name}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
