"""An open loop: requests at their instants, whatever is answered; a process of its own (``bench
overload``). An order of JSON on standard input, a line of JSON with what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from pipeswitch.base.errors import DeadlineExceeded, PipeSwitchError, QueueFull
from pipeswitch.client.aio import AsyncClient

from .gateway import ask, infer_message, post
from .trials import now_ms

SETTLE_S: Final = 0.3  # connections are there before the first request
OWN: Final = {QueueFull: 429, DeadlineExceeded: 504}
GRPC: Final = {"RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504}
CONNECTIONS: Final = 32  # of HTTP, made before; more come where all wait for an answer
Ask = Callable[[float], Awaitable[tuple[int, bool]]]  # a deadline; HTTP's status, Retry-After


def binary_request(model: str, x: Any, timeout_us: int) -> bytes:
    """Tensors behind the JSON, and so in the answer."""
    tensor = {"name": "x", "datatype": "FP32", "shape": x.shape,
              "parameters": {"binary_data_size": x.nbytes}}  # fmt: skip
    parameters = {"binary_data_output": True, "timeout": timeout_us}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    lines = f"Inference-Header-Content-Length: {len(head)}\r\n"
    return post(f"/v2/models/{model}/infer", head + x.tobytes(), lines)


async def doors(
    name: str, address: str, model: str, x: Any, stack: contextlib.AsyncExitStack
) -> Ask:
    """How a request comes in by that door."""
    if name == "http":
        host, port = address.split(":")
        free = [await asyncio.open_connection(host, port) for _ in range(CONNECTIONS)]

        async def by_http(deadline_ms: float) -> tuple[int, bool]:
            reader, writer = free.pop() if free else await asyncio.open_connection(host, port)
            request = binary_request(model, x, round(deadline_ms * 1e3))
            status, head = await ask(reader, writer, request)
            free.append((reader, writer))
            return status, b"retry-after:" in head

        return by_http
    if name == "grpc":
        import grpc

        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def by_grpc(deadline_ms: float) -> tuple[int, bool]:
            try:
                await infer(
                    infer_message(model, x, timeout_us=round(deadline_ms * 1e3)), timeout=60
                )
            except grpc.aio.AioRpcError as error:
                return GRPC.get(error.code().name, 500), False
            return 200, False

        return by_grpc
    client = await stack.enter_async_context(AsyncClient(address))

    async def by_own(deadline_ms: float) -> tuple[int, bool]:
        try:
            await client.infer(model, x, deadline_ms=deadline_ms)
        except PipeSwitchError as error:
            return OWN.get(type(error), 500), False
        return 200, False

    return by_own


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    x = np.ones(order["shape"], np.float32)
    rows: list[tuple[float, float, float, int, bool]] = []  # planned, sent, took; status, retry

    async def one(planned_ms: float, deadline_ms: float) -> None:
        sent_ms = now_ms()
        status, may_retry = await asks(deadline_ms)
        rows.append((planned_ms, sent_ms - began_ms, now_ms() - sent_ms, status, may_retry))

    async with contextlib.AsyncExitStack() as stack:
        asks = await doors(order["door"], order["address"], order["model"], x, stack)
        await asks(60e3)
        await asyncio.sleep(SETTLE_S)
        began_ms = now_ms()
        async with asyncio.TaskGroup() as group:
            for planned_ms, deadline_ms in order["requests"]:
                await asyncio.sleep((planned_ms - (now_ms() - began_ms)) / 1e3)
                group.create_task(one(planned_ms, deadline_ms))
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
