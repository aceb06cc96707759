"""Specification of a registration, which the controller fills and a builder builds. No torch."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from ..base.errors import RegistrationRefused
from ..base.extras import WRAPPERS
from ..base.machine import processor_features
from ..base.model_options import BuildOptions, SourceFile
from ..base.plain_files import open_regular
from .graphs.bundle import check_signature, check_trees
from .graphs.operators import checked_by
from .interface.dims import extent_text
from .interface.layout import BUNDLE_FILE as BUNDLE_FILE
from .interface.layout import Manifest, Wrapper, signature_text
from .interface.packing import DERIVED_FILE, PACKED_FORM, Layout
from .interface.pytree import Tree

DEFAULT_MAX_BATCH: Final = 64
DEFAULT_SEQUENCES: Final = 8  # sequences in one step of a language model
MANIFEST_FILE: Final = "manifest.json"
WEIGHTS_FILE: Final = "weights.safetensors"  # module mode, which has no bundle with a graph
PROGRAM_FOLDER: Final = re.compile("[0-9a-f]{64}")  # a folder is named after the program's digest
MAX_MANIFEST_BYTES: Final = 64 << 20


class BuildSpec(BuildOptions, frozen=True, kw_only=True):
    """Options of one build, with the server's defaults in place of empty ones.

    A ``source`` that is a ``package.module:factory`` *runs code*: callers must have checked that
    this is allowed. ``weights`` may also be the folder of a job's commit.
    """

    name: str
    max_batch: int = DEFAULT_MAX_BATCH
    precision: str = "exact"
    origin: str = ""  # with an adapter and a bundle: the source whose weights get the adapter
    part: str = ""  # part of the job in ``weights``; empty: the only part that fits
    takes: Tree = None  # tree of the arguments; None: each input is an argument
    example: str = ""  # a .safetensors file with values of the inputs; empty: random values
    allow_module_mode: bool = False
    bucket_bytes: int = 0  # 0: ``grouping.DEFAULT_BUCKET_BYTES``
    file: SourceFile | None = None  # file of its source or weights, for people
    registered_at_s: int = 0  # Unix time; 0: unknown


def files_of(spec: bytes) -> list[Path]:
    """Return the files that an encoded spec names, uploads included."""
    decoded = msgspec.msgpack.decode(spec, type=BuildSpec)
    return [
        Path(text)
        for text in (decoded.source, decoded.weights, decoded.example, decoded.adapter)
        if os.path.isabs(text)
    ]


def wrapper_of(spec: BuildSpec) -> Wrapper | None:
    """Return what converts the values of a spec's model; None if nothing does.

    Raises:
        RegistrationRefused: this installation lacks the extra that does it.
    """
    for option in ("preprocess", "postprocess"):
        if getattr(spec, option):
            if option not in WRAPPERS.names():
                raise RegistrationRefused(option, "this server has no extra for it")
            wrapper: Wrapper = WRAPPERS.load(option)(spec)
            return wrapper
    return None


def needs_more(spec: bytes) -> bool:
    """Return True if the build cannot be confined: it runs a factory, or downloads weights."""
    decoded = msgspec.msgpack.decode(spec, type=BuildSpec)
    is_data = decoded.source.endswith(".bundle") and not decoded.adapter
    is_named = decoded.source.startswith(("torchvision:", "hf:"))
    return not is_data and (not is_named or decoded.weights == "pretrained")


def with_state(manifest: Manifest, state: Mapping[str, tuple[str, int]]) -> Manifest:
    """Return the manifest with ``state``: outputs that are inputs of a sequence's next request.

    Raises:
        RegistrationRefused: an input or output does not exist, or does not fit its counterpart.
    """
    inputs = {one.name: one for one in manifest.inputs}
    outputs = {one.name: one for one in manifest.outputs}
    for name, (source, axis) in state.items():
        for kind, known, tensor_name in (("input", inputs, name), ("output", outputs, source)):
            if tensor_name not in known:
                raise RegistrationRefused(
                    "state",
                    f'there is no {kind} "{tensor_name[:80]}"',
                    hint=f"its {kind}s are {', '.join(known)}",
                )
        into, out = inputs[name], outputs[source]
        shapes = [list(into.shape), list(out.shape)]
        if axis >= 0 and all(axis < len(shape) for shape in shapes):
            for shape in shapes:
                del shape[axis]
        is_fixed = 0 <= axis < len(into.shape) and not isinstance(into.shape[axis], str)
        is_unlike = into.dtype != out.dtype or shapes[0] != shapes[1]
        if is_unlike or is_fixed or axis >= len(into.shape):
            texts = [signature_text(one.dtype, map(extent_text, one.shape)) for one in (into, out)]
            raise RegistrationRefused(
                "state",
                f'input "{name}" is {texts[0]}, output "{source}" is {texts[1]}'
                + (f", to be appended along dimension {axis}" if axis >= 0 else ""),
                hint=f'dynamic={{"{name}": {{{axis}: (1, 400)}}}}, up to how many' * is_fixed,
            )
    if len({source for source, _ in state.values()}) < len(state) or len(state) == len(inputs):
        raise RegistrationRefused("state", "an output is one input, and one input is no state")
    return msgspec.structs.replace(manifest, extra={**manifest.extra, "state": dict(state)})


def batched_as(manifest: Manifest, spec: BuildSpec) -> tuple[int, float] | None:
    """Return the maximum batch of several requests and the delay; None: requests run alone.

    Without a limit in ``spec``, requests that may be padded get the program's largest batch.
    """
    low, high = manifest.batch
    if spec.batch:
        return spec.batch, spec.batch_delay_ms
    return (high, 0.0) if manifest.pads and high > low else None


def is_batched_as_requested(manifest: Manifest, spec: bytes) -> bool:
    """Return True if a model's requests are batched as an encoded spec says."""
    batching = manifest.batching
    requested = batched_as(manifest, msgspec.msgpack.decode(spec, type=BuildSpec))
    return requested == (batching and (batching.limit, batching.delay_ms))


def is_same_content(one: Manifest, other: Manifest) -> bool:
    """Return True if two programs' plain weights and graphs have equal digests.

    Derived weights may differ: another machine packs other calls, in another layout.
    """
    plain, again = (
        (m.weights_sha256, m.head_sha256) if m.precision is None else m.precision.plain_sha256
        for m in (one, other)
    )
    return plain == again


def weights_file(manifest: Manifest) -> str:
    """Return the name of the file in the program's folder that contains its tensors."""
    if manifest.mode == "module":
        return WEIGHTS_FILE
    return DERIVED_FILE if manifest.precision is not None else BUNDLE_FILE


def load_manifest(path: str | os.PathLike[str] | int) -> Manifest:
    """Read a manifest; ``path`` is its file, its folder or an open descriptor of the file.

    A builder of a client's program may have written the file, so its signature is checked.

    Raises:
        RegistrationRefused: the manifest is missing, damaged, another program's or not a manifest,
            a number does not fit into a message, or a graph's signature is invalid.
    """
    place = path
    if not isinstance(path, int) and os.path.isdir(path):
        place = os.path.join(path, MANIFEST_FILE)
    try:
        with open(place, "rb", closefd=not isinstance(path, int), opener=open_regular) as file:
            file.seek(0)
            text = file.read(MAX_MANIFEST_BYTES + 1)
        if len(text) > MAX_MANIFEST_BYTES:
            raise RegistrationRefused("manifest", f"larger than {MAX_MANIFEST_BYTES} bytes")
        content, _, digest = text.rpartition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != digest:
            raise RegistrationRefused("manifest", "it is damaged: it does not match its digest")
        manifest = msgspec.json.decode(content, type=Manifest)
        msgspec.msgpack.encode(manifest)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise RegistrationRefused("manifest", f"{place}: {error}") from error
    folder = "" if isinstance(path, int) else os.path.basename(path)
    if PROGRAM_FOLDER.fullmatch(folder) and manifest.digest != folder:
        raise RegistrationRefused("manifest", "it is another program's")
    if manifest.mode == "graph":
        check_signature(manifest.inputs, manifest.outputs, manifest.dims)
    check_trees(manifest)
    return manifest


def save_manifest(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write ``manifest.json`` into the folder ``path``: a line of JSON, then its SHA-256 in hex."""
    content = msgspec.json.encode(manifest)
    digest = hashlib.sha256(content).hexdigest().encode()
    (Path(path) / MANIFEST_FILE).write_bytes(content + b"\n" + digest)


@functools.cache
def fingerprint(layout: Layout, threads: int) -> str:
    """Return a fingerprint of torch, the processor, and the number of compute threads.

    oneDNN's layout of a convolution depends on the number of threads.
    """
    threads_text = str(threads if layout == "onednn" else 0)
    parts = [PACKED_FORM, threads_text, version("torch"), *processor_features()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_checked(manifest: Manifest) -> bool:
    """Return True if the program was checked against this release's contracts; else rebuild it."""
    extra = manifest.extra
    is_known = extra.get("checked_by") == checked_by() and "last_readers" in extra
    return manifest.mode == "module" or is_known


def is_packed_for(manifest: Manifest, layout: Layout, threads: int) -> bool:
    """Return True if workers with this layout and thread count can read the program's weights."""
    form, here = manifest.precision, (layout, fingerprint(layout, threads))
    return form is None or (form.layout, form.fingerprint) == here


def rebuild_spec(spec: bytes, folder: Path) -> bytes:
    """Return an encoded spec that rebuilds a program from the bundle in its folder.

    The original source may no longer exist: uploads are deleted.
    """
    unpacked = msgspec.msgpack.decode(spec, type=BuildSpec)
    own = {"source": str(folder / BUNDLE_FILE), "weights": "", "adapter": ""}
    return msgspec.msgpack.encode(msgspec.structs.replace(unpacked, **own))
