"""The memory daemon: executes the controller's orders to copy, load, scrub and persist.

Each thread does one kind of work, and sends its own answers. The main thread (*control*) reads
orders, and refuses them or passes them on. The device's *copy thread* transmits models, *to-host*
copies commits and scrubs, *store* loads models, and *disk* persists commits.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.base.failpoints import reach
from pipeswitch.base.worker_thread import WorkerThread
from pipeswitch.devices.memory import DeviceMemory
from pipeswitch.devices.order_checks import check_range
from pipeswitch.devices.worker_device import now_ms
from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages import daemon as daemon_msg
from pipeswitch.ipc.messages.base import Exit, Message, OpId, Ping, Pong

from .commit_areas import CommitAreas
from .slice_images import SliceImages
from .store import Part, UnusableModel, load_model
from .transmit import TransmitGuard

log = logging.getLogger(__name__)


class MemoryDaemon:
    """Server of one controller's orders for the memory of one device."""

    def __init__(self, device: DeviceMemory, control: Channel, *, fence_count: int) -> None:
        self._device = device
        self._control = control
        control.point = "daemon.send"
        self._guard = TransmitGuard(
            arena_bytes=device.arena_bytes, store_bytes=device.store_bytes, fence_count=fence_count
        )
        self._commits = CommitAreas(device, self._send)
        self._images = SliceImages(device)
        self._store_thread, self._to_host_thread, self._disk_thread = self._threads = [
            WorkerThread(name) for name in ("store", "to-host", "disk")
        ]

    def run(self) -> bool:
        """Announce readiness and serve orders. Return True after Exit, with all work finished.

        Return False at end of file and after an unreadable order, to which no answer is possible.
        The controller then starts another daemon.
        """
        reach("daemon.start")
        ready = daemon_msg.DaemonReady(pid=os.getpid(), handle=self._device.export_handle())
        self._send(ready, self._device.export_descriptors())
        while True:
            try:
                packet = self._control.receive()
            except RemoteProtocolError as error:
                log.error("order=unreadable cause=%s, exiting", error.message)
                return False
            if packet is None:
                log.error("controller=gone, exiting")
                return False
            message, descriptors = packet
            if isinstance(message, Exit):
                self._finish()
                return True
            try:
                self._handle(message, descriptors)
            except RemoteProtocolError as error:
                self._refuse(getattr(message, "op_id", OpId(0)), error.message)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)  # a mapping does not need its descriptor

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        """Start the work for an order, or raise RemoteProtocolError to refuse it."""
        reach("daemon.message")
        match message:
            case daemon_msg.TransmitModel():
                for descriptor in descriptors:
                    self._device.open_tenant(message.tenant, descriptor)
                self._transmit(message)
            case daemon_msg.CancelTransmit(op_id=op_id):
                self._device.cancel(op_id)
            case daemon_msg.StoreModel():
                self._put(self._store_thread, message.op_id, lambda: self._store(message))
            case daemon_msg.Scrub():
                limit_bytes = self._device.arena_bytes
                check_range("scrub", message.offset_bytes, message.size_bytes, limit_bytes)
                self._put(self._to_host_thread, message.op_id, lambda: self._scrub(message))
            case daemon_msg.OpenCommits():
                if len(descriptors) != 1:
                    raise RemoteProtocolError(f"OpenCommits came with {len(descriptors)} memfds")
                self._commits.open(message, descriptors[0])
            case daemon_msg.CloseCommits(job=job):
                self._commits.close(job)
            case daemon_msg.CopySliceOut() | daemon_msg.CopySliceIn():
                copy = self._images.accept(message, descriptors)
                work = functools.partial(self._images.copy, copy)
                self._put(self._to_host_thread, message.op_id, work)
            case daemon_msg.CancelSlice(op_id=op_id):
                self._images.cancel(op_id)
            case daemon_msg.CommitCopy():
                self._commit(message)
            case Ping(op_id=op_id):
                self._send(Pong(op_id=op_id))
            case daemon_msg.PersistCommit():
                area = self._commits.area_for(message)
                persist = functools.partial(self._commits.persist, message, area)
                self._put(self._disk_thread, message.op_id, persist)
            case _:
                raise RemoteProtocolError(f"a memory daemon takes no {type(message).__name__}")

    def _commit(self, order: daemon_msg.CommitCopy) -> None:
        if self._commits.was_accepted(order):
            # Do not refuse it: a DaemonFault would end the copy that runs under this operation id.
            log.warning("job=%s epoch=%d number=%d repeated", order.job, order.op_id, order.number)
            return
        area = self._commits.area_for(order)
        self._put(self._to_host_thread, order.op_id, lambda: self._commits.copy(order, area))

    def _put(self, thread: WorkerThread, op_id: OpId, work: Callable[[], Message]) -> None:
        thread.put(lambda: self._send(work()), lambda error: self._refuse(op_id, error.message))

    def _transmit(self, order: daemon_msg.TransmitModel) -> None:
        self._guard.accept(order)
        try:
            self._device.transmit(order, self._on_transmit_end)
        except RemoteProtocolError:
            self._guard.end(order.op_id)
            raise

    def _on_transmit_end(self, ended: daemon_msg.TransmitEnded) -> None:
        self._guard.end(ended.op_id)  # before the report, after which the range may be used again
        self._send(ended)

    def _store(self, order: daemon_msg.StoreModel) -> Message:
        began_at_ms = now_ms()
        try:
            reader = self._guard.live_reads(order.store_offset_bytes, order.size_bytes)
            if reader is not None and not order.fills:
                raise UnusableModel(f"operation {reader} is being transmitted from that place")
            image = self._device.store_view(order.store_offset_bytes, order.size_bytes)
            own = range(order.store_offset_bytes, order.store_offset_bytes + order.size_bytes)
            parts = [
                Part(at, self._device.store_view(source, size), source not in own)
                for source, at, size in order.image
            ]
            reach("daemon.store.read")
            load_model(Path(order.directory), image, parts, fills=order.fills)
            reach("daemon.store.done")
        except (UnusableModel, RemoteProtocolError, OSError) as error:
            log.warning("model=%s store=failed cause=%s", order.model, error)
            return daemon_msg.StoreFailed(model=order.model, op_id=order.op_id, reason=str(error))
        load_ms = now_ms() - began_at_ms
        log.info("model=%s store=loaded ms=%.1f", order.model, load_ms)
        return daemon_msg.ModelStored(model=order.model, op_id=order.op_id, load_ms=load_ms)

    def _scrub(self, order: daemon_msg.Scrub) -> Message:
        reach("daemon.scrub")
        self._device.scrub(order.offset_bytes, order.size_bytes)
        return daemon_msg.Scrubbed(op_id=order.op_id)

    def _refuse(self, op_id: OpId, reason: str) -> None:
        log.warning("epoch=%d refused cause=%s", op_id, reason)
        self._send(daemon_msg.DaemonFault(op_id=op_id, reason=reason))

    def _send(self, message: Message, descriptors: list[int] | None = None) -> None:
        try:
            self._control.send(message, descriptors or ())
        except BrokenPipeError:
            # The control thread will read the end of file and exit.
            log.debug("unsent=%s", type(message).__name__)

    def _finish(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        self._device.close()
