"""Translation of other protocols' requests for texts to OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ...base.codec import UNREADABLE, check_memory, encode_json
from ...base.errors import InvalidInput
from ...base.units import nearest

Fields = dict[str, Any]
NULL: Final = msgspec.Raw(b"null")
ABSENT: Final = msgspec.Raw()
NEUTRAL_BYTES: Final = 256  # limit of a value that has no effect


class TextPart(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Part of a text."""

    text: str
    type: Literal["text", "input_text", "output_text"] = "text"
    annotations: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT
    citations: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT


Texts = str | list[TextPart]


class Dialect(NamedTuple):
    """Fields of a protocol's request."""

    own: type[msgspec.Struct]  # the fields that its door translates
    copied: Mapping[str, str]  # field -> OpenAI's name of it
    neutral: Mapping[str, Sequence[Any]]  # field -> values that change no answer, as in ``table``
    refused: Sequence[str] = ()  # fields of ``neutral`` whose other values are refused

    def read(self, body: Any) -> tuple[Any, Fields, list[str]]:
        """Return the own fields, the copied ones, and the names of those ignored.

        Raises:
            InvalidInput: the body is malformed, or has a field that is not supported.
        """
        check_memory(len(body))
        try:
            fields = fields_of(body)
            known = self.own.__struct_fields__
            own = {name: fields.pop(name) for name in known if name in fields}
            copied = {to: fields.pop(name) for name, to in self.copied.items() if name in fields}
            other = [
                name
                for name, value in fields.items()
                if not is_neutral(value, self.neutral.get(name, ()))
            ]
            for name in other:
                if name not in self.neutral or name in self.refused:
                    near = nearest(name, [*known, *self.copied])
                    text = f"{name[:80]!r} is not supported{near}"
                    raise InvalidInput(text, hint="leave it out", param=name[:80])
            return msgspec.json.decode(encode_json(own), type=self.own), copied, other
        except UNREADABLE as error:
            raise InvalidInput(f"invalid request: {error}") from None


def table(text: str) -> dict[str, list[Any]]:
    """Return lines ``NAME … = VALUE …`` as values by name (``*``: all)."""
    lines = [line.partition(" = ") for line in text.strip().split("\n")]
    return {
        name: [json.loads(value) for value in values.split()]
        for names, _, values in lines
        for name in names.split()
    }


def fields_of(data: Any) -> dict[str, msgspec.Raw]:
    """Return an object's non-null fields undecoded, since their decoded size is unknown.

    Raises:
        InvalidInput: a field is not UTF-8.
    """
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    for name, value in fields.items():
        try:
            str(value, "utf-8")  # a decoder does not check strings that it skips
        except UnicodeError:
            raise InvalidInput(f"{name[:80]!r} is not UTF-8", param=name[:80]) from None
    return {name: value for name, value in fields.items() if value != NULL}


def is_neutral(raw: msgspec.Raw, neutral: Sequence[Any]) -> bool:
    """Return whether a value is one of ``neutral``."""
    if "*" in neutral:
        return True
    value = msgspec.json.decode(raw) if len(raw) <= NEUTRAL_BYTES else ...
    is_flag = isinstance(value, bool)  # True equals 1
    return any(value == one and isinstance(one, bool) is is_flag for one in neutral)


def joined(texts: Texts) -> str:
    """Return the whole text."""
    return texts if isinstance(texts, str) else "".join(one.text for one in texts)


def call_of(id: str, name: str, arguments: Any) -> Fields:
    """Return a call in an assistant's message; ``arguments``: JSON."""
    function = {"name": name, "arguments": bytes(arguments).decode()}
    return {"id": id, "type": "function", "function": function}


def tool_of(name: str, description: str | None = None, parameters: Any = ABSENT) -> Fields:
    """Return a function that the model may call, or the one that it must call."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": filled(function)}


def filled(fields: Fields) -> Fields:
    """Return the fields that are neither None nor empty."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], ABSENT)}
