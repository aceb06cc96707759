"""Simulated memory daemon: threads for control, copies to the device, host store, slices, disk."""

from __future__ import annotations

from collections import deque
from functools import partial

from ...ipc.messages import daemon as daemon_msg
from ...ipc.messages.base import JobName, Message, OpId, Ping, Pong, SliceRead, StepCommitted
from .clock import Move
from .device import ZEROS, ByteSpan, User, Violation, region_of, require
from .process import SimulatedProcess


class SimulatedTransmission:
    """Copy in progress, with the groups that are done."""

    def __init__(self, order: daemon_msg.TransmitModel, now_ms: float) -> None:
        self.order = order
        self.is_cancelled = False
        self.asked_at_ms = now_ms
        self.ends_at_ms: list[float] = []

    @property
    def done(self) -> int:
        return len(self.ends_at_ms)


class SimulatedDaemon(SimulatedProcess):
    """Simulated daemon: on orders it copies groups, stores models, zeroes and commits slices."""

    is_ready = False

    def __init__(self, *of_process: object) -> None:
        super().__init__("daemon", *of_process)  # type: ignore[arg-type]
        self.copies: deque[SimulatedTransmission] = deque()
        self.parts_done = 0  # of the current commit (half, rest, flip) or copy in (half, rest)
        self.cancelled: frozenset[OpId] = frozenset()  # copies in that end early
        self._queues: dict[str, deque[Message]] = {}
        self._areas: dict[JobName, tuple[OpId, int]] = {}  # operation id and number of last commit

    def users(self) -> list[User]:
        """Return every range of the device that the daemon writes."""
        return [(f"the copy of {c.order.model}", region_of(c.order)) for c in self.copies]

    def readers(self) -> list[User]:
        """Return every slice that the daemon still has to copy or zero."""
        orders = [*self.inbox.get("control", ()), *self._queues.get("to-host", ())]
        return [
            (f"a {type(order).__name__} not done", slice_of(order))
            for order in orders
            if isinstance(order, OF_SLICES)
        ]

    @property
    def stores(self) -> list[ByteSpan]:
        """Ranges of the host store that the daemon still has to write."""
        orders = [*self.inbox.get("control", ()), *self._queues.get("store", ())]
        return [
            ByteSpan(order.store_offset_bytes, order.store_offset_bytes + order.size_bytes)
            for order in orders
            if isinstance(order, daemon_msg.StoreModel)
        ]

    @property
    def areas(self) -> set[JobName]:
        """Jobs whose commit areas are open."""
        return set(self._areas)

    def steps(self) -> list[Move]:
        costs = self.scene.costs
        if not self.is_ready:
            return [Move("control", "starts", costs.start_ms, self._becomes_ready)]
        moves = self._reads("control", self._control)
        if self.copies:
            moves += self._next_copy(self.copies[0])
        for thread, queue in self._queues.items():
            if queue:
                order, act = queue[0], partial(self._work, queue)
                what = "ends" if self._is_cancelled(order) else type(order).__name__
                moves.append(Move(thread, what, self._work_ms(order), act))
        return moves

    def _becomes_ready(self) -> None:
        self.is_ready = True
        self.say("out", daemon_msg.DaemonReady(pid=1))

    # -- control thread ------------------------------------------------------------------------

    def hear(self, channel: str, message: Message) -> None:
        """Queue a message. A transmission goes to the copy thread and claims its region at once."""
        if not isinstance(message, daemon_msg.TransmitModel):
            super().hear(channel, message)
            return
        fences = {group.fence for group in message.groups}
        for copy in self.copies:
            fences_in_use = fences & {group.fence for group in copy.order.groups}
            require(not fences_in_use, "two copies under way raise one word")
        if self.runs:
            self.copies.append(SimulatedTransmission(message, self.scene.clock.now_ms))

    def _control(self, message: Message) -> None:
        match message:
            case daemon_msg.CancelTransmit(op_id=op_id):
                for copy in self.copies:
                    copy.is_cancelled |= copy.order.op_id == op_id
            case daemon_msg.CancelSlice(op_id=op_id):
                orders = self._queues.get("to-host", ())
                self.cancelled |= {
                    one.op_id for one in orders if isinstance(one, daemon_msg.CopySliceIn)
                } & {op_id}
            case Ping(op_id=op_id):
                self.say("out", Pong(op_id=op_id))
            case daemon_msg.OpenCommits(job=job):
                self._areas.setdefault(job, (OpId(0), 0))
            case daemon_msg.CloseCommits(job=job):
                self._areas.pop(job, None)
            case daemon_msg.StoreModel():
                self._queues.setdefault("store", deque()).append(message)
            case daemon_msg.Scrub() | daemon_msg.CopySliceOut() | daemon_msg.CopySliceIn():
                self._queues.setdefault("to-host", deque()).append(message)
            case daemon_msg.CommitCopy():
                if self.accepts(message):
                    self._areas[message.job] = (message.op_id, message.number)
                    self._queues.setdefault("to-host", deque()).append(message)
            case daemon_msg.PersistCommit(job=job):
                require(job in self._areas, f"nothing of {job} to persist")
                self._queues.setdefault("disk", deque()).append(message)
            case _:
                raise Violation(f"a memory daemon takes no {message}")

    def accepts(self, order: daemon_msg.CommitCopy) -> bool:
        """Return True if a commit is new; otherwise raise Violation."""
        require(order.job in self._areas, f"a commit of {order.job} without an area")
        is_new = (order.op_id, order.number) > self._areas[order.job]
        require(is_new, f"commit {order.number} is copied again")
        return True

    # -- copy thread ---------------------------------------------------------------------------

    def _next_copy(self, copy: SimulatedTransmission) -> list[Move]:
        if copy.is_cancelled or copy.done == len(copy.order.groups):
            return [Move("copy", "ends", 0.0, self._end_copy)]
        if not self.scene.device.has_room(copy.order, copy.done):
            return []
        cost_ms = self.scene.costs.to_device.copy_ms(copy.order.groups[copy.done].copied_bytes)
        return [Move("copy", "copies", cost_ms, partial(self._copy, cost_ms))]

    def _copy(self, cost_ms: float) -> None:
        copy, scene = self.copies[0], self.scene
        if scene.choices.happens("copy_error", copy.order.model):
            copy.is_cancelled = True
            return
        program = scene.programs[copy.order.model]
        scene.device.arrived(copy.order, copy.order.groups[copy.done], program)
        last_ms = copy.ends_at_ms[-1] if copy.ends_at_ms else copy.asked_at_ms
        copy.ends_at_ms.append(max(last_ms, scene.clock.now_ms - cost_ms) + cost_ms)

    def _end_copy(self) -> None:
        copy = self.copies.popleft()
        order, ends = copy.order, copy.ends_at_ms
        is_complete = len(ends) == len(order.groups)
        if is_complete:
            self.scene.device.completed(order)
        first = self.scene.costs.to_device.copy_ms(order.groups[0].copied_bytes)
        started_at_ms = ends[0] - first if ends else copy.asked_at_ms
        sent = order.groups[: len(ends)]
        self.say(
            "out",
            daemon_msg.TransmitEnded(
                model=order.model,
                op_id=order.op_id,
                is_complete=is_complete,
                group_count=len(ends),
                copied_bytes=sum(group.copied_bytes for group in sent),
                started_at_ms=started_at_ms,
                ended_at_ms=ends[-1] if ends else started_at_ms,
                group_ends_at_ms=tuple(ends),
            ),
        )

    # -- other threads -------------------------------------------------------------------------

    def _work_ms(self, message: Message) -> float:
        costs = self.scene.costs
        match message:
            case daemon_msg.StoreModel(size_bytes=size):
                return costs.to_store.copy_ms(size)
            case daemon_msg.CopySliceIn(size_bytes=size):
                is_short = bool(self.parts_done) or self._is_cancelled(message)
                return 0.0 if is_short else costs.to_device.copy_ms(size)
            case daemon_msg.Scrub(size_bytes=size) | daemon_msg.CopySliceOut(size_bytes=size):
                return costs.to_host.copy_ms(size)
            case daemon_msg.CommitCopy(ranges=ranges):
                size = sum(piece.size_bytes for piece in ranges)
                return 0.0 if self.parts_done else costs.to_host.copy_ms(size)
            case daemon_msg.PersistCommit(job=job):
                return costs.to_disk.copy_ms(self.scene.scripts[job].state_bytes)
            case _:
                raise Violation(f"no lane takes {message}")

    def _work(self, queue: deque[Message]) -> None:
        scene, message = self.scene, queue[0]
        if isinstance(message, daemon_msg.CommitCopy) and self.parts_done < 2:
            self._read_slice(message)
            return
        if isinstance(message, daemon_msg.CopySliceIn) and self._begins_copy(message):
            return
        queue.popleft()
        match message:
            case daemon_msg.CopySliceOut() | daemon_msg.CopySliceIn():
                self._end_slice(message)
            case daemon_msg.StoreModel(model=model, op_id=op_id):
                if scene.choices.happens("store_error", model):
                    self.say(
                        "out", daemon_msg.StoreFailed(model=model, op_id=op_id, reason="corrupt")
                    )
                else:
                    took_ms = self._work_ms(message)
                    self.say(
                        "out", daemon_msg.ModelStored(model=model, op_id=op_id, load_ms=took_ms)
                    )
            case daemon_msg.Scrub(op_id=op_id):
                scene.device.zero(slice_of(message))
                self.say("out", daemon_msg.Scrubbed(op_id=op_id))
            case daemon_msg.CommitCopy(job=job, op_id=op_id, number=number, step=step):
                self.parts_done = 0
                if job in scene.commits:  # else the job has ended
                    scene.commits[job].flip(step)
                self.say(
                    "out",
                    StepCommitted(
                        job=job,
                        op_id=op_id,
                        number=number,
                        step=step,
                        copy_ms=self._work_ms(message),
                    ),
                )
            case daemon_msg.PersistCommit(job=job, op_id=op_id):
                error = "disk full" if scene.choices.happens("persist_error", job) else ""
                step = scene.commits[job].step if job in scene.commits else -1
                self.say(
                    "out", daemon_msg.CommitPersisted(job=job, op_id=op_id, step=step, error=error)
                )
            case _:
                raise Violation(f"no lane takes {message}")

    def _read_slice(self, order: daemon_msg.CommitCopy) -> None:
        """Copy half of the slice, or the rest: then the script may write it again."""
        self.parts_done += 1
        if order.job in self.scene.commits:
            image = self.scene.device.slice_at(slice_of(order))
            self.scene.commits[order.job].read(order.step, image, is_rest=self.parts_done == 2)
        if self.parts_done == 2:
            self.say("out", SliceRead(job=order.job, op_id=order.op_id, number=order.number))

    # -- swaps ---------------------------------------------------------------------------------

    def _is_cancelled(self, order: Message) -> bool:
        return isinstance(order, daemon_msg.CopySliceIn) and order.op_id in self.cancelled

    def _begins_copy(self, order: daemon_msg.CopySliceIn) -> bool:
        """Copy the first half of an image. Return False if that is done, or not wanted."""
        if self.parts_done or self._is_cancelled(order):
            return False
        self.parts_done = 1
        image = self.scene.images.get(order.job, ZEROS)
        self.scene.device.write_slice(slice_of(order), ZEROS._replace(first=image.first))
        return True

    def _end_slice(self, order: daemon_msg.CopySliceOut | daemon_msg.CopySliceIn) -> None:
        scene, span, is_known = self.scene, slice_of(order), order.job in self.scene.images
        self.parts_done = 0
        error = "no memory" if scene.choices.happens("slice_error", order.job) else ""
        if self._is_cancelled(order):
            error, self.cancelled = "cancelled", self.cancelled - {order.op_id}
        elif isinstance(order, daemon_msg.CopySliceIn):
            scene.device.write_slice(span, scene.images.get(order.job, ZEROS))
        elif not error:
            if is_known:  # else its process has died
                scene.images[order.job] = scene.device.slice_at(span)
            scene.device.zero(span)
        now_ms = scene.clock.now_ms
        began_at_ms = now_ms - self._work_ms(order)
        self.say(
            "out",
            daemon_msg.SliceCopied(
                op_id=order.op_id, began_at_ms=began_at_ms, ended_at_ms=now_ms, error=error
            ),
        )


OF_SLICES = (
    daemon_msg.CommitCopy | daemon_msg.Scrub | daemon_msg.CopySliceOut | daemon_msg.CopySliceIn
)


def slice_of(
    order: daemon_msg.CommitCopy
    | daemon_msg.Scrub
    | daemon_msg.CopySliceOut
    | daemon_msg.CopySliceIn,
) -> ByteSpan:
    """Return the slice that an order copies or zeroes."""
    if isinstance(order, daemon_msg.CommitCopy):
        return ByteSpan(order.slice_offset_bytes, order.slice_offset_bytes + order.slice_bytes)
    return ByteSpan(order.offset_bytes, order.offset_bytes + order.size_bytes)
