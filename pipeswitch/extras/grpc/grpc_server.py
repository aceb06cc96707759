"""``inference.GRPCInferenceService``, health and reflection on gRPC's own asyncio server."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

# gRPC's event engine switches threads ten times per call, its older poller six times. The library
# reads this at its import.
os.putenv("GRPC_EXPERIMENTS", os.environ.get("GRPC_EXPERIMENTS", "-event_engine_listener"))

import grpc
import grpc.aio
import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from ...base.errors import InvalidInput, PipeSwitchError, QueueFull
from ...base.quotas import FairQuota
from ...base.roles import Principal
from ...gateway.http.http_errors import NotFound, TooLarge, as_ours, limit_of, status_of
from ...gateway.http.offload import CROWD, Shared
from ...gateway.serving import oip
from ...gateway.serving.auth import Authenticator
from ...gateway.serving.oip import InferRequest, Output, RequestedOutput
from ...gateway.serving.service import Service
from ...ipc.messages.gateway import GatewaySettings
from ...wire.frames import MAX_TENSORS, WireTensor
from .half_messages import Arrivals, Arriving, Sockets
from .protos import HEALTH, INFERENCE, REFLECTION, REFLECTION_NAME, described

log = logging.getLogger(__name__)

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
SPARE_BYTES: Final = 1 << 20  # bytes of a message in addition to its tensors
CONNECTIONS_SHARE: Final = 8  # HTTP connections for each gRPC connection, which may take 0.6 MiB
WATCH_EVERY_S: Final = 1.0  # interval between checks of the health for watchers
MAX_CALLS: Final = 1024  # concurrent calls of all callers
CALLS_PER_ADDRESS: Final = MAX_CALLS // 2
ARRIVING_MESSAGES: Final = 4  # memory for incomplete messages, in messages of the largest size
MESSAGE_S: Final = 60.0  # a call occupies a place while it waits this long for its only message
MAX_WATCHERS: Final = 64  # watchers of the health need no token, and their calls do not end
OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 256),  # for each connection
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 60_000),  # detects a peer that is gone
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 1),  # the controller holds the port
    # Limit of the bytes that a stream may send before its last answer is read. Probing would raise
    # it to many MiB. A message that is being read may exceed it, so ``Arrivals`` counts its bytes.
    ("grpc.http2.lookahead_bytes", 256 << 10),
    ("grpc.http2.bdp_probe", 0),
)
_CONTENTS: Final[Mapping[str, str]] = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
    "bytes": "bytes_contents",
}

_RAW_TAG: Final = 7 << 3 | 2  # protobuf's tag of raw_input_contents
_OUTPUT_TAG: Final = 6 << 3 | 2  # protobuf's tag of raw_output_contents
_STREAMED_TAG: Final = 2 << 3 | 2  # protobuf's tag of a stream's infer_response
SPLIT_BYTES: Final = 64 << 10  # a smaller message is copied as fast as it is split
MAX_PARTS: Final = 4 * MAX_TENSORS + 16  # inputs, outputs, contents, parameters; and other fields
SMALL_BYTES: Final = 64 << 10  # limit of a message without tensors
MAX_MODELS: Final = 1024  # maximum number of models whose long answers are remembered

CARRIER: ContextVar[Mapping[str, Any]] = ContextVar("carrier", default=MappingProxyType({}))
"""Metadata of the call that this task serves."""
LEFT_S: ContextVar[float | None] = ContextVar("left_s", default=None)
"""Seconds until the call's own deadline; None for a stream, which has many requests."""
Verb = Callable[[Principal, Any], Awaitable[Any]]
Answered = Callable[[Principal, str, bytes], Awaitable[bytes]]
"""Function that returns the answer to a message, given its caller and address."""


async def open_server(
    service: Service, callers: Authenticator, settings: GatewaySettings, shared: Shared
) -> grpc.aio.Server:
    """Return a server that has started to listen."""
    config = settings.config
    max_bytes = config.max_body_bytes + SPARE_BYTES
    bounds = (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections // CONNECTIONS_SHARE),
    )
    server = grpc.aio.server(options=[*OPTIONS, *bounds], maximum_concurrent_rpcs=MAX_CALLS)
    arrived = Sockets(int(settings.grpc.rpartition(":")[2])).arrived
    arrivals = Arrivals(FairQuota(ARRIVING_MESSAGES * max_bytes), arrived)
    server.add_generic_rpc_handlers(GrpcVerbs(service, callers, shared, arrivals).handlers())
    if config.tls_cert:
        pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
        server.add_secure_port(settings.grpc, grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(settings.grpc)
    await server.start()
    return server


class GrpcVerbs:
    """Router from calls to verbs.

    All calls are registered as streams, though most have one message. Otherwise gRPC's library
    would read the message before the caller is checked, and would not report when the answer has
    left. Messages are read through the context, because the library's iterator keeps the last one.
    """

    def __init__(
        self, service: Service, callers: Authenticator, shared: Shared, arrivals: Arrivals
    ) -> None:
        self._service = service
        self._callers = callers
        self._shared = shared
        self._arrivals = arrivals
        self._watchers = FairQuota(MAX_WATCHERS, "watches of the health", "watches")
        self._by_address: Counter[str] = Counter()
        self._answer_bytes: dict[str, int] = {}  # model -> size of its last long answer

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        verbs: dict[str, Verb] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": _of_model("ModelReady", self._service.is_model_ready, "ready"),
            "ServerMetadata": self._about,
            "ModelMetadata": _of_model("ModelMetadata", self._service.metadata),
            "ModelConfig": _of_model("ModelConfig", self._service.config, "config"),
            "ModelStatistics": _of_model("ModelStatistics", self._service.statistics),
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
            "SystemSharedMemoryStatus": self._region_rows,
            "SystemSharedMemoryRegister": self._register_region,
            "SystemSharedMemoryUnregister": self._unregister_region,
        }
        inference = {
            name: self._unary(name, _small(INFERENCE[f"{name}Request"], verb))
            for name, verb in verbs.items()
        }
        inference["ModelInfer"] = self._unary("ModelInfer", self._infer)
        inference["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        health = {
            "Check": self._unary("Check", _small(HEALTH["HealthCheckRequest"], self._check)),
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, response_serializer=_to_bytes
            ),
        }
        services: dict[str, dict[str, grpc.RpcMethodHandler]] = {
            SERVICE: inference,
            HEALTH_SERVICE: health,
        }
        for package, messages in REFLECTION.items():
            reflect = grpc.stream_stream_rpc_method_handler(
                functools.partial(self._reflect, messages["ServerReflectionRequest"]),
                None,
                _to_bytes,
            )
            services[f"{package}.{REFLECTION_NAME}"] = {"ServerReflectionInfo": reflect}
        return tuple(starmap(grpc.method_handlers_generic_handler, services.items()))

    def _unary(self, name: str, verb: Answered) -> grpc.RpcMethodHandler:
        is_probe = name in ("ServerLive", "ServerReady", "Check")

        async def call(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            try:
                with self._place(context) as (address, arriving):
                    caller = self._callers.probe if is_probe else self._caller(context)
                    data = await _only(arriving)
                    LEFT_S.set(context.time_remaining())
                    async with self._answered(
                        verb, caller, address, context.peer(), data
                    ) as answer:
                        data = b""  # free it: the client may read slowly
                        yield answer
                return
            except PipeSwitchError as error:
                status_and_text = self._told(error)
            except Exception as error:
                log.exception("call=%s failed", name)
                status_and_text = self._told(as_ours(error))
            await context.abort(*status_and_text)

        return grpc.stream_stream_rpc_method_handler(call)

    @contextlib.asynccontextmanager
    async def _answered(
        self, verb: Answered, caller: Principal, address: str, peer: str, data: bytes
    ) -> AsyncIterator[bytes]:
        """Yield the answer to a message, and count the bytes of both toward the address's shares.
        Raises QueueFull: a share of the address is used up."""
        with self._shared.waiting.holding(address, _charged(len(data))):
            if self._by_address[address] > CROWD:
                await self._shared.passes.turn(address, peer)
            answer = await verb(caller, address, data)
        del data  # its bytes are no longer counted
        with self._shared.answers.holding(address, _charged(len(answer))):
            yield answer

    @contextlib.contextmanager
    def _place(self, context: grpc.aio.ServicerContext) -> Iterator[tuple[str, Arriving]]:
        """Count a call toward its address; yield the address, and the reader of the messages.
        Raises QueueFull: the address has CALLS_PER_ADDRESS calls."""
        address = _address(context)
        if self._by_address[address] >= CALLS_PER_ADDRESS:
            raise QueueFull(
                f"more than {CALLS_PER_ADDRESS} calls from this address",
                hint="send again",
                limit="calls",
            )
        self._by_address[address] += 1
        try:
            with self._arrivals.call(context, address) as arriving:
                yield address, arriving
        finally:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _caller(self, context: grpc.aio.ServicerContext) -> Principal:
        metadata = dict(context.invocation_metadata() or ())
        CARRIER.set(metadata)
        return self._callers.principal(str(metadata.get("authorization", "")))

    def _told(
        self, error: PipeSwitchError
    ) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
        """Count the error, and return the arguments of ``abort``: code, text, and as trailing
        metadata the error's name and the limit that refused the call."""
        self._shared.queue_full_count += isinstance(error, QueueFull)
        code = grpc.StatusCode[status_of(error).grpc]
        self._shared.errors[code.name] += 1
        named = {"code": type(error).__name__, **limit_of(error)}
        return code, str(error), tuple((f"pipeswitch-{key}", text) for key, text in named.items())

    # ---- the server ----------------------------------------------------------------------------

    async def _live(self, caller: Principal, request: Any) -> Any:
        return INFERENCE["ServerLiveResponse"](live=await self._service.is_live())

    async def _ready(self, caller: Principal, request: Any) -> Any:
        return INFERENCE["ServerReadyResponse"](ready=await self._service.is_ready())

    async def _about(self, caller: Principal, request: Any) -> Any:
        return INFERENCE["ServerMetadataResponse"](**self._service.about())

    async def _index(self, caller: Principal, request: Any) -> Any:
        rows = await self._service.index(caller, ready_only=request.ready)
        return INFERENCE["RepositoryIndexResponse"](models=rows)

    async def _load(self, caller: Principal, request: Any) -> Any:
        await self._service.load(caller, request.model_name, dict(request.parameters))
        return INFERENCE["RepositoryModelLoadResponse"]()

    async def _unload(self, caller: Principal, request: Any) -> Any:
        await self._service.unload(caller, request.model_name)
        return INFERENCE["RepositoryModelUnloadResponse"]()

    async def _region_rows(self, caller: Principal, request: Any) -> Any:
        rows = self._service.regions.rows(caller, request.name)
        return INFERENCE["SystemSharedMemoryStatusResponse"](
            regions={row["name"]: row for row in rows}
        )

    async def _register_region(self, caller: Principal, request: Any) -> Any:
        fields = {name: getattr(request, name) for name in ("key", "offset", "byte_size")}
        self._service.regions.register(caller, request.name, fields)
        return INFERENCE["SystemSharedMemoryRegisterResponse"]()

    async def _unregister_region(self, caller: Principal, request: Any) -> Any:
        self._service.regions.unregister(caller, request.name)
        return INFERENCE["SystemSharedMemoryUnregisterResponse"]()

    async def _trace_setting(self, caller: Principal, request: Any) -> Any:
        settings_asked = {name: list(one.value) or None for name, one in request.settings.items()}
        settings_now = await self._service.settings(caller, settings_asked, request.model_name)
        settings = {name: {"value": [value]} for name, value in settings_now.items()}
        return INFERENCE["TraceSettingResponse"](settings=settings)

    async def _log_settings(self, caller: Principal, request: Any) -> Any:
        settings_asked = {
            name: getattr(one, choice) if (choice := one.WhichOneof("parameter_choice")) else None
            for name, one in request.settings.items()
        }
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        settings_now = await self._service.settings(caller, settings_asked)
        settings = {name: {kinds[type(value)]: value} for name, value in settings_now.items()}
        return INFERENCE["LogSettingsResponse"](settings=settings)

    async def _check(self, caller: Principal, request: Any) -> Any:
        if request.service not in ("", SERVICE):
            raise NotFound(f"no service {request.service[:80]!r}", hint=SERVICE)
        return await self._status()

    async def _watch(self, _: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            address = _address(context)
            with self._watchers.holding(address, 1):
                with self._arrivals.call(context, address) as arriving:
                    data = await _only(arriving)
                request = _read(HEALTH["HealthCheckRequest"], data)
                if request.service not in ("", SERVICE):
                    yield HEALTH["HealthCheckResponse"](status="SERVICE_UNKNOWN")
                    return
                last_status = None
                while True:
                    status = await self._status()
                    if status != last_status:
                        last_status = status
                        yield status
                    await asyncio.sleep(WATCH_EVERY_S)
        except PipeSwitchError as error:
            await context.abort(*self._told(error))

    async def _reflect(
        self, message: Any, _: object, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        try:
            with self._place(context) as (_, arriving):
                self._caller(context)
                while (data := await arriving.next()) is not None:
                    yield described(_read(message, data))
        except PipeSwitchError as error:
            await context.abort(*self._told(error))

    async def _status(self) -> Any:
        word = "SERVING" if await self._service.is_ready() else "NOT_SERVING"
        return HEALTH["HealthCheckResponse"](status=word)

    # ---- a model -------------------------------------------------------------------------------

    async def _infer(
        self, caller: Principal, address: str, data: bytes, *, is_offloaded: bool = False
    ) -> bytes:
        rest, raw = split_raw(data)
        if len(rest) <= oip.LONG_BYTES:
            request, infer_request = read_infer(rest, raw)
        else:
            request, infer_request = await self._shared.aside.run(address, read_infer, rest, raw)
        left_s = LEFT_S.get()
        if left_s is not None and infer_request.deadline_ms is None:
            left_ms = max(left_s * 1000.0, 0.001)  # the server refuses a deadline of 0
            infer_request = msgspec.structs.replace(infer_request, deadline_ms=left_ms)
        model = request.model_name
        # Without this check, a client that reads no answers could request ever more of them.
        if refusal := self._shared.answers.refusal(address, self._answer_bytes.get(model, 0)):
            raise refusal
        outputs, timing = await self._service.infer(
            caller, model, request.model_version, infer_request, CARRIER.get(), address
        )
        parts = encode_answer(model, infer_request, outputs, timing, is_offloaded=is_offloaded)
        if (size_bytes := sum(map(len, parts))) <= SPLIT_BYTES:
            self._answer_bytes.pop(model, None)
            return b"".join(parts)
        if len(self._answer_bytes) >= MAX_MODELS:
            self._answer_bytes.clear()
        self._answer_bytes[model] = size_bytes
        with self._shared.answers.holding(address, size_bytes):  # counted before it is copied
            return await self._shared.aside.run(address, joined, parts)

    async def _stream(self, _: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Yield one answer for each request, in order. An error is an answer, too."""
        response = INFERENCE["ModelStreamInferResponse"]
        streamed = functools.partial(self._infer, is_offloaded=True)
        try:
            with self._place(context) as (address, arriving):
                caller = self._caller(context)
                while (data := await arriving.next()) is not None:
                    try:
                        async with self._answered(
                            streamed, caller, address, context.peer(), data
                        ) as answer:
                            data = b""  # free it: the client may read slowly
                            yield answer
                        continue
                    except Exception as error:  # the stream's other requests go on
                        if not isinstance(error, PipeSwitchError):
                            log.exception("call=ModelStreamInfer failed")
                        failed = response(error_message=self._told(as_ours(error))[1])
                    if request_id := _id_of(data):
                        failed.infer_response.id = request_id
                    del data  # free it: the client may not read the answer
                    yield _to_bytes(failed)
        except PipeSwitchError as error:
            await context.abort(*self._told(error))


def _address(context: grpc.aio.ServicerContext) -> str:
    return str(context.peer()).rpartition(":")[0].partition(":")[2]  # ipv4:ADDRESS:PORT


async def _only(arriving: Arriving) -> bytes:
    """Return the only message of a call.
    Raises InvalidInput: the call has no message; QueueFull, RequestTimeout: see
    ``Arriving.next``."""
    data = await arriving.next(MESSAGE_S)
    if data is None:
        raise InvalidInput("the call has no message")
    return data


def _of_model(name: str, ask: Callable[..., Awaitable[Any]], field: str = "") -> Verb:
    """Return a verb for a query about a model; ``field`` selects a single field of the reply."""

    async def verb(caller: Principal, request: Any) -> Any:
        value = await ask(caller, request.name, request.version)
        return INFERENCE[f"{name}Response"](**({field: value} if field else value))

    return verb


def _small(message: Any, verb: Verb) -> Answered:
    """Return a verb as a function from bytes to bytes, for messages without tensors."""

    async def answered(caller: Principal, address: str, data: bytes) -> bytes:
        return _to_bytes(await verb(caller, _read(message, data)))

    return answered


def _read(message: Any, data: bytes, max_bytes: int = SMALL_BYTES) -> Any:
    """Parse a message.
    Raises InvalidInput: the bytes are not such a message (gRPC's own parser would report UNKNOWN);
    TooLarge: there are more than ``max_bytes``."""
    if len(data) > max_bytes:
        raise TooLarge(f"{len(data)} bytes of a message, the limit is {max_bytes}")
    try:
        return message.FromString(data)
    except DecodeError:
        raise _no_message(message) from None


def _no_message(message: Any) -> InvalidInput:
    return InvalidInput(f"these bytes are not a valid {message.DESCRIPTOR.full_name}")


def read_infer(data: bytes, raw: Sequence[Any] = ()) -> tuple[Any, InferRequest]:
    """Return a ModelInferRequest, and its decoded form; ``split_raw`` gives ``data`` and ``raw``.

    Raises:
        InvalidInput: the bytes are not such a message, or a tensor contradicts its shape or dtype.
        TooLarge: the message without raw contents is too large.
    """
    request = _read(INFERENCE["ModelInferRequest"], data, oip.MAX_JSON_BYTES)
    return request, decode_request(request, raw)


def _id_of(data: bytes) -> str:
    """Return the id of a refused request, or an empty string if it cannot be read."""
    try:
        return str(_read(INFERENCE["ModelInferRequest"], split_raw(data)[0]).id)
    except PipeSwitchError:
        return ""


def split_raw(data: bytes) -> tuple[bytes, Sequence[memoryview]]:
    """Return a ModelInferRequest without its raw contents, and views of these in ``data``.

    protobuf would copy each raw content twice. A small message is not split.

    Raises:
        InvalidInput: the bytes are not such a message, or have more than MAX_PARTS parts.
    """
    if len(data) < SPLIT_BYTES:
        return data, ()
    whole, at = memoryview(data), 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    while at < len(whole):
        began = at
        try:
            tag, at = _number(whole, at)
            size, at = _number(whole, at)
        except IndexError:
            raise _no_message(INFERENCE["ModelInferRequest"]) from None
        at += size if tag & 7 == 2 else 0  # otherwise the number is the field's value
        if tag & 7 not in (0, 2) or at > len(whole):
            raise _no_message(INFERENCE["ModelInferRequest"])
        if tag == _RAW_TAG:
            raw.append(whole[at - size : at])
        else:
            rest.append(whole[began:at])
        if len(raw) + len(rest) > MAX_PARTS:
            raise InvalidInput(f"a request of more than {MAX_PARTS} parts", hint="64 of each kind")
    return b"".join(rest), raw


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return a varint, and the offset of its end.
    Raises IndexError: it is cut or longer than ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise IndexError


def _charged(size: int) -> int:
    """Return the bytes to count toward a share: 0 if a message is small, as calls are limited."""
    return size if size > SMALL_BYTES else 0


def _to_bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def decode_request(request: Any, raw: Sequence[Any] = ()) -> InferRequest:
    """Decode a ModelInferRequest with raw or typed tensors; ``split_raw`` gives ``raw``.

    Raises:
        InvalidInput: a tensor contradicts its shape or dtype.
    """
    oip.check_count(len(request.inputs))
    oip.check_count(len(request.raw_input_contents), "raw contents")
    oip.check_count(len(request.outputs), "outputs")
    parameters = _plain(request.parameters)
    places = [oip.place_of(one.name, _plain(one.parameters)) for one in request.inputs]
    raw = raw or list(request.raw_input_contents)
    if raw and len(raw) != places.count(None):
        raise InvalidInput(f"{places.count(None)} inputs, and raw contents for {len(raw)}")
    raws = iter(raw)
    tensors: list[WireTensor] = []
    frames: list[Any] = []
    for number, (tensor, place) in enumerate(zip(request.inputs, places, strict=True)):
        dtype = oip.dtype_of(tensor.name, tensor.datatype)
        shape = tuple(tensor.shape)
        size = oip.check_shape(tensor.name, dtype, shape)
        if place is not None or raw:
            frames.append(next(raws) if place is None else place)
            oip.check_bytes(tensor.name, dtype, shape, frames[-1], size)
        else:
            frames.append(_typed(tensor.name, dtype, shape, tensor.contents))
        tensors.append(WireTensor(name=tensor.name, dtype=dtype, shape=shape, frame=number))
    outputs = tuple(
        RequestedOutput(name=one.name, parameters=_plain(one.parameters)) for one in request.outputs
    )
    oip.check_outputs(outputs)
    return InferRequest(
        id=request.id,
        inputs=tuple(tensors),
        frames=frames,
        outputs=outputs or None,
        **oip.schedule(parameters),
    )


def _typed(name: str, dtype: str, shape: Sequence[int], contents: Any) -> memoryview:
    if dtype not in _CONTENTS:
        raise InvalidInput(
            f'input "{name}" is {oip.DATATYPE_OF[dtype]}, which has no typed contents',
            hint="send raw_input_contents",
        )
    if math.prod(shape) > oip.MAX_NUMBERS:
        raise TooLarge(
            f'input "{name}" has more than {oip.MAX_NUMBERS} numbers',
            hint="send raw_input_contents",
        )
    return oip.from_numbers(name, dtype, shape, list(getattr(contents, _CONTENTS[dtype])))


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters by name, without those that have no value."""
    oip.check_parameters(parameters)
    return {
        name: getattr(value, choice)
        for name, value in parameters.items()
        if (choice := value.WhichOneof("choice")) is not None
    }


def encode_answer(
    model: str,
    infer_request: InferRequest,
    outputs: Sequence[Output],
    timing: Mapping[str, Any],
    *,
    is_offloaded: bool = False,
) -> list[Any]:
    """Return the buffers of a serialized ModelInferResponse, or ModelStreamInferResponse.
    Raw tensors stay where they are, because protobuf would copy each twice.

    Raises:
        InvalidInput: a requested output does not exist.
    """
    version = str(timing.get("version", oip.FIRST_VERSION))
    answer = INFERENCE["ModelInferResponse"](
        model_name=model, model_version=version, id=infer_request.id
    )
    _set(answer.parameters, timing)
    raw: list[Any] = []
    for output, _ in oip.requested_outputs(infer_request, outputs):
        row = answer.outputs.add(
            name=output.name, datatype=oip.DATATYPE_OF[output.dtype], shape=output.shape
        )
        if output.place is not None:
            _set(row.parameters, output.place.parameters())
        raw += [_head(_OUTPUT_TAG, len(output.data)), output.data]  # one content for each output
    parts = [_to_bytes(answer), *raw]
    return [_head(_STREAMED_TAG, sum(map(len, parts))), *parts] if is_offloaded else parts


def _head(tag: int, size: int) -> bytes:
    """Return a field's tag and length, as protobuf writes them before its bytes."""
    head = bytearray([tag])
    while size >= 128:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head)


def joined(parts: Sequence[Any]) -> bytes:
    """Join the parts without the GIL, so that other threads are not delayed."""
    whole = bytes(sum(map(len, parts)))  # filled before other code can see it
    at = np.frombuffer(whole, np.uint8).ctypes.data
    for part in parts:
        if size := len(part):
            ctypes.memmove(at, np.frombuffer(part, np.uint8).ctypes.data, size)
            at += size
    return whole


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        parameter = parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int():
                parameter.int64_param = value
            case float():
                parameter.double_param = value
            case _:
                parameter.string_param = str(value)
