"""Messages of the Open Inference Protocol: how bytes are decoded, refused, and answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeswitch.base.errors import InvalidInput
from pipeswitch.gateway.http.http_errors import TooLarge
from pipeswitch.gateway.rest import OpenInference
from pipeswitch.gateway.serving import oip

PLAIN = [name for name in oip.DATATYPES if name not in ("BF16", "BYTES")]
ROW = {
    "name": "m",
    "state": "ready",
    "inputs": {"x": [["batch", 4], "float32"]},
    "outputs": {"y": [["batch", 3], "bfloat16"]},
    "batch": [1, 64],
    "batching": None,
    "versions": [1],
}


def body(**tensor: Any) -> bytes:
    """Return a request with one input, FP32[2, 2], in which ``tensor`` replaces fields."""
    fields = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4], **tensor}
    rows = [{key: value for key, value in fields.items() if value is not None}]
    return json.dumps({"inputs": rows}).encode()


@contextlib.contextmanager
def traced() -> Iterator[SimpleNamespace]:
    """Measure what the block allocates: ``held_bytes`` at its end, and ``peak_bytes``."""
    memory = SimpleNamespace()
    tracemalloc.start()
    try:
        yield memory
    finally:
        memory.held_bytes, memory.peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()


def whole(**fields: Any) -> bytes:
    """Return the request of ``body`` with further top-level fields."""
    return json.dumps(json.loads(body()) | fields).encode()


def with_binary(tensors: list[tuple[str, str, np.ndarray]], **fields: Any) -> tuple[bytes, int]:
    rows = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": datatype,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, datatype, array in tensors
    ]
    head = json.dumps({"inputs": rows, **fields}).encode()
    return b"".join([head, *(array.tobytes() for _, _, array in tensors)]), len(head)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(PLAIN))
    shape = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    finite = {"allow_nan": False} if "FP" in datatype else {}
    dtype = np.dtype(oip.DATATYPES[datatype])
    elements = arrays.from_dtype(dtype, **finite, **({"allow_infinity": False} if finite else {}))
    return datatype, draw(arrays.arrays(dtype, shape, elements=elements))


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_what_comes_binary_or_as_numbers_goes_back_to_the_bit(
    given_: list[tuple[str, np.ndarray]],
) -> None:
    named = [(f"t{number}", kind, array) for number, (kind, array) in enumerate(given_)]
    request = oip.decode_request(*with_binary(named))
    rows = [
        {"name": n, "shape": a.shape, "datatype": k, "data": a.reshape(-1).tolist()}
        for n, k, a in named
    ]
    as_text = oip.decode_request(json.dumps({"inputs": rows}).encode(), None)
    for one in (request, as_text):
        for (name, kind, array), tensor, frame in zip(named, one.inputs, one.frames, strict=True):
            assert (tensor.name, tensor.dtype, tensor.shape) == (
                name,
                oip.DATATYPES[kind],
                array.shape,
            )
            assert bytes(frame) == array.tobytes()
    outputs = [
        oip.Output(name=n, dtype=oip.DATATYPES[k], shape=a.shape, data=a.tobytes())
        for n, k, a in named
    ]
    plain = oip.InferRequest(id="7", inputs=(), frames=[])
    (text,), json_bytes = oip.encode_answer("m", plain, outputs, {"total_ms": 1.5})
    assert json_bytes is None
    answer = json.loads(text)
    assert (answer["id"], answer["parameters"]) == ("7", {"total_ms": 1.5})
    for (_, kind, array), row in zip(named, answer["outputs"], strict=True):
        assert np.array(row["data"], array.dtype).reshape(row["shape"]).tobytes() == array.tobytes()
        assert row["datatype"] == kind


def test_bfloat16_is_rounded_to_the_nearest_even_and_comes_back_as_numbers() -> None:
    values = [1.0, -2.5, 1.00390625, 1.01171875, 3.5e38, math.pi]
    request = oip.decode_request(body(datatype="BF16", shape=[6], data=values), None)
    bits = np.frombuffer(request.frames[0], np.uint16)
    assert [hex(b) for b in bits] == ["0x3f80", "0xc020", "0x3f80", "0x3f82", "0x7f80", "0x4049"]
    output = oip.Output(name="y", dtype="bfloat16", shape=(6,), data=bits.tobytes())
    (text,), _ = oip.encode_answer("m", request, [output], {})
    assert json.loads(text)["outputs"][0]["data"][:3] == [1.0, -2.5, 1.0]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_what_json_has_no_word_for_comes_and_goes(datatype: str) -> None:
    """Read NaN and infinity as Python writes them, and in strict JSON as null and huge numbers."""
    ask = json.dumps(json.loads(body(datatype=datatype))).encode()
    for text in (b"[NaN, -Infinity, Infinity, 1]", b"[null, -1e999, 1e999, 1]"):
        request = oip.decode_request(ask.replace(b"[1, 2, 3, 4]", text), None)
        data = bytes(request.frames[0])
        output = oip.Output(name="y", dtype=oip.DATATYPES[datatype], shape=(2, 2), data=data)
        (answer,), _ = oip.encode_answer("m", request, [output], {})
        assert json.loads(answer)["outputs"][0]["data"] == [None, None, None, 1.0]
        (binary,) = request.frames
        wide = np.frombuffer(binary, np.uint16).astype(np.uint32) << np.uint32(16)
        read = (
            wide.view(np.float32)
            if datatype == "BF16"
            else np.frombuffer(binary, np.dtype(oip.DATATYPES[datatype]))
        )
        assert np.array_equal(read, [np.nan, -np.inf, np.inf, 1], equal_nan=True)


def test_what_may_be_left_out_may_be_null() -> None:
    ask = json.loads(body()) | {"id": None, "parameters": None, "outputs": None}
    ask["inputs"][0]["parameters"] = None
    request = oip.decode_request(json.dumps(ask).encode(), None)
    assert (request.id, request.outputs, bytes(request.frames[0])) == (
        "",
        None,
        np.array([1, 2, 3, 4], np.float32).tobytes(),
    )
    ask["outputs"] = [{"name": "y", "parameters": None}]
    request = oip.decode_request(json.dumps(ask).encode(), None)
    output = oip.Output(name="y", dtype="int32", shape=(1,), data=bytes(4))
    (answer,), _ = oip.encode_answer("m", request, [output], {})
    assert json.loads(answer)["outputs"][0]["data"] == [0]


def test_each_output_says_for_itself_whether_it_is_binary() -> None:
    ask = json.loads(body()) | {
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}],
    }
    request = oip.decode_request(json.dumps(ask).encode(), None)
    data = np.array([1, 2], np.int32).tobytes()
    outputs = [oip.Output(name=n, dtype="int32", shape=(2,), data=data) for n in ("a", "b", "c")]
    parts, json_bytes = oip.encode_answer("m", request, outputs, {})
    assert json_bytes == len(parts[0])
    first, second = json.loads(parts[0])["outputs"]
    assert (first["name"], first["data"]) == ("b", [1, 2])
    assert (second["name"], second["parameters"]) == ("a", {"binary_data_size": 8})
    assert parts[1:] == [data]


def test_a_text_among_numbers_does_not_widen_the_other_elements() -> None:
    """Numpy would give each element the length of the longest: gigabytes for 64 KB of JSON."""
    request = body(shape=[1000], data=["a" * 30_000] + [""] * 999)
    with traced() as memory, pytest.raises(InvalidInput, match="no numbers"):
        oip.decode_request(request, None)
    assert memory.peak_bytes < 10 * len(request)


def test_priority_and_timeout_become_the_servers() -> None:
    ask = json.loads(body())
    for priority, name in ((0, ""), (1, "high"), (2, "normal"), (3, "low"), (99, "low")):
        given_ = {"priority": priority, "timeout": 2500}
        request = oip.decode_request(json.dumps(ask | {"parameters": given_}).encode(), None)
        assert (request.priority, request.deadline_ms) == (name, 2.5)
    assert oip.decode_request(body(), None).deadline_ms is None


@pytest.mark.parametrize(
    ("request_body", "json_bytes", "words"),
    [
        (b"{", None, "not an inference request"),
        (b"[" * 60_000, None, "not an inference request"),
        (b'{"inputs": 3}', None, "inputs"),
        (b"\xff\xfe{}", None, "not an inference request"),
        (body(), 10_000, "the body has"),
        (body(data=[1, 2, 3]), None, "has 3 values, its shape [2, 2] needs 4"),
        (body(data=[[1, 2], [3]]), None, "not a regular list"),
        (body(data=["a"] * 4), None, "no numbers"),
        (body(data=[None] * 4, datatype="INT8"), None, "no numbers"),
        (body(data=[None, "1", 2, 3]), None, "no numbers"),
        (body(data=[None, True, 2, 3]), None, "no numbers"),
        (body(datatype="INT8", data=[1, 2, 3, 400]), None, "from -128 to 127"),
        (body(datatype="INT8", data=[1, 2, 3, 2**70]), None, "from -128 to 127"),
        (body(datatype="INT64", data=[[1, 2**63], [3, -1]]), None, "from -9223372036854775808 to"),
        (body(datatype="INT64", data=[2**63, -1, 3, 0.5]), None, "with fractions"),
        (body(datatype="UINT8", data=[1, 2, 3, -1]), None, "from 0 to 255"),
        (body(datatype="INT32", data=[1, 2, 3, 0.5]), None, "with fractions"),
        (body(datatype="FLOAT32"), None, "one of BOOL"),
        (body(datatype="BYTES"), None, "its data must be texts"),
        (body(datatype="BYTES", data=["\ud83d"] * 4), None, "not valid Unicode"),
        (body(data=[[["a"], [""]], [[""], [1]]]), None, "no numbers"),
        (body(data=json.loads("[" * 99 + "1" + "]" * 99)), None, "not a regular list"),
        (body(shape=[-2, -2]), None, "has no shape"),
        (body(shape=[1] * 9), None, "has no shape"),
        (body(shape=[10**4000] * 2), None, "has no shape"),
        (body(name="\ud800"), None, "not an inference request"),
        (body(parameters={"shared_memory_region": "\ud800"}), None, "not an inference request"),
        (whole(id="\ud800"), None, "not an inference request"),
        (whole(outputs=[{"name": "\ud800"}]), None, "not an inference request"),
        (body(data=None), None, "has no data"),
        (body(parameters={"binary_data_size": 16}), None, "0 bytes follow"),
        (body(parameters={"binary_data_size": True}), None, "binary_data_size True"),
        (body(parameters={"shared_memory_region": "r"}), None, "shared memory"),
        (body() + b"12", len(body()), "2 bytes after"),
        (json.dumps({"inputs": [json.loads(body())["inputs"][0]] * 65}).encode(), None, "65"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    request_body: bytes, json_bytes: int | None, words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        oip.decode_request(request_body, json_bytes)
    assert words in str(caught.value)


def test_very_much_json_is_refused_with_the_way_that_is_made_for_it() -> None:
    with pytest.raises(TooLarge, match="binary_tensor_data"):
        oip.decode_request(body(data=[1] * 4_000_000), None)


@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": -1},
        {"timeout": "soon"},
        {"binary_data_output": 1},
        {"sequence_id": 4, "sequence_start": "yes"},
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters: dict[str, Any]) -> None:
    ask = json.loads(body()) | {"parameters": parameters}
    with pytest.raises(InvalidInput):
        oip.decode_request(json.dumps(ask).encode(), None)


@given(st.binary(max_size=200), st.none() | st.integers(-5, 250))
def test_garbage_raises_nothing_but_invalid_input(data: bytes, json_bytes: int | None) -> None:
    with pytest.raises(InvalidInput):
        oip.decode_request(data, json_bytes)


def test_a_refusal_that_names_the_inputs_is_the_same_error() -> None:
    error = InvalidInput("bad", param="x")
    head = SimpleNamespace(headers={"inference-header-content-length": "0"})
    request: Any = SimpleNamespace(caller=None, head=head, names={"model": "m"})
    service: Any = SimpleNamespace(row=AsyncMock(side_effect=[error, ROW]))
    with pytest.raises(InvalidInput, match="bad; m takes x FP32") as caught:
        asyncio.run(OpenInference(service, request).infer(request, b""))
    assert caught.value is error


def test_the_example_for_a_body_that_is_no_request_is_the_models_own() -> None:
    head = SimpleNamespace(headers={}, peer="")
    request: Any = SimpleNamespace(caller=None, head=head, names={"model": "m"})
    service: Any = SimpleNamespace(row=AsyncMock(return_value=ROW))
    with pytest.raises(InvalidInput) as caught:
        asyncio.run(OpenInference(service, request).infer(request, bytes(16)))
    example = caught.value.hint.replace('["…"]', "[1, 2, 3, 4]").encode()
    assert oip.decode_request(example, None).inputs[0].shape == (1, 4)


def test_an_unknown_output_is_named_with_the_known_ones() -> None:
    request = oip.InferRequest(
        id="", inputs=(), frames=[], outputs=(oip.RequestedOutput(name="lables"),)
    )
    output = oip.Output(name="labels", dtype="int64", shape=(1,), data=bytes(8))
    with pytest.raises(InvalidInput, match='no output "lables"; did you mean "labels"'):
        oip.encode_answer("m", request, [output], {})


def test_a_raw_body_is_the_only_input_at_the_batch_that_it_fills() -> None:
    request = oip.raw_request(bytes(48), ROW)
    assert (request.inputs[0].shape, request.is_binary) == ((3, 4), True)
    with pytest.raises(InvalidInput, match="16 bytes for each of its batch; the body has 50"):
        oip.raw_request(bytes(50), ROW)
    with pytest.raises(InvalidInput):
        oip.raw_request(b"", ROW | {"inputs": {}})
    with pytest.raises(InvalidInput, match="16 bytes; the body has 32"):
        oip.raw_request(bytes(32), ROW | {"inputs": {"x": [[1, 4], "float32"]}})
    text = ROW | {"inputs": {"ids": [["batch", "length"], "int64"]}}
    with pytest.raises(InvalidInput, match="a body does not say its batch and length"):
        oip.raw_request(bytes(32), text)
    length = ROW | {"inputs": {"x": [[1, "length"], "float32"]}}
    assert oip.raw_request(bytes(32), length).inputs[0].shape == (1, 8)
    assert oip.metadata(text)["inputs"][0]["shape"] == [-1, -1]
    answer = {"y": [["batch", "(1+length)//2"], "float32"]}
    config = oip.config(text | {"outputs": answer})
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (64, [-1])
    assert config["output"][0]["dims"] == [-1]


def test_the_batch_dimension_is_implicit_only_where_all_tensors_begin_with_it() -> None:
    assert oip.config(ROW)["max_batch_size"] == 64
    assert oip.config(ROW)["output"] == [{"name": "y", "data_type": "TYPE_BF16", "dims": [3]}]
    assert oip.metadata(ROW)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    for shape in ([4], [4, None], []):
        other = oip.config(ROW | {"outputs": {"y": [shape, "float32"]}})
        assert other["max_batch_size"] == 0
        assert other["input"][0]["dims"] == [-1, 4]


def test_a_model_whose_requests_are_joined_says_so_as_triton_does() -> None:
    assert "dynamic_batching" not in oip.config(ROW)
    batched = ROW | {"batching": {"limit": 8, "delay_ms": 2.5, "is_exact": True}}
    assert oip.config(batched)["dynamic_batching"] == {
        "preferred_batch_size": [8],
        "max_queue_delay_microseconds": 2500,
    }


def test_every_dtype_of_the_wire_has_a_datatype() -> None:
    from pipeswitch.base.bytes_tensors import BYTES
    from pipeswitch.programs.interface.layout import ITEM_BYTES

    assert oip.DATATYPE_OF.keys() == {*ITEM_BYTES, BYTES}


def of_data(data: bytes, datatype: str = "FP32", count: int = 4) -> bytes:
    shape = f'"shape": [{count}], "datatype": "{datatype}"'
    return b'{"inputs": [{"name": "x", %s, "data": [%s]}]}' % (shape.encode(), data)


SIZE = 512 << 10
DEAREST = {
    # Bodies that take the most memory or time per byte, each with the shortest values of its kind.
    "numbers": of_data(b"0," * (SIZE // 2) + b"0"),
    "numbers of the shape": of_data(b"0," * (SIZE // 2) + b"0", count=SIZE // 2 + 1),
    "fractions for integers": of_data(b"1.5," * (SIZE // 4) + b"0", "INT64", SIZE // 4 + 1),
    "large integers": of_data(b"99999999999," * (SIZE // 12) + b"0", "INT64", SIZE // 12 + 1),
    "nothings": of_data(b"null," * (SIZE // 5) + b"0", count=SIZE // 5 + 1),
    "texts": of_data(b'"",' * (SIZE // 3) + b"0"),
    "lists": of_data(b"[]," * (SIZE // 3) + b"0"),
    "rows": of_data(b"[0]," * (SIZE // 4) + b"[0]"),
    "objects": of_data(b"{}," * (SIZE // 3) + b"0"),
    "names": whole(parameters={str(n): 0 for n in range(SIZE // 12)}),
    "outputs": whole(outputs=[{"name": str(n)} for n in range(SIZE // 16)]),
    "one output": whole(outputs=[{"name": "y"}] * 1000),
    "inputs": b'{"inputs": [%s]}' % (b'{"name":"","datatype":"","shape":[]},' * (SIZE // 37))[:-1],
    "not a number": of_data(b"NaN," * (SIZE // 4) + b"0", count=SIZE // 4 + 1),
}


@pytest.mark.parametrize("kind", DEAREST)
def test_of_each_kind_the_dearest_request_takes_so_much_memory_a_byte(kind: str) -> None:
    request = DEAREST[kind]
    with traced() as memory, contextlib.suppress(InvalidInput, TooLarge):
        oip.decode_request(request, None)
    assert memory.peak_bytes <= 40 * len(request), memory.peak_bytes / len(request)


@pytest.mark.parametrize("kind", ["outputs", "one output", "lists", "objects", "names", "inputs"])
def test_more_parts_than_a_request_has_are_refused(kind: str) -> None:
    with pytest.raises((InvalidInput, TooLarge)):
        oip.decode_request(DEAREST[kind], None)


def test_an_answer_tells_so_many_numbers_as_text() -> None:
    request = oip.decode_request(body(), None)
    large = oip.Output(
        name="y", dtype="uint8", shape=(oip.MAX_NUMBERS + 1,), data=bytes(oip.MAX_NUMBERS + 1)
    )
    with pytest.raises(TooLarge) as refused:
        oip.encode_answer("m", request, [large], {})
    assert "binary_data_output" in refused.value.hint
    binary = oip.decode_request(whole(parameters={"binary_data_output": True}), None)
    assert len(oip.encode_answer("m", binary, [large], {})[0]) == 2
    assert [oip.is_long(one, [large]) for one in (request, binary)] == [True, False]
    short = oip.Output(name="y", dtype="uint8", shape=(1,), data=bytes(oip.LONG_NUMBERS))
    assert not oip.is_long(request, [short])
