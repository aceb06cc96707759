"""The frontend with a fake scheduler; conftest.py loads this module as ``frontend_rig``."""

from __future__ import annotations

import asyncio
import mmap
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pipeswitch as ps
from pipeswitch.base.config import Config, ServerConfig
from pipeswitch.base.roles import Role
from pipeswitch.frontend.frontend import Frontend, Posted
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import ModelName, SlabTensor
from pipeswitch.ipc.messages.gateway import KeyedSettings
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import Manifest, ValueSpec
from pipeswitch.scheduler.state import events as ev
from pipeswitch.wire.request_timing import RequestTiming
from tests.unit.manifests import plain_manifest

POOL_BYTES = 8 << 20
DEADLINE_S = 30.0


def manifest(width: int = 4, batch_max: int = 8) -> Manifest:
    """Return the manifest of a model that takes ``x`` and returns ``y`` of the same shape."""
    value = {"dtype": "float32", "shape": ("batch", width)}
    return plain_manifest(
        digest="d" * 64,
        inputs=(ValueSpec(name="x", **value),),
        outputs=(ValueSpec(name="y", **value),),
        dims=(Dim("batch", 1, batch_max),),
    )


class FakeScheduler:
    """Fake scheduler, which gets events and sends replies, in a loop like the server's.

    It has one model, ``double``, and computes it in the request pool, like a worker.
    """

    def __init__(self, directory: Path, **server: Any) -> None:
        self.pool_descriptor = sealed_memfd("pool", POOL_BYTES)
        self.seen: list[ev.Event] = []
        self.held: list[ev.InferArrived] = []
        self.is_holding = False
        self._inbox: deque[ev.Event] = deque()
        self._is_closing, self._may_end = False, threading.Event()
        self.config = Config(
            server=ServerConfig(
                **{
                    "listen": "tcp://127.0.0.1:0",
                    "name": "t",
                    "state_dir": str(directory / "state"),
                    "runtime_dir": str(directory / "run"),
                    "keys_dir": str(directory / "keys"),
                    "tcp_roles": tuple(Role),  # test_roles.py tests missing roles
                    **server,
                }
            )
        )
        self.tcp = Frontend(
            self.config, self.pool_descriptor, self._inbox.append, facts={"device": "cpu"}
        )
        self.listeners = self.tcp.open()
        self.pool = np.frombuffer(self._mapped(), dtype=np.uint8)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.door: Any = None
        keyed = self.listeners.keyed(self.config.server)
        if keyed is not None:
            self._open_door(keyed)

    def _open_door(self, settings: KeyedSettings) -> None:
        """Start the gateway's listener on its own event loop."""
        is_open = threading.Event()

        async def serve() -> None:
            from pipeswitch.extras.curve.curve_listener import CurveListener

            self._door_loop, self._door_ends = asyncio.get_running_loop(), asyncio.Event()
            descriptor = os.dup(self.listeners.tcp.sock.fileno())
            self.door = CurveListener(descriptor, settings, self.listeners.ipc.address)
            is_open.set()
            await self._door_ends.wait()
            self.door.close()

        self._door_thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._door_thread.start()
        assert is_open.wait(DEADLINE_S)

    def _mapped(self) -> Any:
        return mmap.mmap(self.pool_descriptor, 0)

    def announce(self, name: str, **options: Any) -> None:
        model = ModelName(name)
        self.post(ev.ModelAvailable(model=model, manifest=manifest(**options), priority=1))

    def post(self, command: Posted) -> None:
        """Perform a command of the test's thread on the loop; return when it was performed."""
        if threading.current_thread() is self._thread:
            self.tcp.perform(command)
            return
        done = threading.Event()

        def perform() -> None:
            self.tcp.perform(command)
            done.set()

        self.tcp.call_soon(perform)
        was_done = done.wait(DEADLINE_S)  # not inside the assert, which -O removes
        assert was_done

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self.tcp.watch(selector)
            while not self._is_closing:
                for key, _ in selector.select(self.tcp.wait_s()):
                    key.data()
                self.tcp.step()
                while self._inbox:
                    event = self._inbox.popleft()
                    self.seen.append(event)
                    self.answer(event)
            self.tcp.unwatch(selector)
        self._may_end.wait(DEADLINE_S)  # so that the wakeup socket is not closed during a write
        self.tcp.close()

    def answer(self, event: ev.Event) -> None:
        post = self.tcp.perform
        match event:
            case ev.InferArrived():
                self.held.append(event) if self.is_holding else self.finish(event)
            case ev.CancelRequest(token=token):
                for request in [request for request in self.held if request.token == token]:
                    self.held.remove(request)
                    post(ev.Reply(token=token, error=ps.Cancelled("cancelled")))
            case ev.RegisterModelRequest(token=token, model=model):
                post(ev.Reply(token=token, body={"stage": "export", "fraction": 0.5}, more=True))
                self.announce(model)
                post(ev.Reply(token=token, body={"model": model}))
            case ev.TrainRequest(token=token, spec=spec):
                post(ev.Reply(token=token, body={"job": {"name": spec.name, "state": "queued"}}))
            case ev.JobRequest(token=token, job=job):
                post(ev.Reply(token=token, body={"job": {"name": job, "state": "done"}}))
            case ev.Query(what="stats", token=token):
                post(ev.Reply(token=token, body={"queued": 0}))
            case ev.Query(what="trace", token=token):
                events = [{"name": "x" * 100, "ts": n} for n in range(20_000)]
                post(ev.Reply(token=token, body={"trace": {"traceEvents": events}}))
            case ev.Query(what=what, token=token):
                body: dict[str, Any] = {"models": [], "rows": [], "jobs": [], "model": {}}
                post(ev.Reply(token=token, body={**body, what: []}))
            case (
                ev.PinRequest(token=token)
                | ev.UnregisterRequest(token=token)
                | ev.RegroupRequest(token=token)
            ):
                post(ev.Reply(token=token, body={}))
            case ev.PublishRequest(token=token) | ev.RollbackRequest(token=token):
                post(ev.Reply(token=token, body={}))
            case ev.DrainRequest(token=token) if token is not None:
                post(ev.Reply(token=token, body={}))

    def finish(self, event: ev.InferArrived) -> None:
        """Read x from the request's slab, write y = 2 x to the reply's slab, and reply."""
        (x,) = event.run.inputs
        at, size = x.offset_bytes, x.size_bytes
        y = event.run.reply_offset_bytes
        values = self.pool[at : at + size].view(np.float32) * 2
        self.pool[y : y + size] = values.view(np.uint8)
        output = SlabTensor(
            name="y", dtype="float32", shape=x.shape, offset_bytes=y, size_bytes=size
        )
        timing = RequestTiming(queue_ms=0.5, switch_ms=1.5, resident=True, worker=0)
        self.post(ev.Reply(token=event.token, outputs=(output,), timing=timing))

    def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        return until(lambda: [e for e in self.seen if isinstance(e, kind)], at_least=count)

    def close(self) -> None:
        def end() -> None:
            self._is_closing = True

        self.tcp.call_soon(end)
        self._may_end.set()
        self._thread.join(DEADLINE_S)
        if self.door is not None:
            self._door_loop.call_soon_threadsafe(self._door_ends.set)
            self._door_thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        os.close(self.pool_descriptor)


def until(look: Callable[[], Any], at_least: int = 1) -> Any:
    """Wait until ``look`` returns ``at_least`` items, or a true value; return its last result."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while True:
        value = look()
        if (len(value) if hasattr(value, "__len__") else int(bool(value))) >= at_least:
            return value
        assert time.monotonic() < give_up_at_s, f"still {value!r}"
        threading.Event().wait(0.005)


def assert_balanced(tcp: Frontend) -> None:
    counters = tcp.requests.counts
    assert counters.accepted == counters.ok + counters.error + counters.undeliverable
    assert tcp.pool.is_empty
