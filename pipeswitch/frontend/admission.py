"""Is this request well formed, allowed, and does it fit the model? Pure: no socket, no clock.

Everything here raises an error of errors.py whose text says what was expected, what came, and
what to do. Nothing is allocated before a check passed (RELIABILITY 2, shape and dtype bombs).
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..config import NAME_PATTERN, PRIORITIES, nearest
from ..errors import InvalidInput, ModelNotFound, PermissionDenied
from ..programs.layout import ITEM_BYTES, TENSOR_ALIGN_BYTES, Manifest, ValueSpec, aligned
from ..programs.spec import DEFAULT_MAX_BATCH, BuildSpec
from ..scheduler.events import Announce
from ..wire.frames import MAX_DIMS, RequestHeader, WireTensor

MAX_TEXT: Final = 4096  # of one text field in a body: a path is shorter
MAX_ARGS: Final = 256
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HUB_NAME: Final = re.compile(r"hf:[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True, kw_only=True)
class CheckedInput:
    """An input in call order, and the message frame its bytes are in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frame: int
    offset_bytes: int  # from the start of the request's slab
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """An inference request that fits its model, with the bytes it needs in the pool."""

    inputs: tuple[CheckedInput, ...]
    input_bytes: int
    reply_bytes: int


def priority_number(name: str, default: int) -> int:
    """0 is the most urgent; an empty name means ``default`` (the model's own)."""
    if not name:
        return default
    if name not in PRIORITIES:
        raise InvalidInput(
            f"priority {name!r} is none of {', '.join(PRIORITIES)}{nearest(name, PRIORITIES)}"
        )
    return PRIORITIES[name]


def deadline_at_ms(deadline_ms: float | None, now_ms: float) -> float | None:
    """The instant a relative deadline falls on."""
    if deadline_ms is None:
        return None
    if not math.isfinite(deadline_ms) or deadline_ms <= 0:
        raise InvalidInput(f"deadline_ms must be a positive number, got {deadline_ms}")
    return now_ms + deadline_ms


def find_model(name: str, known: Mapping[str, Announce]) -> Announce:
    """The announced model; ModelNotFound names the nearest one."""
    found = known.get(name)
    if found is None:
        raise model_not_found(name, known)
    return found


def model_not_found(name: str, known: Iterable[str]) -> ModelNotFound:
    guess = nearest(name, known)
    data = {"nearest": guess.split('"')[1]} if guess else {}
    return ModelNotFound(f'no model "{name[:80]}"{guess}', hint="pipeswitch models", **data)


def signature_text(dtype: str, shape: Iterable[object]) -> str:
    """``float32[8,3,224,224]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _expected(manifest: Manifest, spec: ValueSpec) -> str:
    batch = f"{manifest.batch_min}..{manifest.batch_max}"
    return signature_text(spec.dtype, (batch if n is None else n for n in spec.shape))


def check_infer(
    header: RequestHeader, frame_bytes: Sequence[int], announced: Announce, max_bytes: int
) -> Admitted:
    """Match a request's tensors with the model's declared inputs, by name or by position.

    Args:
        header: names, dtypes and shapes as the client claims them; names may all be empty.
        frame_bytes: what really came, per tensor frame.
        announced: the model.
        max_bytes: limit for all inputs together.

    Raises:
        InvalidInput: with the model's signature in the text.
    """
    manifest = announced.manifest
    ordered = _by_call_order(header.model, header.inputs, manifest)
    batch: int | None = None
    checked = []
    offset = 0
    for spec, tensor in zip(manifest.inputs, ordered, strict=True):
        batch = _check_shape(header.model, spec, tensor, manifest, batch)
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
            f"{header.model}: {offset} bytes of input are over the limit of {max_bytes}",
            hint="raise [server] max_message",
        )
    reply = sum(aligned(spec.size_bytes(batch), TENSOR_ALIGN_BYTES) for spec in manifest.outputs)
    return Admitted(inputs=tuple(checked), input_bytes=offset, reply_bytes=reply)


def _by_call_order(
    model: str, tensors: Sequence[WireTensor], manifest: Manifest
) -> list[WireTensor]:
    names = [spec.name for spec in manifest.inputs]
    if len(tensors) != len(names):
        wanted = ", ".join(f'"{name}"' for name in names)
        raise InvalidInput(f"{model} takes {len(names)} inputs ({wanted}), got {len(tensors)}")
    if not any(tensor.name for tensor in tensors):
        return list(tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in by_name:
        if name not in names:
            raise InvalidInput(
                f'{model} has no input "{name[:80]}"{nearest(name, names)}',
                hint=f"its inputs are {', '.join(names)}",
            )
    if len(by_name) != len(names):
        raise InvalidInput(f"{model}: an input is given twice")
    return [by_name[name] for name in names]


def _check_shape(
    model: str, spec: ValueSpec, tensor: WireTensor, manifest: Manifest, batch: int | None
) -> int | None:
    """Returns the dynamic batch once it is known; all inputs must agree on it."""
    fits = tensor.dtype == spec.dtype and len(tensor.shape) == len(spec.shape) <= MAX_DIMS
    if fits:
        for extent, wanted in zip(tensor.shape, spec.shape, strict=True):
            if wanted is None:
                in_range = manifest.batch_min <= extent <= manifest.batch_max
                fits = fits and in_range and batch in (None, extent)
                batch = extent
            else:
                fits = fits and extent == wanted
    if not fits:
        raise InvalidInput(
            f'{model} input "{spec.name}" expects {_expected(manifest, spec)}, '
            f"got {signature_text(tensor.dtype[:16], tensor.shape[:MAX_DIMS])}",
            hint=f"pipeswitch show {model}",
        )
    return batch


def _tensor_bytes(model: str, tensor: WireTensor, frame_bytes: int) -> int:
    size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    if size != frame_bytes:
        raise InvalidInput(
            f'{model} input "{tensor.name}": {signature_text(tensor.dtype, tensor.shape)} is '
            f"{size} bytes, its frame has {frame_bytes}"
        )
    return size


# ---- bodies of the other verbs ---------------------------------------------------------------


def check_name(name: str, what: str) -> str:
    """A model's or job's name; InvalidInput says what is allowed."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(
            f"{what} name {name[:80]!r} is not allowed",
            hint="1 to 64 of a-z 0-9 . _ - and it starts with a letter or digit",
        )
    return name


class Body:
    """A request's body, read field by field; ``done`` refuses what nobody asked for."""

    def __init__(self, op: str, fields: Mapping[str, Any]) -> None:
        self._op = op
        self._left = dict(fields)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
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
        """A whole number from 0 to ``high``."""
        value = self._left.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
            raise InvalidInput(f"{self._op}: {key} must be a whole number from 0 to {high}")
        return value

    def counts(self, key: str, high: int = 1 << 20) -> tuple[int, ...]:
        """A list of whole numbers from 1 to ``high``; none when it is missing."""
        value = self._left.pop(key, ())
        is_counts = isinstance(value, list | tuple) and all(
            type(one) is int and 1 <= one <= high for one in value
        )
        if not is_counts or len(value) > MAX_ARGS:
            raise InvalidInput(f"{self._op}: {key} must be whole numbers from 1 to {high}")
        return tuple(value)

    def number(self, key: str, default: float, high: float) -> float:
        """A finite number from 0 to ``high``."""
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

    def signature(self, key: str) -> dict[str, list[Any]]:
        """``{name: [shape, dtype]}``; dense, listed dtypes only."""
        value = self._left.pop(key, {})
        is_named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        if not is_named or len(value) > 64:
            raise InvalidInput(f"{self._op}: {key} must map input names to [shape, dtype]")
        return {name[:128]: self._one_signature(name, spec) for name, spec in value.items()}

    def _one_signature(self, name: str, spec: object) -> list[Any]:
        if isinstance(spec, list | tuple) and len(spec) == 2:
            shape, dtype = spec
            if (
                isinstance(shape, list | tuple)
                and len(shape) <= MAX_DIMS
                and all(type(n) is int and 0 < n < 1 << 32 for n in shape)
                and isinstance(dtype, str)  # a list is not even hashable
                and dtype in ITEM_BYTES
            ):
                return [list(shape), dtype]
        raise InvalidInput(
            f"{self._op}: input {name[:80]!r} must be [shape, dtype] with at most {MAX_DIMS} "
            f"positive dimensions and one of {', '.join(ITEM_BYTES)}"
        )

    def done(self) -> None:
        if self._left:
            keys = ", ".join(sorted(str(key)[:40] for key in self._left)[:8])
            raise InvalidInput(f"{self._op}: unknown fields {keys}")


def parse_input(text: str, number: int = 0) -> tuple[str, list[Any]]:
    """``x=8x3x224x224:float32`` as ``(name, [shape, dtype])``; how flags and files write it.

    Args:
        text: the name may be missing, the dtype too (float32).
        number: position among the inputs; a nameless one is called x, x1, x2…

    Raises:
        InvalidInput: it is not of that form.
    """
    name, _, spec = text.rpartition("=")
    shape, _, dtype = spec.partition(":")
    parts = shape.split("x") if shape else []
    dtype = dtype or "float32"
    if not all(part.isdigit() for part in parts) or dtype not in ITEM_BYTES:
        raise InvalidInput(
            f"input {text!r} is not of the form [NAME=]8x3x224x224:float32",
            hint=f"dtypes: {', '.join(ITEM_BYTES)}",
        )
    return name or (f"x{number}" if number else "x"), [[int(part) for part in parts], dtype]


@dataclass(frozen=True, kw_only=True)
class CheckedSource:
    """Where a model comes from, with uploads resolved to files of the server."""

    source: str
    weights: str
    is_code: bool
    owner_files: tuple[str, ...] = ()  # named by path, so their content may change under the name


def check_source(
    source: str, weights: str, *, is_owner: bool, allow_code: Sequence[str], uploads_dir: str
) -> CheckedSource:
    """May this client register this, and which file is meant?

    1. ``torchvision:`` and ``hf:`` names are data: anybody. A folder behind ``hf:`` is a path.
    2. ``put:DIGEST`` is a file this or another client uploaded: anybody.
    3. A path on the server's machine: the owner's ipc socket only, others upload.
    4. ``package.module:factory`` is code: the owner, or an ``allow_code`` pattern.

    Raises:
        PermissionDenied, InvalidInput.
    """
    is_code = False
    owner_files = []
    if source.startswith("put:"):
        source = _uploaded(source, uploads_dir, "bundle")
    elif source.startswith(("torchvision:", "hf:")):
        if source.startswith("hf:") and not is_owner and not _HUB_NAME.fullmatch(source):
            raise _owners_only(source)
    elif _MODULE.fullmatch(source):
        is_code = True
        require_code_right(source, is_owner=is_owner, allow_code=allow_code)
    else:
        source = _owners_file(source, is_owner)
        owner_files.append(source)
        if not source.endswith(".bundle"):
            raise InvalidInput(
                f"{source}: the server reads .bundle files only, others may hold code",
                hint="the client converts .pt2: pipeswitch register NAME FILE.pt2",
            )
    if weights.startswith("put:"):
        weights = _uploaded(weights, uploads_dir, "safetensors")
    elif weights and weights != "pretrained" and not re.fullmatch(r"random:[0-9]{1,18}", weights):
        if not weights.endswith(".safetensors"):
            raise InvalidInput(
                f"weights {weights!r} are none of FILE.safetensors, pretrained, random:SEED"
            )
        weights = _owners_file(weights, is_owner)
        owner_files.append(weights)
    return CheckedSource(
        source=source, weights=weights, is_code=is_code, owner_files=tuple(owner_files)
    )


def _uploaded(reference: str, uploads_dir: str, kind: str) -> str:
    digest = reference.removeprefix("put:")
    if not _DIGEST.fullmatch(digest):
        raise InvalidInput("put: must be followed by a sha256 in hexadecimal")
    path = os.path.join(uploads_dir, f"{digest}.{kind}")
    if not os.path.isfile(path):
        raise InvalidInput(
            f"no {kind} with digest {digest[:12]}… was uploaded", hint="put it first"
        )
    return path


def _owners_file(path: str, is_owner: bool) -> str:
    if not is_owner:
        raise _owners_only(path)
    real = os.path.realpath(path)
    if not os.path.isabs(path) or not os.path.isfile(real):
        raise InvalidInput(
            f"no file {path!r} on the server's machine",
            hint="sources: torchvision:NAME, hf:NAME, FILE.bundle, package.module:factory",
        )
    return real


def _owners_only(path: str) -> PermissionDenied:
    return PermissionDenied(
        f"{path!r} names a file of the server's machine",
        hint="upload it (the CLI and the SDK do) or use the owner's ipc socket",
    )


def require_code_right(entry: str, *, is_owner: bool, allow_code: Sequence[str]) -> None:
    """Code is accepted through the owner's door or when its name is on the list."""
    module = entry.split(":", 1)[0]
    if is_owner or any(fnmatch.fnmatchcase(module, pattern) for pattern in allow_code):
        return
    raise PermissionDenied(
        f"{entry!r} is code, and this door does not accept code",
        hint=f"use the owner's ipc socket, or start the server with --allow-code '{module}'",
    )


def check_entry(entry: str, *, is_owner: bool, allow_code: Sequence[str]) -> str:
    """A training script's path or ``package.module:function``; the path is made real."""
    if _MODULE.fullmatch(entry):
        require_code_right(entry, is_owner=is_owner, allow_code=allow_code)
        return entry
    real = os.path.realpath(entry)
    require_code_right(real, is_owner=is_owner, allow_code=allow_code)
    if not os.path.isabs(entry) or not os.path.isfile(real):
        raise InvalidInput(
            f"no script {entry!r} on the server's machine",
            hint="give an absolute path, or package.module:function",
        )
    return real


def encode_spec(
    name: str, checked: CheckedSource, inputs: Mapping[str, list[Any]], max_batch: int
) -> tuple[bytes, str]:
    """msgpack of the BuildSpec, and a digest that is equal for an equal request.

    ``max_batch`` 0 means the default.
    """
    spec = BuildSpec(
        name=name,
        source=checked.source,
        weights=checked.weights,
        inputs={key: (tuple(shape), dtype) for key, (shape, dtype) in inputs.items()},
        max_batch=max_batch or DEFAULT_MAX_BATCH,
        allow_module_mode=checked.is_code,
    )
    packed = msgspec.msgpack.encode(spec)
    digest = hashlib.sha256(packed)
    for path in checked.owner_files:
        facts = os.stat(path)  # the same path with other bytes is another model
        digest.update(f"{facts.st_size}:{facts.st_mtime_ns}".encode())
    return packed, digest.hexdigest()
