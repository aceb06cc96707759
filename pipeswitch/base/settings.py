"""Declaration of a setting or an option; how it is read and shown.

The type of a field holds its rules. The help is the ``description`` of the type, or a line of the
struct's docstring in the form ``key: help``. A key has no unit suffix: its value has the unit.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from .errors import ConfigError
from .units import SizeSpec, nearest, parse_ms, parse_size

NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Names of models, jobs and servers: valid as a file name, a topic and a table column."""

MAX_MS: Final = 480 * 3600e3  # 20 days: timers count milliseconds in 31 bits


def form(pattern: str, noun: str) -> Meta:
    """Return the rule for an empty or matching text; a bare ``$`` would accept a newline, too."""
    return Meta(pattern=rf"^(?:{pattern})?(?!\n)$", extra={"noun": noun})


def written(noun: str, read: Callable[[Any], Any], **units: float) -> Meta:
    """Return the rule for a text that ``read`` parses; ``units`` print it, the largest first."""
    return Meta(extra={"noun": noun, "read": read, "units": units})


Size = Annotated[int, written("a size", parse_size, GiB=1 << 30, MiB=1 << 20, KiB=1 << 10, B=1)]
LargeSize = Annotated[Size, Meta(ge=1 << 20)]
in_ms: Final = written("a time", parse_ms, h=3600e3, m=60e3, s=1e3, ms=1)
Time = Annotated[float, Meta(ge=0, le=MAX_MS), in_ms]
Count = Annotated[int, Meta(ge=1)]
AmountSetting = Annotated[SizeSpec, written("an amount", SizeSpec.parse)]
Name = Annotated[str, form(NAME_PATTERN.pattern, "a name of a-z, 0-9 and . _ - inside it")]

NOUNS: Final[Mapping[type[types.Type], str]] = {
    types.BoolType: "true or false",
    types.IntType: "a whole number",
    types.FloatType: "a number",
    types.StrType: "a text",
    types.VarTupleType: "a list of texts",
}


class Rules(msgspec.Struct, frozen=True):
    """Rules of a type: msgspec's, the names and functions of ``written``, and the only choices."""

    info: types.Type
    extra: dict[str, Any]
    help: str = ""
    choices: tuple[str, ...] = ()  # an empty one means the default


class ConfigKey(msgspec.Struct, frozen=True):
    """Key of a table: field, type, help, and the default in the form that a user writes."""

    name: str
    kind: Any
    default: Any
    help: str
    is_required: bool = False


def rules_of(kind: Any) -> Rules:
    """Return the rules of a type."""
    info = types.type_info(kind)
    if isinstance(info, types.LiteralType):
        return Rules(info, {}, choices=get_args(kind))
    if not isinstance(info, types.Metadata):
        return Rules(info, {})
    schema = info.extra_json_schema or {}
    choices = tuple(schema.get("enum", ()))
    return Rules(info.type, info.extra or {}, schema.get("description", ""), choices)


@functools.cache
def settings(cls: type[msgspec.Struct]) -> dict[str, ConfigKey]:
    """Return the settings of a struct by their key in the file; required ones come first."""
    entries = re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    texts = {key: " ".join(text.split()) for key, text in entries}
    result = {}
    fields = msgspec.structs.fields(cls)
    for item in sorted(fields, key=lambda one: (not one.required, one.required and one.name)):
        key, rules = item.name.removesuffix("_bytes").removesuffix("_ms"), rules_of(item.type)
        default = [] if item.default is msgspec.NODEFAULT else item.default  # of a list of texts
        shown = "" if item.required else _shown(default, rules.extra)
        help_text = texts.get(key, rules.help)
        result[key] = ConfigKey(item.name, item.type, shown, help_text, item.required)
    return result


def _shown(value: Any, extra: Mapping[str, Any]) -> Any:
    for unit, size in extra.get("units", {}).items():
        if value and value % size == 0:
            return f"{value / size:.0f}{unit}"
    return str(value or 0) if "read" in extra and value != [] else value


def read(kind: Any, raw: Any, *, is_read: bool = False) -> Any:
    """Return a setting's value, given by a file, a variable, a flag or code.

    Raises:
        ValueError: the value is not allowed; the text names it and the allowed values.
    """
    rules, value = rules_of(kind), raw
    info, extra = rules.info, rules.extra
    if isinstance(info, types.VarTupleType | types.DictType) and isinstance(raw, str):
        value = [part.strip() for part in raw.split(",") if part.strip()]
    value = extra["read"](value) if "read" in extra and not is_read else value
    is_text = isinstance(value, str | float)  # variables are always texts; 2.0 is a whole number
    with contextlib.suppress(msgspec.ValidationError):
        result = msgspec.convert(value, kind, strict=not is_text, from_attributes=True)
        if not rules.choices or result in rules.choices:
            return result
    if rules.choices:
        named = [one for one in rules.choices if one]
        raise ValueError(f"{raw!r} is none of {', '.join(named)}{nearest(str(raw), named)}")
    if isinstance(info, types.VarTupleType) and isinstance(value, list | tuple):
        items = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        for one in value:  # the first wrong item raises
            read(get_args(items)[0], one)
    allowed = extra.get("noun", NOUNS.get(type(info), "allowed"))
    for word, bound in ((" of at least", "ge"), (" and at most", "le")):
        if getattr(info, bound, None) is not None:
            allowed += f"{word} {_shown(getattr(info, bound), extra)}"
    raise ValueError(f"{raw!r} is not {allowed}")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one table of the file; always valid, because a wrong value raises ConfigError.

    The docstring of each subclass has the help of its keys, in the form ``key: help``.
    """

    def __post_init__(self) -> None:
        for item in settings(type(self)).values():
            try:
                read(item.kind, getattr(self, item.name), is_read=True)
            except ValueError as problem:
                raise ConfigError(f"{type(self).__name__}.{item.name}: {problem}") from None
