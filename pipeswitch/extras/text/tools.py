"""OpenAI's ``response_format`` and ``tools``: the schema that an answer follows, and its calls."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Final, Literal

import msgspec

from ...base.codec import UNREADABLE, encode_json
from ...base.errors import InvalidInput

MAX_TOOLS: Final = 128  # OpenAI's limit
MAX_TOOLS_BYTES: Final = 64 << 10
MAX_HELD_CHARS: Final = 256  # held text that may become a call: the start of a call is shorter
MARK, CLOSE = "<tool_call>", "</tool_call>"  # around a call of Qwen, Hermes and other models
HEAD: Final = re.compile(
    rf'\s*(?:{MARK}\s*)?(?:\[\s*)?\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
START: Final = re.compile(r'\s*\[?\s*(?:\Z|\{\s*(?:\Z|"(?:\Z|[nt])))')  # a call without a mark
TAIL: Final = re.compile(rf"\s*\}}?\s*(?:{CLOSE})?[\s,;\]]*")
# White space as models are trained to write it in calls; no other white space is allowed.
COMPACT: Final = b'{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}'
CALL: Final = (
    b'{"type":"object","properties":{"name":{"const":"%b"},"arguments":%b},'
    b'"required":["name","arguments"],"additionalProperties":false}'
)
REFERENCE: Final = re.compile(rb'"\$ref"\s*:\s*"#')  # quotes inside a string have a backslash
NO_ARGUMENTS: Final = {"additionalProperties": msgspec.Raw(b"false")}

Tools = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_TOOLS)]


Schema = dict[str, msgspec.Raw]


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``json_schema``: a schema with labels, which change no answer."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: Schema | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``response_format``; ``schema`` is llama.cpp's place for the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Function that a model may call."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None
    parameters: Schema | None = None  # JSON schema; None: it takes no arguments


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool of a request, or the tool that ``tool_choice`` names."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None  # Anthropic's hint about prices, which some clients keep


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of an answer: the schema that it follows, and the tools that it may call."""

    schema: str = ""  # empty: any text
    names: tuple[str, ...] = ()  # names of the tools; empty: no calls
    rendered: bytes = b""  # the tools as JSON, for the chat's template
    is_forced: bool = False  # the answer must be a call


def form_of(
    response_format: ResponseFormat | None, tools: Tools, choice: str | Tool | None
) -> AnswerForm:
    """Return the form of a request's answers.

    Raises:
        InvalidInput: a tool is malformed, the chosen one is unknown, or a forced call contradicts
            the response format.
    """
    try:
        functions = [msgspec.json.decode(one, type=Tool).function for one in tools]
    except UNREADABLE as error:
        raise InvalidInput(f"tools: {error}", param="tools") from None
    names = tuple([one.name for one in functions])
    chosen = choice.function.name if isinstance(choice, Tool) else ""
    is_forced = bool(chosen) or choice == "required"
    is_known = chosen in names if chosen else not is_forced or bool(names)
    if not is_known or (not chosen and choice not in (None, "none", "auto", "required")):
        words = (
            f"tool_choice {chosen or choice!r:.80}: tools are {', '.join(names)[:200] or 'none'}"
        )
        hint = 'none, auto, required, or {"type": "function", "function": {"name": …}}'
        raise InvalidInput(words, hint=hint, param="tool_choice")
    schema = schema_of(response_format)
    if schema and is_forced:
        words = "an answer that must be a call has no response_format"
        raise InvalidInput(words, hint='tool_choice="auto"', param="response_format")
    if choice == "none" or not names:
        return AnswerForm(schema=schema)
    if is_forced or schema:
        allowed = [one for one in functions if chosen in ("", one.name)]
        forms = [*map(_schema_of_call, allowed), *([schema.encode()] if schema else [])]
        moved = [_moved(one, b"/anyOf/%d" % place) for place, one in enumerate(forms)]
        schema = (b'{"x-guidance":%b,"anyOf":[%b]}' % (COMPACT, b",".join(moved))).decode()
    rendered = b"[%b]" % b",".join(map(bytes, tools))
    return AnswerForm(schema=schema, names=names, rendered=rendered, is_forced=is_forced)


def _schema_of_call(function: Function) -> bytes:
    parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
    schema = {"type": msgspec.Raw(b'"object"'), **parameters}
    if bytes(schema["type"]) != b'"object"':
        raise InvalidInput(f"tools: {function.name}: parameters are an object", param="tools")
    arguments = _moved(encode_json(schema), b"/properties/arguments")
    return CALL % (function.name.encode(), arguments)


def _moved(schema: bytes, place: bytes) -> bytes:
    return REFERENCE.sub(rb"\g<0>" + place, schema)


def schema_of(response_format: ResponseFormat | None) -> str:
    """Return a response format's JSON schema; empty: any text.

    Raises:
        InvalidInput: its type and its schemas contradict each other.
    """
    if response_format is None:
        return ""
    kind, named = response_format.type, response_format.json_schema
    places = response_format.schema, None if named is None else named.schema
    schemas = [one for one in places if one is not None]
    most = {"text": 0, "json_object": named is None, "json_schema": 1}[kind]
    if not (kind == "json_schema") <= len(schemas) <= most:
        raise InvalidInput(
            f"response_format {kind} with {len(schemas)} schemas",
            param="response_format",
            hint='{"type": "json_schema", "json_schema": {"name": "a", "schema": {…}}}, or '
            '{"type": "json_object", "schema": {…}}',
        )
    if not schemas:
        return "" if kind == "text" else '{"type":"object"}'
    if response_format.schema is not None:  # llama.cpp allows little white space, too
        schemas[0] = {"x-guidance": msgspec.Raw(COMPACT), **schemas[0]}
    return encode_json(schemas[0]).decode()


class CallReader:
    """Reader of one answer: divides its text, as it arrives, into content and calls.

    A call is ``{"name": …, "arguments": {…}}``, alone or in a list. It stands between the marks, at
    the start of the text, or after an earlier call. Text that may become a call is held back.
    """

    def __init__(self, form: AnswerForm) -> None:
        self.count = 0  # calls so far
        self._form, self._held, self._part = form, "", "text"
        self._may_begin = True  # a call without a mark may begin here
        self._depth, self._is_text, self._is_escaped = 0, False, False  # position in the JSON

    def push(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add text to the answer, and return OpenAI's delta; empty: nothing is known yet."""
        self._held += text
        content, calls = "", list[dict[str, Any]]()
        while self._held:
            if self._part == "arguments":
                if not calls:
                    calls.append({"index": self.count - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += self._arguments()
            elif self._part == "tail":
                rest = self._held[TAIL.match(self._held).end() :]  # type: ignore[union-attr]
                if not is_last and CLOSE.startswith(rest):
                    break
                self._held, self._part, self._may_begin = rest, "text", True
            else:
                content += self._content()
                head = HEAD.match(self._held[:MAX_HELD_CHARS])
                if head and head[1] in self._form.names:
                    one = {"index": self.count, "id": f"call_{secrets.token_hex(12)}"}
                    function = {"name": head[1], "arguments": ""}
                    calls.append({**one, "type": "function", "function": function})
                    self._held, self._part = self._held[head.end() :], "arguments"
                    self.count += 1
                elif head or is_last or len(self._held) >= MAX_HELD_CHARS or CLOSE in self._held:
                    place = len(self._held) - len(self._held.lstrip()) + 1  # it is not a call
                    content, self._held = content + self._held[:place], self._held[place:]
                    self._may_begin = False
                else:
                    break
        delta = {"content": content} if content else {}
        return {**delta, "tool_calls": calls} if calls else delta

    def _content(self) -> str:
        """Take the text before the next place where a call may begin."""
        if self._may_begin and START.match(self._held[:MAX_HELD_CHARS]):
            return ""
        place = self._held.find(MARK)
        if place < 0:
            lengths = range(min(len(MARK) - 1, len(self._held)), -1, -1)
            own = next(n for n in lengths if self._held.endswith(MARK[:n]))
            place = len(self._held) - own
        text = self._held[:place].rstrip()
        self._held = self._held[len(text) :]
        self._may_begin = self._may_begin and not text
        return text

    def _arguments(self) -> str:
        """Take the text of a call's arguments, up to their closing brace."""
        end = len(self._held)
        for place, char in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = char == "\\", char != '"'
            elif char == '"':
                self._is_text = True
            elif char in "{}[]":
                self._depth += 1 if char in "{[" else -1
                if not self._depth:
                    end, self._part = place + 1, "tail"
                    break
        text, self._held = self._held[:end], self._held[end:]
        return text
