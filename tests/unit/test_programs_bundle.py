"""Bundles: valid content is accepted, and everything else is refused with a reason."""

from __future__ import annotations

import copy
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.graphs import bundle as bundle_module
from pipeswitch.programs.graphs.bundle import (
    MAX_NOTE_CHARS,
    MAX_NOTES,
    METADATA_KEY,
    NOTES_KEY,
    read_bundle,
    read_safetensors_header,
    write_bundle,
)
from pipeswitch.programs.graphs.operators import OVERLOADS, split_target

Header = dict[str, Any]


def a_header() -> Header:
    """Return the header, not yet encoded, of a bundle with the program relu(x @ w.T + b)."""
    program = {
        "version": 2,
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
        "weights": ["w", "b"],
        "nodes": [
            ["aten.linear.default", [{"v": 0}, {"v": 1}, {"v": 2}], {}],
            ["aten.relu.default", [{"v": 3}], {}],
        ],
        "results": [4],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
        "dims": [["batch", 1, 8]],
    }
    return {
        "__metadata__": {METADATA_KEY: program},
        "w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]},
    }


def encode(header: Header, data_bytes: int = 60) -> bytes:
    header = copy.deepcopy(header)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and isinstance(metadata.get(METADATA_KEY), dict):
        metadata[METADATA_KEY] = json.dumps(metadata[METADATA_KEY])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def refused(tmp_path: Path, raw: bytes) -> RegistrationRefused:
    path = tmp_path / "hostile.bundle"
    path.write_bytes(raw)
    with pytest.raises(RegistrationRefused) as caught:
        read_bundle(path)
    return caught.value


def test_a_good_bundle_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "good.bundle"
    raw = encode(a_header())
    path.write_bytes(raw)
    bundle = read_bundle(path)
    assert [tensor.name for tensor in bundle.tensors] == ["w", "b"]
    assert bundle.tensors[0].file_offset_bytes == len(raw) - 60
    assert bundle.graph.nodes[1].target == "aten.relu.default"


def test_a_bundle_keeps_the_notes_of_its_export_as_far_as_a_reader_takes_them(
    tmp_path: Path,
) -> None:
    first, path = tmp_path / "first.bundle", tmp_path / "notes.bundle"
    first.write_bytes(encode(a_header()))
    graph, weights = read_bundle(first).graph, [("w", "float32", (3, 4)), ("b", "float32", (3,))]
    notes = ["batch is fixed", "red \x1b[31m", "long " * MAX_NOTE_CHARS, *["n"] * MAX_NOTES]
    write_bundle(path, graph, weights, [bytes(60)], notes=notes)
    notes_read = read_bundle(path).notes
    assert notes_read[:2] == ("batch is fixed", "red \\x1b[31m")
    assert (len(notes_read), len(notes_read[2])) == (MAX_NOTES, MAX_NOTE_CHARS)
    assert read_bundle(first).notes == ()


def program(header: Header) -> dict[str, Any]:
    header_read: dict[str, Any] = header["__metadata__"][METADATA_KEY]
    return header_read


def node(target: str, *args: Any, **kwargs: Any) -> Callable[[Header], None]:
    return lambda header: program(header)["nodes"].__setitem__(1, [target, list(args), kwargs])


def put(*path: Any) -> Callable[[Header], None]:
    """Return a function that sets header[path[0]]… = path[-1]; "program" means its program."""

    def change(header: Header) -> None:
        target: Any = program(header) if path[0] == "program" else header
        keys = path[1:-1] if path[0] == "program" else path[:-1]
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = path[-1]

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[Header], None]] = {
    "an operator that reads files": node("aten.from_file.default", "/etc/passwd"),
    "an operator that reaches past its tensor": node(
        "aten.as_strided.default", {"v": 1}, [9999], [1]
    ),
    "an operator that changes a tensor's storage": node("aten.set_.source_Tensor", {"v": 1}),
    "an operator that resizes": node("aten.resize_.default", {"v": 1}, [1 << 40]),
    "uninitialised memory": node("aten.empty.memory_format", [4]),
    "random numbers": node("aten.rand.default", [4]),
    "a shape that depends on data": node("aten.nonzero.default", {"v": 3}),
    "a value that depends on data": node("aten.item.default", {"v": 3}),
    "an out overload": node("aten.add.out", {"v": 3}, {"v": 3}, out={"v": 1}),
    "an out overload of another name": node(
        "aten.sort.values", {"v": 3}, values={"v": 1}, indices={"v": 1}
    ),
    "an overload that is an attribute": node("aten.mul.__class__", {"v": 3}, {"v": 3}),
    "arithmetic on lists, which fills the memory": node("aten.mul.left_t", [0], 1 << 40),
    "another namespace": node("prim.device.default", {"v": 3}),
    "python's own modules": node("os.system", "true"),
    "a python operator that calls": node("_operator.methodcaller", "x", 1),
    "an attribute with underscores": node("aten.__class__.__init__", 1),
    "a dotted path through aten": node("aten.add.Tensor.__globals__", {"v": 3}, {"v": 3}),
    "getitem with keywords": node("_operator.getitem", {"v": 3}, 0, key=1),
    "a reference to itself": node("aten.relu.default", {"v": 4}),
    "a negative reference": node("aten.relu.default", {"v": -1}),
    "a reference that is a truth value": node("aten.relu.default", {"v": True}),
    "an object that is no reference": node("aten.relu.default", {"__reduce__": "os.system"}),
    "an object with two keys": node("aten.relu.default", {"v": 3, "w": 3}),
    "a dtype that does not exist": node("aten.to.dtype", {"v": 3}, {"dtype": "load"}),
    "a device by name": node("aten.to.device", {"v": 3}, {"device": "cuda:7"}),
    "an integer of 100 digits": node("aten.add.Scalar", {"v": 3}, 10**100),
    "a very long text": node("aten.einsum.default", "a" * 10_000, [{"v": 3}]),
    "lists in lists in lists in lists": node("aten.relu.default", nested(9)),
    "lists far too deep": node("aten.relu.default", nested(60)),
    "lists too deep for a parser": put("__metadata__", METADATA_KEY, "[" * 100_000),
    "a keyword that is code": node("aten.relu.default", {"v": 3}, **{"x=print()": 1}),
    "a node that is a text": put("program", "nodes", 1, "aten.relu.default"),
    "another version": put("program", "version", 1),
    "no version": lambda header: program(header).pop("version"),
    "an unknown field": put("program", "pickle", "gASV"),
    "a result that does not exist": put("program", "results", [99]),
    "no outputs": lambda header: program(header).update(results=[], outputs=[]),
    "two inputs of one name": lambda header: program(header)["inputs"].append(
        program(header)["inputs"][0]
    ),
    "an input of complex numbers": put("program", "inputs", 0, "dtype", "complex64"),
    "an input of nine dimensions": put("program", "inputs", 0, "shape", [1] * 9),
    "an input of a negative size": put("program", "inputs", 0, "shape", [-1, 4]),
    "an input larger than any memory": put("program", "inputs", 0, "shape", [1 << 39, 1 << 39]),
    "an input named by control characters": put("program", "inputs", 0, "name", "x\n\x1b[2J"),
    "a batch range upside down": put("program", "dims", 0, 1, 9),
    "a batch of a million": put("program", "dims", 0, 2, 1 << 25),
    "notes that are numbers": put("__metadata__", NOTES_KEY, "[7]"),
    "notes without end": put("__metadata__", NOTES_KEY, json.dumps(["a"] * (MAX_NOTES + 1))),
    "settings of a kind that no extra reads": put("__metadata__", "pipeswitch.other", "{}"),
    "settings of two kinds": lambda header: header["__metadata__"].update(
        {"pipeswitch.generation": "{}", "pipeswitch.other": "{}"}
    ),
    "settings that are no object": put("__metadata__", "pipeswitch.generation", "[]"),
    "weights in another order": put("program", "weights", ["b", "w"]),
    "a weight the file does not have": put("program", "weights", ["w", "b", "c"]),
    "a weight twice": put("program", "weights", ["w", "w"]),
    "no program": lambda header: header.pop("__metadata__"),
    "a program that is a number": put("__metadata__", METADATA_KEY, 7),
    "a program that is not JSON": put("__metadata__", METADATA_KEY, "{"),
    "a tensor of an odd dtype": put("w", "dtype", "F8_E4M3"),
    "a tensor of a dtype by our name": put("w", "dtype", ["F32"]),
    "a tensor that overlaps": put("b", "data_offsets", [44, 56]),
    "a tensor after a hole": put("b", "data_offsets", [52, 64]),
    "a tensor beyond the file": put("b", "data_offsets", [1 << 62, (1 << 62) + 12]),
    "offsets that run backwards": put("b", "data_offsets", [60, 48]),
    "offsets that are fractions": put("b", "data_offsets", [48.0, 60.0]),
    "offsets that are truth values": put("b", "data_offsets", [False, True]),
    "a shape that wraps 64 bits": put("w", "shape", [1 << 33, 1 << 33, 3, 4]),
    "a shape of texts": put("w", "shape", ["3", "4"]),
    "a shape that is a mapping": put("w", "shape", {"0": 3}),
    "a shape with a truth value": put("w", "shape", [True, 12]),
    "a tensor entry with more keys": put("w", "code", "x"),
    "a tensor entry that is a list": put("w", [1, 2, 3]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_bundle_is_refused_in_words(name: str, tmp_path: Path) -> None:
    header = a_header()
    HOSTILE[name](header)
    error = refused(tmp_path, encode(header))
    assert error.data["part"]
    assert error.data["reason"]
    assert len(str(error)) < 1000


RAW: dict[str, bytes] = {
    "nothing": b"",
    "four bytes": b"PSW1",
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "a header that is not UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
    "a header of brackets": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a key that comes twice": struct.pack("<Q", 13) + b'{"a":1,"a":2}',
    "a number that is not JSON": struct.pack("<Q", 9) + b'{"a":NaN}',
    "a zip file": b"PK\x03\x04" + bytes(200),
    "a pickle": b"\x80\x04\x95\x17\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94" + bytes(64),
    "bytes after the last tensor": encode(a_header(), 61),
    "too few bytes": encode(a_header(), 59),
}


@pytest.mark.parametrize("name", RAW)
def test_a_file_that_is_no_bundle_is_refused_in_words(name: str, tmp_path: Path) -> None:
    assert refused(tmp_path, RAW[name]).data["part"]


def test_a_file_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused):
        read_bundle(tmp_path / "none")


def test_a_header_over_the_limit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "MAX_HEADER_BYTES", 100)
    assert refused(tmp_path, encode(a_header())).data["part"] == "weights header"


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_changed_bytes_are_read_or_refused_and_nothing_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(encode(a_header()))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.bundle"
    path.write_bytes(bytes(raw))
    try:
        bundle = read_bundle(path)
    except RegistrationRefused:
        return
    assert bundle.graph.weights == tuple(tensor.name for tensor in bundle.tensors)


def test_bare_weights_are_readable_without_a_program(tmp_path: Path) -> None:
    header = a_header()
    header.pop("__metadata__")
    path = tmp_path / "w.safetensors"
    path.write_bytes(encode(header))
    tensors, metadata, _ = read_safetensors_header(path)
    assert [tensor.size_bytes for tensor in tensors] == [48, 12]
    assert metadata == {}


def test_nothing_dangerous_is_on_the_closed_list() -> None:
    banned = """
        from_file as_strided as_strided_ set_ resize_ resize_as_ empty empty_like new_empty
        empty_strided new_empty_strided rand randn randint bernoulli normal nonzero item
        _local_scalar_dense masked_select unique _print _reshape_alias _unsafe_index
        as_strided_scatter unfold save load warn record_stream detach_ requires_grad_
    """
    assert not OVERLOADS.keys() & banned.split()
    assert split_target("aten.add_.Tensor") == ("aten", "add_", "Tensor")


def test_the_controllers_side_of_programs_imports_no_torch() -> None:
    code = (
        "import sys, pipeswitch.programs.interface.layout, pipeswitch.programs.graphs.bundle, "
        "pipeswitch.programs.spec, pipeswitch.programs.graphs.partition, "
        "pipeswitch.planning.grouping, "
        "pipeswitch.programs.interface.synthetic_inputs; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
