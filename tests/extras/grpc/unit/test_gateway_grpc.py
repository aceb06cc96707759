"""gRPC messages: requests and answers, compared with the clients' own descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("grpc", reason="make installs it")

import grpc.aio

from pipeswitch.base.errors import ERRORS_BY_NAME, InvalidInput
from pipeswitch.base.quotas import ALPHA, FairQuota
from pipeswitch.extras.grpc import grpc_server
from pipeswitch.extras.grpc.half_messages import Arrivals
from pipeswitch.extras.grpc.protos import HEALTH, INFERENCE, POOL, REFLECTION, SERVICES, described
from pipeswitch.gateway.http.http_errors import TooLarge, status_of
from pipeswitch.gateway.http.offload import CROWD, Shared
from pipeswitch.gateway.serving.oip import DATATYPES, InferRequest, Output, config
from pipeswitch.gateway.serving.service import Service
from pipeswitch.wire.frames import MAX_TENSORS

ARRIVALS = Arrivals(FairQuota(1 << 20), lambda peers: {})


def request(datatype: str, shape: list[int], **fields: Any) -> Any:
    message = INFERENCE["ModelInferRequest"](model_name="m", id="r", **fields)
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    return message


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("FP16", "BF16")])
def test_typed_and_raw_contents_are_the_same_bytes(datatype: str) -> None:
    if datatype == "BYTES":
        typed = request(datatype, [2])
        typed.inputs[0].contents.bytes_contents.extend([b"a", b"\xff\0"])
        assert bytes(grpc_server.decode_request(typed).frames[0]) == b"\1\0\0\0a\2\0\0\0\xff\0"
        return
    array = np.array([[0, 1], [1, 0]], np.dtype(DATATYPES[datatype]))
    raw = request(datatype, [2, 2], raw_input_contents=[array.tobytes()])
    typed = request(datatype, [2, 2])
    field = {"BOOL": "bool", "UINT8": "uint", "INT64": "int64", "FP32": "fp32", "FP64": "fp64"}.get(
        datatype, "int"
    )
    getattr(typed.inputs[0].contents, f"{field}_contents").extend(array.reshape(-1).tolist())
    for one in (raw, typed):
        decoded = grpc_server.decode_request(one)
        assert bytes(decoded.frames[0]) == array.tobytes()
        assert (decoded.id, decoded.inputs[0].dtype) == ("r", DATATYPES[datatype])


def test_raw_contents_are_taken_as_they_lie_and_nothing_else_changes() -> None:
    large = np.arange(1 << 15, dtype=np.float32).tobytes()
    message = request("FP32", [1 << 15], raw_input_contents=[large, b"", large[:9]])
    message.parameters["timeout"].int64_param = 1 << 40
    data = message.SerializeToString()
    rest, raw = grpc_server.split_raw(data)
    assert [bytes(one) for one in raw] == [large, b"", large[:9]]
    assert all(one.obj is data for one in raw)
    message.ClearField("raw_input_contents")
    assert type(message).FromString(rest) == message
    early = request("FP32", [1], raw_input_contents=[large]).SerializeToString()
    unknown = b"\x9d\x06" + bytes(4)  # a field of four bytes, which no request has
    for broken in (
        early[:-1],
        early + b"\x3a",
        early + b"\xff" * 11,
        early + b"\x3a\x05ab",
        unknown + early,
        early + unknown,
    ):
        with pytest.raises(InvalidInput):
            grpc_server.split_raw(broken)
    small = request("FP32", [1], raw_input_contents=[b"1234"]).SerializeToString()
    assert grpc_server.split_raw(small) == (small, ())


def empty_fields(count: int, tag: int) -> bytes:
    """Return a message of empty fields, which take two bytes each, but an object when decoded."""
    return bytes([tag << 3 | 2, 0]) * count


@pytest.mark.parametrize("tag", [3, 4, 5, 6, 7, 15])
def test_no_more_parts_are_read_than_a_request_has(
    tag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    read = grpc_server._number
    monkeypatch.setattr(grpc_server, "_number", lambda *args: numbers.append(1) or read(*args))
    with pytest.raises(InvalidInput):
        grpc_server.split_raw(empty_fields(4 << 20, tag))
    assert len(numbers) <= 2 * grpc_server.MAX_PARTS + 2
    few = empty_fields(1000, tag)
    with contextlib.suppress(InvalidInput):  # too many fields of a kind, or an empty tensor
        decoded = grpc_server.read_infer(few)[1]
        assert len(decoded.inputs) + len(decoded.outputs or ()) <= 2 * MAX_TENSORS


def test_an_output_is_asked_for_once() -> None:
    message = request("FP32", [1], raw_input_contents=[b"1234"])
    for _ in range(2):
        message.outputs.add(name="y")
    with pytest.raises(InvalidInput):
        grpc_server.decode_request(message)


@pytest.mark.parametrize("name", ["ServerLive", "RepositoryIndex", "ModelMetadata"])
def test_a_message_without_tensors_is_small(name: str) -> None:
    with pytest.raises(TooLarge):
        grpc_server._read(INFERENCE[f"{name}Request"], empty_fields(grpc_server.SMALL_BYTES, 15))


def test_priority_comes_signed_or_unsigned() -> None:
    for kind in ("int64_param", "uint64_param"):
        message = request("FP32", [0], raw_input_contents=[b""])
        setattr(message.parameters["priority"], kind, 1)
        message.parameters["timeout"].uint64_param = 5000
        decoded = grpc_server.decode_request(message)
        assert (decoded.priority, decoded.deadline_ms) == ("high", 5.0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request("FP16", [1]), "no typed contents"),
        (request("FP32", [2]), "has 0 values"),
        (request("FP32", [1], raw_input_contents=[b"12"]), "2 came"),
        (request("FP32", [1], raw_input_contents=[b"1234"] * 2), "raw contents for 2"),
        (request("STRING", [1]), "not supported"),
        (request("FP32", [-1]), "no shape"),
        (request("FP32", [1 << 22]), "raw_input_contents"),
    ],
)
def test_what_is_wrong_is_said_in_words(message: Any, words: str) -> None:
    with pytest.raises((InvalidInput, TooLarge), match=words):
        grpc_server.decode_request(message)


def test_an_answer_is_raw_and_has_the_bill_by_type() -> None:
    infer_request = InferRequest(id="r", inputs=(), frames=[])
    output = Output(name="y", dtype="bfloat16", shape=(1, 2), data=memoryview(b"abcd"))
    timing = {"total_ms": 1.5, "resident": True, "op_id": 7, "preempted": "j"}
    answer = INFERENCE["ModelInferResponse"].FromString(
        b"".join(grpc_server.encode_answer("m", infer_request, [output], timing))
    )
    assert answer.raw_output_contents[0] == b"abcd"
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BF16", [1, 2])
    kinds = {name: value.WhichOneof("choice") for name, value in answer.parameters.items()}
    assert kinds == {
        "total_ms": "double_param",
        "resident": "bool_param",
        "op_id": "int64_param",
        "preempted": "string_param",
    }


def test_every_datatype_has_its_number_in_a_models_configuration() -> None:
    numbered = POOL.FindEnumTypeByName("inference.DataType").values_by_name
    names = {"STRING" if name == "BYTES" else name for name in DATATYPES}
    assert {f"TYPE_{name}" for name in names} <= {*numbered}


def test_every_error_has_a_code_of_grpc() -> None:
    for cls in ERRORS_BY_NAME.values():
        assert status_of(cls.__new__(cls)).grpc in grpc.StatusCode.__members__


def test_our_messages_have_the_fields_of_tritons() -> None:
    pytest.importorskip("tritonclient.grpc", reason="make installs it")
    from tritonclient.grpc import model_config_pb2, service_pb2

    theirs = {
        **service_pb2.DESCRIPTOR.message_types_by_name,
        **model_config_pb2.DESCRIPTOR.message_types_by_name,
    }

    def compare(ours: Any, other: Any) -> None:
        known = {field.name: field for field in other.fields}
        for field in ours.fields:
            same = known[field.name]
            assert (field.number, field.type) == (same.number, same.type), field.full_name
            assert field.is_repeated == same.is_repeated
        for nested in ours.nested_types:
            compare(nested, other.nested_types_by_name[nested.name])

    for name, message in INFERENCE.items():
        compare(message.DESCRIPTOR, theirs[name])
    verbs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for verb in POOL.FindServiceByName("inference.GRPCInferenceService").methods:
        for end in ("input_type", "output_type"):
            assert getattr(verb, end).full_name == getattr(verbs[verb.name], end).full_name


def test_a_joined_models_configuration_is_a_message_too() -> None:
    row = {
        "name": "m",
        "inputs": {},
        "outputs": {"y": [["batch"], "float32"]},
        "batch": [1, 64],
        "batching": {"limit": 8, "delay_ms": 2.0, "is_exact": True},
    }
    message = INFERENCE["ModelConfig"](**config(row))
    assert message.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert message.dynamic_batching.max_queue_delay_microseconds == 2000


@pytest.mark.parametrize("package", list(REFLECTION))
def test_a_client_that_knows_nothing_learns_every_service(package: str) -> None:
    """Like grpcurl, get the services, then their files, then all files that those import."""
    from google.protobuf.descriptor_pool import DescriptorPool

    asks = REFLECTION[package]["ServerReflectionRequest"]
    listed = described(asks(list_services="")).list_services_response.service
    assert [one.name for one in listed] == list(SERVICES)
    pool = DescriptorPool()
    for name in SERVICES:
        answer = described(asks(file_containing_symbol=name, host="h"))
        assert answer.valid_host == "h"
        (file,) = answer.file_descriptor_response.file_descriptor_proto
        pool.AddSerializedFile(file)
    infer = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name
    assert infer["ModelInfer"].input_type.fields_by_name["raw_input_contents"].number == 7
    assert (infer["ModelStreamInfer"].server_streaming, infer["ModelInfer"].server_streaming) == (
        True,
        False,
    )
    by_name = described(asks(file_by_filename="pipeswitch/inference.proto"))
    assert by_name.file_descriptor_response.file_descriptor_proto
    assert described(asks(file_containing_symbol="no.Such")).error_response.error_code == 5
    assert described(asks(file_by_filename="no.proto")).error_response.error_code == 5
    assert described(asks(all_extension_numbers_of_type="x")).error_response.error_code == 12


def test_what_is_described_is_what_is_served() -> None:
    nothing: Any = None
    calls = grpc_server.GrpcVerbs(Service(nothing), nothing, nothing, nothing)
    for handler, service in zip(calls.handlers(), SERVICES, strict=True):
        assert handler.service_name() == service
        described_ = POOL.FindServiceByName(service).methods_by_name
        assert set(described_) == {
            name for name in described_ if handler.service(_Details(f"/{service}/{name}"))
        }
        assert not handler.service(_Details(f"/{service}/Nothing"))


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method


class Context:
    """Context of a call, with the interface of gRPC's own contexts."""

    def __init__(
        self, address: str, *messages: bytes, left_s: float | None = None, port: int = 4711
    ) -> None:
        self.address, self.aborted = f"{address}:{port}", list[str]()
        self.trailing = dict[str, str]()
        self.left_s = left_s
        self._messages = [*messages]

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    def time_remaining(self) -> float | None:
        return self.left_s

    def peer(self) -> str:
        return f"ipv4:{self.address}"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, text: str, trailing: Any) -> None:
        self.aborted.append(code.name)
        self.trailing |= trailing


def test_an_answer_that_is_refused_is_held_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = []
    to_bytes = grpc_server._to_bytes
    monkeypatch.setattr(
        grpc_server, "_to_bytes", lambda message: messages.append(to_bytes(message)) or messages[-1]
    )

    class Service:
        def principal(self, token: str) -> None: ...

        async def infer(self, *_: Any) -> Any:
            messages.append(np.zeros(1 << 16, np.uint8))
            return [Output(name="y", dtype="uint8", shape=(1 << 16,), data=messages[-1].data)], {}

    async def call() -> None:
        service, shared = cast(Any, Service()), Shared(1 << 20, 1 << 20)
        shared.answers.take("10.0.0.1", 1 << 20)  # an earlier answer, which is still unread
        calls = grpc_server.GrpcVerbs(service, service, shared, ARRIVALS)
        message = request("FP32", [1], raw_input_contents=[b"1234"]).SerializeToString()
        context = Context("10.0.0.1", message, message)
        unary = calls._unary("ModelInfer", calls._infer).stream_stream
        assert [part async for part in unary(None, context)] == []
        streamed = calls._stream(None, cast(Any, context))
        assert b"not read" in await anext(streamed)  # a stream is refused like a single request
        large = [one for one in messages if len(one) >= 1 << 16]
        assert {sys.getrefcount(one) for one in large} == {4}  # only references of this test

    gc.disable()  # messages must be freed without the garbage collector
    try:
        asyncio.run(call())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("left_s", "timeout_us", "deadline_ms"),
    [(None, 0, None), (2.5, 0, 2500.0), (2.5, 4000, 4.0), (-0.1, 0, 0.001)],
)
def test_a_calls_deadline_is_its_requests_where_that_names_none(
    left_s: float | None, timeout_us: int, deadline_ms: float | None
) -> None:
    requests = list[InferRequest]()

    class Service:
        def principal(self, token: str) -> None: ...

        async def infer(self, *arguments: Any) -> Any:
            requests.append(arguments[3])
            return [], {}

    async def call(verb: str) -> None:
        service: Any = Service()
        calls = grpc_server.GrpcVerbs(service, service, Shared(1 << 20, 1 << 20), ARRIVALS)
        message = request("FP32", [1], raw_input_contents=[b"1234"])
        message.parameters["timeout"].int64_param = timeout_us
        context: Any = Context("10.0.0.1", message.SerializeToString(), left_s=left_s)
        unary = calls._unary("ModelInfer", calls._infer).stream_stream
        behavior = {"unary": unary, "stream": calls._stream}[verb]
        assert len([part async for part in behavior(None, context)]) == 1

    asyncio.run(call("unary"))
    asyncio.run(call("stream"))
    assert requests[0].deadline_ms == deadline_ms
    assert requests[1].deadline_ms == (timeout_us / 1000.0 or None)  # the stream's limit is ignored


def test_who_watches_the_health_without_a_token_takes_no_more_than_a_share_of_the_calls() -> None:
    class Service:
        async def is_ready(self) -> bool:
            return True

    async def watch_all() -> None:
        service = cast(Any, Service())
        calls = grpc_server.GrpcVerbs(service, service, Shared(1 << 20, 1 << 20), ARRIVALS)
        message = HEALTH["HealthCheckRequest"]().SerializeToString()
        context = Context("10.0.0.1", *[message] * grpc_server.MAX_WATCHERS)
        other = Context("10.0.0.2", message)

        def watch(context: Context) -> Any:
            return calls._watch(None, cast(Any, context))

        readers = [watch(context) for _ in range(grpc_server.MAX_WATCHERS * ALPHA // (ALPHA + 1))]
        for reader in readers:
            assert (await anext(reader)).status == HEALTH["HealthCheckResponse"].SERVING
        assert [part async for part in watch(context)] == []
        assert context.aborted == ["RESOURCE_EXHAUSTED"]
        assert context.trailing == {"pipeswitch-code": "QueueFull", "pipeswitch-limit": "watches"}
        await readers[0].aclose()
        assert (await anext(watch(context))).status == HEALTH["HealthCheckResponse"].SERVING
        assert (await anext(watch(other))).status == HEALTH["HealthCheckResponse"].SERVING

    assert grpc_server.MAX_WATCHERS < grpc_server.MAX_CALLS / 2
    asyncio.run(watch_all())


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer", "ServerLive", "reflection"])
def test_a_call_whose_half_message_is_too_much_for_its_address_is_refused(verb: str) -> None:
    class Service:
        probe = None

        def principal(self, token: str) -> None: ...

    class Half(Context):
        async def read(self) -> Any:
            await asyncio.get_running_loop().create_future()  # the rest of the message never comes

    async def call() -> None:
        shares, context = FairQuota(1 << 20), Half("10.0.0.1")
        arrivals = Arrivals(shares, lambda peers: dict.fromkeys(peers, 1 << 20))
        service = cast(Any, Service())
        shared = Shared(1 << 20, 1 << 20)
        calls = grpc_server.GrpcVerbs(service, service, shared, arrivals)

        message = REFLECTION["grpc.reflection.v1"]["ServerReflectionRequest"]
        behavior: Any = {
            "ModelInfer": calls._unary("ModelInfer", calls._infer).stream_stream,
            "ServerLive": calls._unary("ServerLive", calls._infer).stream_stream,
            "ModelStreamInfer": calls._stream,
            "reflection": lambda *args: calls._reflect(message, *args),
        }[verb]
        assert [part async for part in behavior(None, context)] == []
        assert context.aborted == ["RESOURCE_EXHAUSTED"]
        assert (shares.held, shared.queue_full_count) == (0, 1)
        assert shared.errors == {"RESOURCE_EXHAUSTED": 1}

    asyncio.run(call())


@pytest.mark.parametrize("sizes", [(), (0,), (3,), (127, 0, 128), (1 << 14, 1 << 21)])
def test_a_long_answer_that_is_copied_once_is_the_same_message(sizes: tuple[int, ...]) -> None:
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    outputs = [
        Output(name=f"y{number}", dtype="uint8", shape=(len(one),), data=memoryview(one))
        for number, one in enumerate(data)
    ]
    infer_request = InferRequest(id="r", inputs=(), frames=[])
    timing = {"total_ms": 1.5}
    parts = grpc_server.encode_answer("m", infer_request, outputs, timing)
    whole = grpc_server.joined(parts)
    assert whole == b"".join(parts)
    answer = INFERENCE["ModelInferResponse"].FromString(whole)
    assert [*answer.raw_output_contents] == data
    assert [one.name for one in answer.outputs] == [one.name for one in outputs]
    streamed = grpc_server.joined(
        grpc_server.encode_answer("m", infer_request, outputs, timing, is_offloaded=True)
    )
    message = INFERENCE["ModelStreamInferResponse"].FromString(streamed)
    assert (message.infer_response, message.error_message) == (answer, "")


class Echo:
    """Service whose answers have ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._output = np.zeros(size, np.uint8)
        self.asked = 0

    def principal(self, token: str) -> None: ...

    async def infer(self, *_: Any) -> Any:
        self.asked += 1
        size = len(self._output)
        return [Output(name="y", dtype="uint8", shape=(size,), data=self._output.data)], {}


def behavior_of(verb: str, service: Any, shared: Shared) -> Any:
    calls = grpc_server.GrpcVerbs(service, service, shared, ARRIVALS)
    if verb == "ModelStreamInfer":
        return calls._stream
    return calls._unary("ModelInfer", calls._infer).stream_stream


def long_request(size: int) -> bytes:
    data: bytes = request("UINT8", [size], raw_input_contents=[bytes(size)]).SerializeToString()
    return data


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_request_is_held_no_longer_while_its_answer_is_not_read(verb: str, size: int) -> None:
    async def call() -> None:
        shared, data = Shared(1 << 23, 1 << 23), long_request(1 << 20)
        context = Context("10.0.0.1", data)
        count = sys.getrefcount(data)
        answers = behavior_of(verb, Echo(size), shared)(None, context)
        answer = await anext(answers)
        assert len(answer) >= size
        assert sys.getrefcount(data) == count - 1  # neither the context nor the call has ``data``
        assert shared.waiting.held == 0
        await answers.aclose()
        assert shared.answers.held == 0

    asyncio.run(call())


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer"])
def test_long_answers_are_copied_beside_the_loop(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, join = list[str](), grpc_server.joined

    def slow_join(parts: Any) -> bytes:
        copied.append(threading.current_thread().name)
        return join(parts)

    async def call() -> None:
        for size in (1 << 10, 1 << 20):
            context = Context("10.0.0.1", long_request(1))
            behavior = behavior_of(verb, Echo(size), Shared(1 << 23, 1 << 23))
            (answer,) = [part async for part in behavior(None, context)]
            assert len(answer) > size

    monkeypatch.setattr(grpc_server, "joined", slow_join)
    asyncio.run(call())
    assert [name.startswith("pipeswitch-aside") for name in copied] == [True]


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer"])
def test_small_messages_are_not_refused_for_the_long_ones_of_the_same_address(verb: str) -> None:
    async def call() -> None:
        shared = Shared(1 << 20, 1 << 20)
        for one in (shared.waiting, shared.answers):
            one.add("10.0.0.1", 1 << 20)
        context = Context("10.0.0.1", long_request(1))
        (answer,) = [part async for part in behavior_of(verb, Echo(1), shared)(None, context)]
        assert not context.aborted
        if verb == "ModelStreamInfer":
            assert not INFERENCE["ModelStreamInferResponse"].FromString(answer).error_message

    asyncio.run(call())


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer"])
def test_an_answer_that_would_be_refused_is_not_computed_again(verb: str) -> None:
    async def call() -> None:
        shared, service = Shared(1 << 23, 1 << 21), Echo(1 << 20)
        behavior = behavior_of(verb, service, shared)
        unread = behavior(None, Context("10.0.0.1", long_request(1)))
        await anext(unread)
        refused = [part async for part in behavior(None, Context("10.0.0.1", long_request(1)))]
        assert service.asked == 1
        assert len(refused) == (verb == "ModelStreamInfer")
        await unread.aclose()
        assert len([one async for one in behavior(None, Context("10.0.0.1", long_request(1)))]) == 1

    asyncio.run(call())


def test_requests_of_a_stream_that_fail_for_any_reason_are_answered() -> None:
    async def call() -> list[bool]:
        service = SimpleNamespace(principal=lambda _: None)  # it has no ``infer``
        answers = behavior_of("ModelStreamInfer", service, Shared(1 << 20, 1 << 20))
        context = Context("10.0.0.1", long_request(1), long_request(1))
        return [b"AttributeError" in part async for part in answers(None, context)]

    assert asyncio.run(call()) == [True, True]


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer"])
def test_calls_of_a_crowded_address_take_turns_by_connection_and_others_go_first(verb: str) -> None:
    class Named(Echo):
        async def infer(self, *arguments: Any) -> Any:
            begun.append(arguments[-1])
            return await super().infer()

    class Later(Context):
        async def read(self) -> Any:
            await asyncio.sleep(0)  # lets all calls begin before the first message
            return await super().read()

    async def run() -> None:
        behavior = behavior_of(verb, Named(1), Shared(1 << 20, 1 << 20))

        async def ask(address: str, port: int) -> None:
            context = Later(address, long_request(1), port=port)
            assert len([part async for part in behavior(None, context)]) == 1
            ended.append(port)

        crowd = [ask("10.0.0.1", 1) for _ in range(4 * CROWD)]
        others = [ask("10.0.0.2", 2) for _ in range(CROWD)]
        await asyncio.gather(*crowd, ask("10.0.0.1", 3), *others)

    begun, ended = list[str](), list[int]()
    asyncio.run(run())
    assert begun.index("10.0.0.2") <= CROWD
    assert begun[: 3 * CROWD].count("10.0.0.2") == CROWD
    assert ended.index(3) < ended.index(1) + 3 * CROWD  # a connection's calls share one turn
