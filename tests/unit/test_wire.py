"""decode(encode(m)) == m for every message; decoders raise nothing but RemoteProtocolError."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.base.config import GatewayConfig
from pipeswitch.base.errors import ERRORS_BY_NAME, PipeSwitchError, RemoteProtocolError, from_wire
from pipeswitch.base.errors import to_wire as error_to_wire
from pipeswitch.frontend.verbs import VERBS
from pipeswitch.ipc.channel import AnyMessage, decode_message, encode_message
from pipeswitch.ipc.messages.base import Message, OpId
from pipeswitch.ipc.messages.fork_server import Fork
from pipeswitch.ipc.messages.worker import InferenceFailed, JobReport
from pipeswitch.wire.frames import (
    MAGIC,
    MAX_NESTING,
    ReplyHeader,
    RequestHeader,
    WireError,
    WireTensor,
    decode_reply,
    decode_request,
    encode_header,
    pack_dict,
)
from pipeswitch.wire.request_timing import RequestTiming

MESSAGE_TYPES: tuple[type[Message], ...] = get_args(AnyMessage)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20)
bodies = st.dictionaries(
    st.text(max_size=10),
    st.recursive(scalars | st.floats(allow_nan=False), lambda s: st.lists(s, max_size=3)),
    max_size=4,
)


def value_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values to which msgspec decodes a field of this type."""
    supertype = getattr(kind, "__supertype__", None)
    if supertype is not None:
        return value_of(supertype)
    origin, args = typing.get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # … | None
        return st.none() | value_of(args[0])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*map(value_of, args))
    if origin is tuple:
        return st.lists(value_of(args[0]), max_size=3).map(tuple)
    if origin is dict and args[0] is not str:
        return st.dictionaries(*map(value_of, args), max_size=4)
    if origin is dict:
        return bodies
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct_of(kind)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple)):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: value_of(one) for name, one in hints.items()})
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
    }[kind]


def struct_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    if issubclass(kind, GatewayConfig):  # it refuses most values
        return st.builds(kind, behind_proxy=st.booleans(), max_connections=st.integers(2, 99))
    hints = typing.get_type_hints(kind)
    names = [field.name for field in msgspec.structs.fields(kind)]
    return st.builds(kind, **{name: value_of(hints[name]) for name in names})


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_an_internal_message_survives_the_wire(kind: type[Message]) -> None:
    @settings(max_examples=settings().max_examples // 3)  # fewer, because there are many kinds
    @given(struct_of(kind))
    def roundtrip(message: Message) -> None:
        assert decode_message(encode_message(message)) == message

    roundtrip()


tensors = st.lists(
    st.tuples(st.text(max_size=9), st.text(max_size=9), st.lists(st.integers(0, 9), max_size=8)),
    max_size=4,
).map(
    lambda items: tuple(
        WireTensor(name=name, dtype=dtype, shape=tuple(shape), frame=frame)
        for frame, (name, dtype, shape) in enumerate(items)
    )
)


@given(
    op=st.sampled_from([op for op in VERBS if op != "put"]),
    request_id=st.text(min_size=1, max_size=64),
    text=st.text(max_size=20),
    deadline=st.none() | st.floats(allow_nan=False),
    inputs=tensors,
    body=bodies,
)
def test_a_request_survives_the_wire(
    op: Any,
    request_id: str,
    text: str,
    deadline: float | None,
    inputs: tuple[WireTensor, ...],
    body: dict[str, Any],
) -> None:
    header = RequestHeader(
        v=1,
        op=op,
        id=request_id,
        session=text,
        model=text,
        priority=text,
        deadline_ms=deadline,
        inputs=inputs,
        body=body,
    )
    frames = [MAGIC, encode_header(header), *(b"" for _ in inputs)]
    assert decode_request(frames) == header


@given(body=bodies, outputs=tensors, more=st.booleans(), error=st.none() | st.text(max_size=9))
def test_a_reply_survives_the_wire(
    body: dict[str, Any], outputs: tuple[WireTensor, ...], more: bool, error: str | None
) -> None:
    header = ReplyHeader(
        v=1,
        id="1",
        status="ok",
        more=more,
        timing=RequestTiming(queue_ms=1.0, device="cpu:1"),
        outputs=outputs,
        body=body,
        error=WireError(type=error, message=error) if error is not None else None,
    )
    assert decode_reply([MAGIC, encode_header(header), *(b"" for _ in outputs)]) == header


# Almost valid bytes reach more code than random ones, so tests cut, flip and splice real messages.
real = st.sampled_from(
    [
        encode_header(RequestHeader(v=1, op="infer", id="1", body={"a": [1, "ü", None]})),
        encode_header(ReplyHeader(v=1, id="1", status="ok", timing=RequestTiming(queue_ms=1.0))),
        encode_message(Fork(ticket=1, name="w", settings=b"x")),
        pack_dict({"topic": "switch.", "n": [1, 2.5]}),
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(real))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=8))


@given(st.binary(max_size=200) | damaged() | real)
def test_decoders_raise_nothing_but_remote_protocol_error(data: bytes) -> None:
    for decode in (
        lambda: decode_message(data),
        lambda: decode_request([MAGIC, data]),
        lambda: decode_reply([MAGIC, data]),
        lambda: decode_request([data, data]),
    ):
        with contextlib.suppress(RemoteProtocolError):
            decode()


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_any_frames_are_refused_in_one_way(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_request(frames)


@pytest.mark.parametrize("depth", [100, 10_000, 100_000])
def test_deep_nesting_is_refused_not_a_crash(depth: int) -> None:
    for opener in (b"\x91", b"\x81\xa1a"):
        data = b"\x81\xa4body" + opener * depth
        with pytest.raises(RemoteProtocolError):
            decode_request([MAGIC, data])
        with pytest.raises(RemoteProtocolError):
            decode_message(data)


@pytest.mark.parametrize("depth", [MAX_NESTING, 200, 900])
@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a"])
def test_what_only_the_decoder_could_bear_is_refused(depth: int, opener: bytes) -> None:
    """Refuse deep nesting: code that later prints or encodes a message could overflow its stack."""
    mark = 0x7123_4567
    deep = opener * depth + b"\x01"
    messages = [
        JobReport(op_id=OpId(1), kind="warning", values={"text": mark}),
        InferenceFailed(op_id=OpId(1), error="TaskFailed", message="no", data={"text": mark}),
    ]
    packed = [encode_message(message) for message in messages]
    for data in packed:
        with pytest.raises(RemoteProtocolError):
            decode_message(data.replace(msgspec.msgpack.encode(mark), deep))
    header = encode_header(RequestHeader(v=1, op="register", id="1", body={"inputs": mark}))
    with pytest.raises(RemoteProtocolError):
        decode_request([MAGIC, header.replace(msgspec.msgpack.encode(mark), deep)])


@pytest.mark.parametrize("extension", range(-128, 128))
def test_msgpack_extensions_are_refused_or_plain_data(extension: int) -> None:
    for payload in (b"", b"\xff" * 4, b"\xff" * 8, b"\xff" * 12):
        head = b"\xc7" + bytes([len(payload), extension & 0xFF]) + payload
        with contextlib.suppress(RemoteProtocolError):
            decode_request(
                [MAGIC, b"\x84\xa1v\x01\xa2op\xa4ping\xa2id\xa11\xa4body\x81\xa1a" + head]
            )


def test_another_version_is_answered_in_words() -> None:
    header = encode_header(RequestHeader(v=2, op="ping", id="1"))
    with pytest.raises(RemoteProtocolError):
        decode_request([MAGIC, header])


def test_a_frame_must_be_named_by_exactly_one_input() -> None:
    twice = tuple(WireTensor(name=n, dtype="int8", shape=(1,), frame=0) for n in "ab")
    header = encode_header(RequestHeader(v=1, op="infer", id="1", inputs=twice))
    with pytest.raises(RemoteProtocolError):
        decode_request([MAGIC, header, b"x", b"y"])


def test_a_pickle_is_just_bytes_that_are_refused() -> None:
    hostile = b"cos\nsystem\n(S'true'\ntR."
    with pytest.raises(RemoteProtocolError):
        decode_request([MAGIC, hostile])


@pytest.mark.parametrize("name", sorted(ERRORS_BY_NAME))
def test_every_error_survives_the_wire(name: str) -> None:
    cls = ERRORS_BY_NAME[name]
    error = cls.__new__(cls)
    PipeSwitchError.__init__(error, "what", hint="do", requested_bytes=5)
    fields = error_to_wire(error)
    again = from_wire(fields["type"], fields["message"], fields["hint"], fields["data"], "r1")
    assert type(again) is cls
    assert (again.message, again.hint, again.requested_bytes) == ("what", "do", 5)
    assert again.request_id == "r1"
