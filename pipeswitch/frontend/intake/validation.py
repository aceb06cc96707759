"""Checks that a request is well formed, allowed, and fits its model. Pure: no socket, no clock.

Each failure raises an error of errors.py whose text names the expected and the actual value, and
the remedy. Nothing is allocated before a check has passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...base.bytes_tensors import BYTES, LENGTH_BYTES
from ...base.errors import InvalidInput, ModelNotFound, PermissionDenied
from ...base.model_options import PRIORITIES
from ...base.roles import ANYONE
from ...base.settings import NAME_PATTERN
from ...base.units import escape_control_chars, nearest
from ...programs.interface.dims import NoExtent, Values, match, values_text
from ...programs.interface.layout import (
    ITEM_BYTES,
    TENSOR_ALIGN_BYTES,
    Manifest,
    ValueSpec,
    aligned,
    signature_text,
)
from ...programs.interface.pytree import Tree, argument_names
from ...scheduler.state.events import ModelAvailable
from ...wire.frames import MAX_DIMS, TRACEPARENT, RequestHeader, WireTensor

MODULE_OUTPUT_BYTES: Final = 64 << 10  # minimum for an output of a module, whose size may vary
MAX_ADDRESS_CHARS: Final = 64  # the longest IPv6 address with a zone is shorter
MAX_TEXT: Final = 4096  # characters of a text field in a body; paths are shorter
MAX_ARGS: Final = 256


@dataclass(frozen=True, kw_only=True)
class CheckedInput:
    """One input of a request, with the number of the message frame that has its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frame: int
    offset_bytes: int  # from the start of the request's slab
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class ValidatedRequest:
    """Inference request that fits its model, with the bytes that it needs in the pool."""

    inputs: tuple[CheckedInput, ...]
    input_bytes: int
    reply_bytes: int


def priority_number(name: str, default: int) -> int:
    """Return a priority's number, 0 the most urgent; an empty name means ``default``."""
    if not name:
        return default
    if name not in PRIORITIES:
        raise InvalidInput(
            f"priority {name!r} is not one of {', '.join(PRIORITIES)}{nearest(name, PRIORITIES)}"
        )
    return PRIORITIES[name]


def deadline_at_ms(deadline_ms: float, now_ms: float) -> float:
    """Return the monotonic time of a relative deadline; raise InvalidInput if not positive."""
    if not math.isfinite(deadline_ms) or deadline_ms <= 0:
        raise InvalidInput(f"deadline_ms must be a positive number, got {deadline_ms}")
    return now_ms + deadline_ms


def no_version(name: str, version: int, known: Iterable[tuple[str, int]]) -> ModelNotFound:
    """Return the error for an unknown version of a model."""
    present = ", ".join(map(str, sorted(number for base, number in known if base == name)))
    return ModelNotFound(
        f'"{name}" has no version {version}' + (f": it has {present}" if present else ""),
        hint="pipeswitch models --versions",
        version=version,
    )


def model_not_found(name: str, known: Iterable[str]) -> ModelNotFound:
    """Return the error for an unknown model, with the nearest name."""
    composite = known[name].composite if isinstance(known, Mapping) and name in known else None
    if composite is not None:
        return ModelNotFound(
            f'"{name}" is a {composite.kind}, not a model',
            hint=f"pipeswitch show {name} names its models",
        )
    guess = nearest(name, known)
    data = {"nearest": guess.split('"')[1]} if guess else {}
    return ModelNotFound(f'no model "{name[:80]}"{guess}', hint="pipeswitch models", **data)


def _expected(manifest: Manifest, spec: ValueSpec, bound: Values) -> str:
    """Return a signature with the dimensions that other inputs fix: ``int64[1..8,length=7]``."""
    texts = {dim.name: f"{dim.low}..{dim.high}" for dim in manifest.dims}
    texts |= {name: f"{name}={number}" for name, number in bound.items()}
    extents = (texts[n] if isinstance(n, str) else n for n in spec.shape)
    return signature_text(spec.dtype, extents)


def check_infer(
    header: RequestHeader, frame_bytes: Sequence[int], announced: ModelAvailable, max_bytes: int
) -> ValidatedRequest:
    """Match a request's tensors with the model's declared inputs, by name or by position.

    Args:
        header: names, dtypes and shapes as the client claims them; names may all be empty.
        frame_bytes: received bytes of each tensor frame.
        announced: the model.
        max_bytes: limit for all inputs together.

    Raises:
        InvalidInput: a tensor does not match; the text has the model's signature.
    """
    wrapper, manifest = announced.wrapper, announced.manifest
    if wrapper is not None and wrapper.before:
        manifest = wrapper.raw(manifest)
    ordered = _by_call_order(header.model, header.inputs, manifest)
    values: dict[str, int] = {}
    checked = []
    offset = 0
    for spec, tensor in zip(manifest.inputs, ordered, strict=True):
        values = _check_shape(header.model, spec, tensor, manifest, values)
        size = _tensor_bytes(header.model, tensor, frame_bytes[tensor.frame])
        checked.append(
            CheckedInput(
                name=spec.name,
                dtype=spec.dtype,
                shape=tensor.shape,
                frame=tensor.frame,
                offset_bytes=offset,
                size_bytes=size,
            )
        )
        offset += aligned(size, TENSOR_ALIGN_BYTES)
    if offset > max_bytes:
        raise InvalidInput(
            f"{header.model}: {offset} bytes of input exceed the limit of {max_bytes}",
            hint="raise [server] max_message",
        )
    return ValidatedRequest(
        inputs=tuple(checked),
        input_bytes=offset,
        reply_bytes=_reply_bytes(header.model, manifest, values),
    )


def check_brought(
    model: str, brought: Mapping[str, WireTensor], frame_bytes: Sequence[int], manifest: Manifest
) -> dict[str, int]:
    """Check the inputs that a sequence's request brings, before a byte of them is read.

    Returns:
        The extents of the open dimensions that these inputs fix.

    Raises:
        InvalidInput: dtype, shape, range or size is wrong; the text has the model's signature.
    """
    values: dict[str, int] = {}
    for spec in manifest.inputs:
        if (tensor := brought.get(spec.name)) is not None:
            values = _check_shape(model, spec, tensor, manifest, values)
            _tensor_bytes(model, tensor, frame_bytes[tensor.frame])
    return values


def _reply_bytes(model: str, manifest: Manifest, values: Values) -> int:
    try:
        sizes = [spec.size_bytes(values) for spec in manifest.outputs]
    except NoExtent as error:
        raise InvalidInput(f"{model} cannot compute {values_text(values)}: {error}") from None
    least = MODULE_OUTPUT_BYTES if manifest.mode == "module" else 0
    return sum(aligned(max(size, least), TENSOR_ALIGN_BYTES) for size in sizes)


def _by_call_order(
    model: str, tensors: Sequence[WireTensor], manifest: Manifest
) -> list[WireTensor]:
    names = [spec.name for spec in manifest.inputs]
    if len(tensors) != len(names):
        expected = ", ".join(f'"{name}"' for name in names)
        raise InvalidInput(f"{model} takes {len(names)} inputs ({expected}), got {len(tensors)}")
    if not any(tensor.name for tensor in tensors):
        return list(tensors)
    by_name = {_full_name(tensor.name, names, manifest.takes): tensor for tensor in tensors}
    for name in by_name:
        if name not in names:
            near = nearest(name, names) or f"; its inputs are {', '.join(names)}"
            raise InvalidInput(
                f'{model} has no input "{name[:80]}"{near}', hint=f"pipeswitch show {model}"
            )
    if len(by_name) != len(names):
        raise InvalidInput(f"{model}: an input appears twice")
    return [by_name[name] for name in names]


def _full_name(name: str, names: Sequence[str], takes: Tree) -> str:
    """Return a leaf's full name: for ``1.h``, ``state.h`` if the second argument is ``state``."""
    if name in names:
        return name
    number, dot, rest = name.partition(".")
    roots = {str(n): root for n, root in enumerate(argument_names(takes, names))}
    return f"{roots[number]}{dot}{rest}" if number in roots else name


def _check_shape(
    model: str, spec: ValueSpec, tensor: WireTensor, manifest: Manifest, bound: Values
) -> dict[str, int]:
    """Check one input; return ``bound`` plus its open dimensions. All inputs must agree on them."""
    values = dict(bound)
    fits = tensor.dtype == spec.dtype and match(spec.shape, tensor.shape, values)
    in_range = all(dim.low <= values.get(dim.name, dim.low) <= dim.high for dim in manifest.dims)
    if not fits or not in_range:
        raise InvalidInput(
            f'{model} input "{spec.name}" expects {_expected(manifest, spec, bound)}, '
            f"got {signature_text(tensor.dtype[:16], tensor.shape[:MAX_DIMS])}",
            hint=f"pipeswitch show {model}",
        )
    return values


def _tensor_bytes(model: str, tensor: WireTensor, frame_bytes: int) -> int:
    count = math.prod(tensor.shape)
    if tensor.dtype == BYTES:  # the function's process checks each text's length
        if frame_bytes < count * LENGTH_BYTES:
            raise InvalidInput(f'{model} input "{tensor.name}" has too few bytes for {count} texts')
        return frame_bytes
    size = count * ITEM_BYTES[tensor.dtype]
    if size != frame_bytes:
        raise InvalidInput(
            f'{model} input "{tensor.name}": {signature_text(tensor.dtype, tensor.shape)} is '
            f"{size} bytes, its frame has {frame_bytes}"
        )
    return size


# ---- bodies of the other verbs ---------------------------------------------------------------


def check_name(name: str, what: str) -> str:
    """Return ``name`` if a model or job may have it, else raise InvalidInput with the rule."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(
            f"{what} name {name[:80]!r} is not allowed",
            hint="1 to 64 of a-z 0-9 . _ - and it starts with a letter or digit",
        )
    return name


class Body:
    """Body of a request, read field by field; ``done`` refuses unread fields."""

    def __init__(self, op: str, fields: Mapping[str, Any]) -> None:
        self._op = op
        self._left = dict(fields)

    def has(self, key: str) -> bool:
        """Return True if the field is present and was not read yet."""
        return key in self._left

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string field; required when there is no default."""
        value = self._left.pop(key, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT or "\0" in value:
            raise InvalidInput(f"{self._op}: {key} must be a text of at most {MAX_TEXT} characters")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{self._op}: {key} must be true or false")
        return value

    def count(self, key: str, default: int | None = None, high: int = 1 << 50) -> int:
        """Return a whole number from 0 to ``high``."""
        value = self._left.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
            raise InvalidInput(f"{self._op}: {key} must be a whole number from 0 to {high}")
        return value

    def number(self, key: str, default: float, high: float) -> float:
        """Return a finite number from 0 to ``high``."""
        value = self._left.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
            raise InvalidInput(f"{self._op}: {key} must be a number from 0 to {high:g}")
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._left.pop(key, ())
        is_texts = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if not is_texts or len(value) > MAX_ARGS or sum(map(len, value)) > 16 * MAX_TEXT:
            raise InvalidInput(f"{self._op}: {key} must be a list of at most {MAX_ARGS} texts")
        return tuple(value)

    def of_type(self, key: str, kind: Any, default: object = None) -> Any:
        """Return the field as ``msgspec`` converts it; required when there is no default."""
        try:
            return msgspec.convert(self._left.pop(key, default), kind)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{self._op}: {key}: {escape_control_chars(str(error))}") from None

    def rest(self, kind: Any) -> Any:
        """Return the remaining fields as a struct of the type ``kind``.

        Raises:
            InvalidInput: a field is missing, unknown, of another type or out of range.
        """
        fields, self._left = self._left, {}
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            problem, _, field = escape_control_chars(str(error)).partition(" - at `$.")
            raise InvalidInput(
                f"{self._op}: {field.rstrip('`')}{': ' if field else ''}{problem}",
                hint=f"fields: {', '.join(kind.__struct_fields__)}",
            ) from None

    def done(self) -> None:
        if self._left:
            keys = ", ".join(sorted(str(key)[:40] for key in self._left)[:8])
            raise InvalidInput(f"{self._op}: unknown fields {keys}")


def trace_id_of(body: Body) -> str:
    """Return the trace id of W3C's ``traceparent``; often empty. Raises InvalidInput."""
    traceparent = body.text("traceparent", "")
    if traceparent and not TRACEPARENT.fullmatch(traceparent):
        hint = "00-TRACE-SPAN-01, with 32 and 16 hexadecimal digits"
        raise InvalidInput(f"traceparent {traceparent[:80]!r} is not in W3C's format", hint=hint)
    return traceparent[3:35]


def tenant_of(body: Body, own: str) -> str:
    """Return the owning tenant: the client's own, or the one that the server's owner names.
    The gateway, which has the owner's socket, names its callers.

    Raises:
        PermissionDenied, InvalidInput.
    """
    named = body.text("tenant", "")
    if named and own:
        raise PermissionDenied("only the server's owner may send a request for another client")
    return (named if named == ANYONE else check_name(named, "tenant")) if named else own


def address_of(body: Body, own: str) -> str:
    """Return the address that the owner names, often empty.
    The gateway, which has the owner's socket, names the addresses of its callers.

    Raises:
        PermissionDenied, InvalidInput.
    """
    named = body.text("address", "")
    if named and own:
        raise PermissionDenied("only the server's owner may send a request for another address")
    if len(named) > MAX_ADDRESS_CHARS:
        raise InvalidInput(f"address has {len(named)} characters; the limit is {MAX_ADDRESS_CHARS}")
    return named
