"""The bundle: a program's format in files and on the wire. Pure, no torch.

A bundle is one safetensors file. Its ``__metadata__`` contains JSON: the graph under
``pipeswitch.program``, settings of a kind that an extra reads under ``pipeswitch.KIND``, and notes
of the export for people under ``pipeswitch.notes``. Its tensors are the weights, in order of first
use, and then the example inputs (``EXAMPLE``), if they are kept. It contains no code, and nothing
is unpickled (ADR 7 says why PyTorch's own formats are not accepted).

Values are numbered: the inputs, then the weights, then one value per node. An argument is a JSON
scalar, a list of arguments, or an object with one key. The key is ``v`` for the number of a value
(``{"v": 12}``), ``dtype``, ``layout``, ``memory_format``, ``device`` (always the program's device),
or ``float`` for numbers that JSON does not have (``{"float": "inf"}``).

An attacker may have made the file. So sizes are checked before memory is allocated, arithmetic uses
Python integers, and every error is a ``RegistrationRefused``.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from ...base.codec import UNREADABLE
from ...base.errors import ConfigError, RegistrationRefused
from ...base.extras import SETTINGS
from ...base.plain_files import open_regular
from ...base.units import escape_control_chars
from ..interface.dims import (
    MAX_ELEMENTS,
    MAX_PARTS,
    Dim,
    NoExtent,
    Values,
    check_dims,
    check_extent,
    corners,
    shape_at,
    values_of,
)
from ..interface.layout import ITEM_BYTES, KindSettings, Manifest, ValueSpec
from ..interface.packing import TARGETS, PackedLayout
from ..interface.pytree import Tree, check_takes, check_tree
from .operators import split_target

VERSION: Final = 2
OURS: Final = "pipeswitch."  # prefix of the metadata's keys
METADATA_KEY: Final = f"{OURS}program"
NOTES_KEY: Final = f"{OURS}notes"
UNSAVED_KEY: Final = f"{OURS}unsaved"
EXAMPLE: Final = "pipeswitch.example."
"""Prefix of the names of the example inputs, to which the input's position is appended. A precision
is compared with the plain program on them."""

MAX_HEADER_BYTES: Final = 16 << 20  # the largest known program needs less than 1 MiB
MAX_WEIGHTS: Final = 65_536
MAX_NODES: Final = 131_072
MAX_VALUES: Final = 64  # limit for inputs, and for outputs
MAX_DIMS: Final = 8
MAX_NAME_CHARS: Final = 256
MAX_NESTING: Final = 3  # maximum nesting of lists in arguments; aten's need 2, as in index([[...]])
MAX_LIST_ITEMS: Final = 65_536
MAX_NOTES: Final = 32  # of an export, and of ``KindSettings``
MAX_NOTE_CHARS: Final = 1000
MAX_TEXT_CHARS: Final = 64  # for a text argument such as "bilinear" or an einsum equation

SAFETENSORS_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_TO_SAFETENSORS: Final = {ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}

TAGS: Final = {
    "dtype": frozenset(ITEM_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset(
        {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
    ),
    "device": frozenset({"target"}),
    "float": frozenset({"inf", "-inf", "nan"}),
}
"""Allowed keys and values of an argument's object, besides ``{"v": index}``."""


class Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call. Its value's number is (inputs + weights + the node's position)."""

    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Graph(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The graph of a program: a list of calls without branches or loops."""

    version: int
    inputs: tuple[ValueSpec, ...]
    weights: tuple[str, ...]  # names of the file's tensors, by first use
    nodes: tuple[Node, ...]
    results: tuple[int, ...]  # numbers of the values that are the outputs
    outputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()  # each occurs in an input's shape
    takes: Tree = None  # tree of the arguments; None: each input is an argument
    returns: Tree = None  # tree of the outputs' nesting; None: unknown, or a single tensor
    packed: dict[str, PackedLayout] = {}  # weight -> layout; only in derived graphs

    @property
    def first_node_value(self) -> int:
        return len(self.inputs) + len(self.weights)


class FileTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file_offset_bytes: int  # from the start of the file


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a bundle's header: the graph, and the offsets of its weights in the file."""

    graph: Graph
    tensors: tuple[FileTensor, ...]  # in the order of graph.weights
    examples: tuple[FileTensor, ...] = ()  # in the order of graph.inputs; empty: none are known
    settings: KindSettings | None = None  # None: a plain model
    notes: tuple[str, ...] = ()  # notes of the export, for people
    unsaved: tuple[str, ...] = ()  # weights that the module's state dict does not have


def _refuse(part: str, reason: str) -> NoReturn:
    raise RegistrationRefused(part, reason)


def read_bundle(
    path: str | os.PathLike[str] | int, head_sha256: str = "", *, is_derived: bool = False
) -> Bundle:
    """Read and check a bundle's header. Tensor bytes are not read.

    Args:
        head_sha256: expected digest of the file's head; empty: unknown.
        is_derived: True if this server's build wrote it; only then weights may be packed.

    Raises:
        RegistrationRefused: the file is not a valid bundle; the error names the part.
    """
    tensors, metadata, digest = read_safetensors_header(path)
    if head_sha256 not in ("", digest):
        _refuse("bundle", "its head is damaged: it does not match the digest in the manifest")
    text = metadata.get(METADATA_KEY)
    if text is None:
        _refuse("bundle", f"its metadata has no {METADATA_KEY!r}: these are bare weights")
    graph = decode_graph(text, is_derived=is_derived)
    count = len(graph.weights)
    tensors, examples = tensors[:count], tensors[count:]
    if graph.weights != tuple(tensor.name for tensor in tensors):
        _refuse("bundle weights", "names or order differ between the graph and the file")
    if examples:
        _check_examples(graph, examples)
    settings = _decode_settings(metadata)
    if settings is not None:
        settings.check((*graph.inputs, *graph.outputs), graph.dims)
    notes = _decode_notes(metadata.get(NOTES_KEY, "[]"))
    unsaved = _decode_texts(metadata.get(UNSAVED_KEY, "[]"), "bundle unsaved")
    if not {*graph.weights}.issuperset(unsaved):
        _refuse("bundle unsaved", "it names what is not a weight")
    return Bundle(
        graph=graph,
        tensors=tensors,
        examples=examples,
        settings=settings,
        notes=notes,
        unsaved=unsaved,
    )


def _decode_texts(text: str, part: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except UNREADABLE as error:
        _refuse(part, str(error)[:200])


def _decode_settings(metadata: Mapping[str, str]) -> KindSettings | None:
    """Return the settings of the model's kind; None for a plain model."""
    own = (METADATA_KEY, NOTES_KEY, UNSAVED_KEY)
    keys = [key for key in metadata if key.startswith(OURS) and key not in own]
    if len(keys) > 1:
        _refuse("bundle", "it has settings of several kinds")
    try:
        read = [SETTINGS.load(key.removeprefix(OURS)) for key in keys]
    except ConfigError as error:
        raise RegistrationRefused("bundle", error.message, hint=error.hint) from None
    return read[0](metadata[keys[0]]) if read else None


def _check_examples(graph: Graph, examples: Sequence[FileTensor]) -> None:
    declared = [(f"{EXAMPLE}{at}", spec.dtype) for at, spec in enumerate(graph.inputs)]
    shapes = (spec.shape for spec in graph.inputs)
    if declared != [(one.name, one.dtype) for one in examples]:
        _refuse("bundle weights", "what follows them are not examples of the inputs")
    if values_of(shapes, (one.shape for one in examples)) is None:
        _refuse("bundle examples", "their shapes are not those of the inputs")


def _decode_notes(text: str) -> tuple[str, ...]:
    notes = _decode_texts(text, "bundle notes")
    if len(notes) > MAX_NOTES or any(len(one) > MAX_NOTE_CHARS for one in notes):
        _refuse("bundle notes", f"more than {MAX_NOTES} notes of {MAX_NOTE_CHARS} characters")
    return tuple(map(escape_control_chars, notes))


def write_bundle(
    path: str | os.PathLike[str],
    graph: Graph,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    data: Iterable[memoryview | bytes],
    settings: KindSettings | None = None,
    notes: Sequence[str] = (),
    unsaved: Sequence[str] = (),
) -> None:
    """Write a bundle of ``tensors`` (name, dtype, shape) in order; ``data`` yields their bytes.

    Notes that are too long or too many are cut.
    """
    metadata = {METADATA_KEY: encode_graph(graph)}
    if settings is not None:
        settings.check((*graph.inputs, *graph.outputs), graph.dims)
        metadata[f"{OURS}{settings.kind}"] = msgspec.json.encode(settings).decode()
    if notes:
        short = [escape_control_chars(note)[:MAX_NOTE_CHARS] for note in notes[:MAX_NOTES]]
        metadata[NOTES_KEY] = msgspec.json.encode(short).decode()
    if unsaved:
        metadata[UNSAVED_KEY] = msgspec.json.encode(unsaved).decode()
    write_safetensors(path, tensors, data, metadata)


def encode_graph(graph: Graph) -> str:
    """Return the graph as canonical JSON."""
    return msgspec.json.encode(graph).decode()


def decode_graph(text: str, *, is_derived: bool = False) -> Graph:
    """Decode and check a graph.

    Raises:
        RegistrationRefused: ``text`` is not a valid graph, or a client's graph with packed weights.
    """
    try:
        graph = msgspec.json.decode(text, type=Graph)
    except (*UNREADABLE, ValueError) as error:
        _refuse("bundle graph", str(error)[:200] or "it is not the JSON of a program")
    if not is_derived and (graph.packed or any(node.target in TARGETS for node in graph.nodes)):
        _refuse("bundle graph", "its weights are packed: only this server packs weights")
    check_graph(graph)
    return graph


def check_graph(graph: Graph) -> None:
    """Refuse a graph that exceeds a limit, or in which a node reads a value of a later node."""
    if graph.version != VERSION:
        _refuse("bundle version", f"this one is {graph.version}, we read {VERSION}")
    if len(graph.nodes) > MAX_NODES or len(graph.weights) > MAX_WEIGHTS:
        _refuse("bundle graph", f"more than {MAX_NODES} nodes or {MAX_WEIGHTS} weights")
    if not graph.outputs or len(graph.results) != len(graph.outputs):
        _refuse("bundle outputs", "there must be one result for each output, and at least one")
    check_signature(graph.inputs, graph.outputs, graph.dims)
    check_trees(graph)
    if len(set(graph.weights)) != len(graph.weights):
        _refuse("bundle weights", "two of one name")
    for position, node in enumerate(graph.nodes):
        _check_node(node, f"node {position}", graph.first_node_value + position)
    last = graph.first_node_value + len(graph.nodes)
    if any(not 0 <= value < last for value in graph.results):
        _refuse("bundle outputs", "a result names a value that does not exist")


def check_signature(
    inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec], dims: Sequence[Dim]
) -> None:
    """Refuse inputs, outputs and dimensions that exceed a limit or contradict each other."""
    check_dims(dims)
    chosen = {extent for spec in inputs for extent in spec.shape if isinstance(extent, str)}
    for dim in dims:
        if dim.name not in chosen:
            _refuse(f"dimension {dim.name!r}", "no input has it, so no request can choose it")
    parts = 0
    for part, specs in (("input", inputs), ("output", outputs)):
        if len(specs) > MAX_VALUES:
            raise RegistrationRefused(
                f"{part}s",
                f"{len(specs)} tensors are more than {MAX_VALUES}",
                hint="combine tensors of the same shape: torch.stack(tensors)",
            )
        if len({spec.name for spec in specs}) != len(specs):
            _refuse(f"bundle {part}s", "two have the same name")
        for spec in specs:
            parts += _check_value(part, spec, dims)
            if parts > MAX_PARTS:
                _refuse(f"bundle {part}s", f"all extents together have over {MAX_PARTS} parts")


def check_trees(of: Graph | Manifest) -> None:
    """Refuse trees that exceed a limit, or do not contain the signature's inputs and outputs."""
    check_takes(of.takes, [spec.name for spec in of.inputs])
    if of.returns is not None:
        check_tree(of.returns, "output", [spec.name for spec in of.outputs])


def _check_value(part: str, spec: ValueSpec, dims: Sequence[Dim]) -> int:
    """Check the name, dtype and shape of an input or output; return the node count of its extents.

    Shapes are checked at the ends of the ranges. At other sizes an output's shape may still be
    invalid; then the request fails.
    """
    if not is_name(spec.name):
        _refuse(part, "its name is empty, too long or has control characters")
    named, parts = f"{part} {spec.name!r}", 0
    for extent in spec.shape:
        parts += check_extent(named, extent, (dim.name for dim in dims))
        if part == "input" and not isinstance(extent, int | str):
            _refuse(named, "an extent of an input is a number or a dimension's name")
    for values in corners(dims):
        check_dtype_and_shape(named, spec.dtype, _extents(named, spec, values))
    return parts


def _extents(part: str, spec: ValueSpec, values: Values) -> tuple[int, ...]:
    try:
        return shape_at(spec.shape, values)
    except NoExtent as error:
        _refuse(part, str(error))


def check_dtype_and_shape(part: str, dtype: str, shape: Sequence[Any]) -> int:
    """Return the size in bytes as a Python integer, which cannot overflow.

    Raises:
        RegistrationRefused: the dtype is not in ITEM_BYTES, or the shape exceeds a limit.
    """
    if dtype not in ITEM_BYTES:
        _refuse(part, f"dtype {str(dtype)[:40]!r} is not one of {', '.join(ITEM_BYTES)}")
    if len(shape) > MAX_DIMS:
        _refuse(part, f"{len(shape)} dimensions, at most {MAX_DIMS}")
    elements = 1
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_ELEMENTS:
            _refuse(part, f"extent {str(extent)[:40]} is not a size")
        elements *= extent
    if elements > MAX_ELEMENTS:
        _refuse(part, f"more than {MAX_ELEMENTS} elements")
    return elements * ITEM_BYTES[dtype]


def _check_node(node: Node, part: str, own_value: int) -> None:
    namespace, name, _ = split_target(node.target)
    if namespace == "_operator":
        arity = 1 if name == "neg" else 2
        if len(node.args) != arity or node.kwargs:
            _refuse(part, f"{node.target} takes {arity} positional arguments")
    for argument in (*node.args, *node.kwargs.values()):
        _check_argument(argument, f"{part} ({node.target})", own_value, MAX_NESTING)
    for key in node.kwargs:
        is_name = key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
        if not is_name or len(key) > 64:  # the key becomes part of generated code
            _refuse(part, f"{key[:40]!r} is not an argument's name")


def _check_argument(argument: Any, part: str, own_value: int, nesting: int) -> None:
    match argument:
        case None | bool() | float():
            pass
        case int():
            if not -(1 << 63) <= argument < 1 << 63:
                _refuse(part, "an integer does not fit 64 bits")
        case str():
            if len(argument) > MAX_TEXT_CHARS or not argument.isascii():
                _refuse(part, f"a text longer than {MAX_TEXT_CHARS} characters, or not ASCII")
        case list() | tuple():
            if nesting == 0 or len(argument) > MAX_LIST_ITEMS:
                _refuse(part, "lists nest too deep or are too long")
            for item in argument:
                _check_argument(item, part, own_value, nesting - 1)
        case dict() if len(argument) == 1:
            [(tag, value)] = argument.items()
            _check_tagged(tag, value, part, own_value)
        case _:
            _refuse(part, "an argument is neither a scalar, a list nor a reference")


def _check_tagged(tag: str, value: Any, part: str, own_value: int) -> None:
    if tag == "v":
        if type(value) is not int or not 0 <= value < own_value:
            _refuse(part, "a reference names a value that is not computed before it")
    elif not isinstance(value, str) or value not in TAGS.get(tag, ()):
        _refuse(part, f"{{{tag[:20]!r}: {str(value)[:40]!r}}} is not an argument we know")


def references(argument: Any) -> list[int]:
    """Return the value numbers in an argument, in order."""
    if isinstance(argument, dict):
        return [argument["v"]] if "v" in argument else []
    if isinstance(argument, list | tuple):
        return [value for item in argument for value in references(item)]
    return []


def node_references(node: Node) -> list[int]:
    """Return the value numbers that a node reads, in order, with repetitions."""
    return references([*node.args, *node.kwargs.values()])


def weights_of_node(graph: Graph, node: Node) -> list[int]:
    """Return the weights (as indices into ``graph.weights``) that a node reads, in order."""
    base = len(graph.inputs)
    return [v - base for v in node_references(node) if base <= v < graph.first_node_value]


# --- safetensors: an 8-byte length, a JSON header, the bytes -------------------------------------


def read_safetensors_header(
    path: str | os.PathLike[str] | int,
) -> tuple[tuple[FileTensor, ...], dict[str, str], str]:
    """Return the tensors in file order, the metadata, and the sha256 of the head in hex.

    Needs no torch and reads no tensor bytes.

    Raises:
        RegistrationRefused: not a safetensors file, or its tensors have gaps, overlaps or unknown
            dtypes.
    """
    try:
        with open(path, "rb", closefd=not isinstance(path, int), opener=open_regular) as file:
            file_bytes = file.seek(0, os.SEEK_END)  # a confined process may not call ``stat``
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                _refuse("weights file", "it is too short to be a safetensors file")
            [header_bytes] = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                _refuse("weights header", f"{header_bytes} bytes; limit {MAX_HEADER_BYTES} or file")
            text = file.read(header_bytes)
    except (OSError, ValueError) as error:
        _refuse("weights file", f"cannot be read: {error}")
    header = _json_object(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse("weights header", "__metadata__ is not a mapping of texts")
    data_start = 8 + header_bytes
    if len(header) > MAX_WEIGHTS:
        _refuse("weights header", f"more than {MAX_WEIGHTS} tensors")
    tensors = [_file_tensor(name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor.file_offset_bytes)  # stable: empty tensors keep order
    position = data_start
    for tensor in tensors:
        if tensor.file_offset_bytes != position:
            _refuse(f"weight {tensor.name!r}", "there is a hole or an overlap before it")
        position += tensor.size_bytes
    if position != file_bytes:
        _refuse("weights file", f"{file_bytes} bytes long, its header speaks of {position}")
    return tuple(tensors), metadata, hashlib.sha256(prefix + text).hexdigest()


def _json_object(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs_by_key = dict(pairs)
        if len(pairs_by_key) != len(pairs):
            raise ValueError("a key comes twice")
        return pairs_by_key

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        header = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse("weights header", f"it is not JSON: {str(error)[:200]}")
    if not isinstance(header, dict):
        _refuse("weights header", "it is not a JSON object")
    return header


def is_name(name: str) -> bool:
    """Return True if a name can be shown in listings, errors and logs."""
    return 0 < len(name) <= MAX_NAME_CHARS and escape_control_chars(name, keep="") == name


def _file_tensor(name: str, entry: Any, data_start: int) -> FileTensor:
    part = f"weight {name[:80]!r}"
    if not is_name(name):
        _refuse(part, "its name is empty, too long or has control characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(part, "an entry has exactly dtype, shape and data_offsets")
    offsets, shape = entry["data_offsets"], entry["shape"]
    if not isinstance(offsets, list) or [type(x) for x in offsets] != [int, int]:
        _refuse(part, "data_offsets is not a pair of integers")
    if not isinstance(shape, list) or not isinstance(entry["dtype"], str):
        _refuse(part, "shape is not a list, or dtype not a text")
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"])
    size_bytes = check_dtype_and_shape(part, dtype, shape)
    if offsets[0] < 0 or offsets[1] - offsets[0] != size_bytes:
        _refuse(part, f"{offsets} is not a range of the {size_bytes} bytes its shape needs")
    return FileTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        size_bytes=size_bytes,
        file_offset_bytes=data_start + offsets[0],
    )


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    data: Iterable[memoryview | bytes],
    metadata: dict[str, str],
) -> None:
    """Write (name, dtype, shape) tensors and their bytes in the given order, without gaps.

    The writer of safetensors sorts by dtype and name; a bundle needs the order of first use.

    Raises:
        RegistrationRefused: the header would be larger than a reader accepts.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, dtype, shape in tensors:
        size_bytes = check_dtype_and_shape(f"weight {name!r}", dtype, shape)
        header[name] = {
            "dtype": _TO_SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size_bytes],
        }
        position += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format recommends that the data start at a multiple of 8
    if len(text) > MAX_HEADER_BYTES:
        _refuse("bundle graph", f"{len(text)} bytes of header, limit {MAX_HEADER_BYTES}")
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        written = sum(file.write(piece) for piece in data)
    if written != position:
        raise ValueError(f"wrote {written} bytes of tensors, the header speaks of {position}")
