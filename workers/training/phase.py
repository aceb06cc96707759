"""Phase of a script: its objects in a leased slice, its commit points and commits."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Protocol

import torch

from pipeswitch.base.errors import HostStoreFull, OutOfDeviceMemory
from pipeswitch.base.extras import JOBS
from pipeswitch.devices.worker_device import Pacer
from pipeswitch.ipc.gate import Gate

from . import persistent_loaders
from .commit_points import Committer, Point, state_area_bytes
from .hooks import Closure, hook_modules
from .host import JobHost
from .objects import TrainedObjects
from .reports import Reports
from .script_cursor import SavedImage, ScriptCursor
from .slice import TrainingSlice
from .slice_layout import history_bytes
from .snapshot import DataPosition
from .timing import CommitTiming, WriteWatch
from .torch_private import hook_steps

MAX_BODIES_TO_A_POINT: Final = 64
GROWS_AGAIN_MS: Final = 5000.0  # pause after an attempt to grow that found no room
GROWTH: Final = 2  # the state area grows to this multiple of the need, so that it grows rarely

AskedFor = tuple[str, int | None]  # ``offload`` and ``activation_bytes`` of ``job.steps``
NO_OFFLOAD: Final[tuple[AskedFor, ...]] = (("auto", None), ("none", None))


class SavedTensors(Protocol):
    """Activations that a loop's steps save for backward, under a budget (``extras/offload``)."""

    asked_for: AskedFor
    away_ms: float  # time for which the last step let other jobs compute
    figures: dict[str, Any]

    def keep(self, tensors: Iterable[torch.Tensor]) -> None: ...

    def body(self, batch: Any) -> AbstractContextManager[None]: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


def saved_tensors(
    before: SavedTensors | None, asked_for: AskedFor, host: JobHost, gate: Gate
) -> SavedTensors | None:
    """Return a loop's saved tensors; None: autograd keeps them, as without a server.

    ``before``, those of the last loop, are reused if they have the same settings.
    """
    if before is not None and before.asked_for == asked_for:
        return before
    if before is not None:
        before.give_back()
        before.close()
    if asked_for in NO_OFFLOAD and host.tiles is None:
        return None
    make: Any = JOBS.load("offload")
    saved: SavedTensors = make(*asked_for, host.host_copies(), gate, host.charge_host, host.tiles)
    return saved


class Phase:
    """Objects that one phase of the script trains, bound to a slice that this class leases.

    Raises:
        OutOfDeviceMemory, HostStoreFull: there is no room for the slice.
    """

    def __init__(
        self,
        host: JobHost,
        gate: Gate,
        place: ScriptCursor,
        reports: Reports,
        timing: CommitTiming,
        watch: WriteWatch,
        objects: TrainedObjects,
    ) -> None:
        self._host, self._gate, self.place, self._reports = host, gate, place, reports
        self._timing, self._watch = timing, watch
        self.number, self.objects = place.phase, objects
        self.point: Point | None = None
        self.has_stepped = False  # an optimizer has stepped since ``point``
        self.is_early = False  # bound at an epoch's beginning, before ``job.steps`` names objects
        self.loops: dict[int, DataPosition] = {}  # data of the last epoch's loops
        self._at_end: tuple[Any, ...] | None = None  # ``_now`` at the loop's end; None in a loop
        self.data: DataPosition  # position within the current loop
        self.activations: SavedTensors | None = None
        saved = place.saved
        before = 0 if saved is None else int(saved.values["state_capacity"])
        self.older_bytes = 0 if saved is None else saved.bytes_to_keep  # room for earlier images
        state_bytes = state_area_bytes(objects, before)
        layout = TrainingSlice(objects, state_bytes, place.past_bytes)
        try:
            memory = self._lease(layout)
        except (OutOfDeviceMemory, HostStoreFull):
            before = place.past_bytes
            if place.drop_past(0):
                self._warn_of_many_phases()
            elif place.past_bytes == before:
                raise
            layout = TrainingSlice(objects, state_bytes, place.past_bytes)
            memory = self._lease(layout)
        self.layout = layout
        layout.bind(memory)
        if "beginning" not in place.entry:
            self._compare_beginnings()
        room_bytes = layout.image_bytes + self.older_bytes
        self.committer = Committer(host, self.layout, place.past, room_bytes)
        self.optimizers = OptimizerSteps(self, gate)
        gate.before_unwind = self._commit_before_unwinding

    def _lease(self, layout: TrainingSlice) -> torch.Tensor:
        """Lease the memory of ``layout``; name an optimizer's large history in the error's hint."""
        try:
            return self._host.lease(layout.slice_bytes, layout.image_bytes + self.older_bytes)
        except (OutOfDeviceMemory, HostStoreFull) as error:
            if self.older_bytes and isinstance(error, HostStoreFull):
                self.older_bytes = 0
                return self._lease(layout)
            history = sum(map(history_bytes, self.objects.optimizers.values()))
            if 2 * history > layout.slice_bytes:
                error.hint = f"LBFGS may keep {history} bytes of it: lower its history_size"
            raise

    def _moves(self, point: Point) -> bool:
        """Grow the state area if possible; return True if the caller must capture the state."""
        if self._host.now_ms() < self._timing.grows_at_ms or self._gate.is_evicting:
            return False
        try:
            self._grow(self.committer.outgrown_bytes(point))
        except (OutOfDeviceMemory, HostStoreFull) as error:
            self._timing.grows_at_ms = self._host.now_ms() + GROWS_AGAIN_MS
            self._commit_failed(error)
        return True

    def _grow(self, state_bytes: int) -> None:
        """Move into a larger slice: extra_state or an optimizer has outgrown the current one.

        Call this only between two bodies. The caller captures the state again.

        Raises:
            OutOfDeviceMemory, HostStoreFull: there is no room; the slice has its old size.
        """
        old, problem = self.layout, None
        self.finish_commit()
        committed, older = self.committer.committed, self.committer.older
        self._gate.leave()
        old.unbind()
        now_bytes, past_bytes = old.state.capacity_bytes, old.past.capacity_bytes
        layout = TrainingSlice(self.objects, max(GROWTH * state_bytes, now_bytes), past_bytes)
        try:
            memory = self._lease(layout)
        except (OutOfDeviceMemory, HostStoreFull) as error:
            problem, sizes = error, (now_bytes, past_bytes, old.optimizer.capacity_bytes)
            layout = TrainingSlice(self.objects, *sizes)
            memory = self._lease(layout)
        self.layout = layout
        layout.bind(memory)
        room_bytes = layout.image_bytes + self.older_bytes
        self.committer = Committer(self._host, self.layout, self.place.past, room_bytes)
        self.committer.committed, self.committer.older = committed, older
        self.keep_parameters()
        if problem is not None:
            raise problem

    def keep_parameters(self) -> None:
        """Exclude parameters and buffers from the activations."""
        if self.activations is not None:
            objects = self.objects
            self.activations.keep((*objects.parameters.values(), *objects.buffers.values()))

    def leave(self) -> None:
        """Unbind the objects from the slice, and keep the phase's last state for later images."""
        self.finish_commit()
        if self.place.saved is None:
            if self.committer.committed is None:
                self.end(force=True)
            image = self._host.restore()
            assert image is not None  # the end of a phase was committed
            if not self.place.keep_past(self.number, image):
                self._warn_of_many_phases()
        self.optimizers.remove()
        self.layout.unbind()

    def _compare_beginnings(self) -> None:
        """Warn if the models begin with other values than in the job's first run."""
        now = int(self.layout.sum_of_parameters())
        saved = self.place.saved
        first = now if saved is None else saved.values["beginning"]
        self.place.entry["beginning"] = first
        if first != now:
            self._reports.warn_once(
                "beginning",
                "the models began with other values than when this job started. If the script "
                "loads a checkpoint of its own, it must not skip epochs or loops by it as well: "
                "job resumes where it stopped",
            )

    def _warn_of_many_phases(self) -> None:
        self._reports.warn_once(
            "phases",
            "the final states of the first loops are no longer kept: after a resume, code behind "
            "them runs with the weights of a later loop. Write results to a file within the loop, "
            "or train each model in its own job",
        )

    def capture(self, **more: Any) -> None:
        """Capture the current state as the new ``point``; ``more`` are values for its commit."""
        self.finish_commit(only_read=True)
        entry = {
            **self.place.entry,
            **more,
            **{name: part.capture() for name, part in self.place.parts.items()},
            "bodies": (self._watch.was_watched, self._watch.writes_unseen),
            "has_updated": self.place.has_updated,
        }
        data, workers = self.data.capture(), persistent_loaders.capture()
        if workers:
            data = replace(data, workers=workers)
        now = self.place.position, data, entry, self.point
        try:
            self.point = self.committer.capture(*now)
            outgrown_bytes = self.committer.outgrown_bytes(self.point)
        except OutOfDeviceMemory:  # an optimizer keeps more state than the dry run predicted
            self._grow(0)
            outgrown_bytes = 0
            self.point = self.committer.capture(*now)
        if outgrown_bytes and self._moves(self.point):
            self.point = self.committer.capture(*now)
        self.has_stepped, self._at_end = False, None
        self._watch.at_point(self._sum_now, is_due=self._timing.is_due)

    def _sum_now(self) -> torch.Tensor:
        assert self.point is not None
        return self.committer.checksum(self.point)

    def end_loop(self) -> None:
        """Watch for changes that the code behind the loop makes: the point must not have them."""
        self.finish_commit()  # it reads the slice, which that code may write
        self.committer.end_loop(self.point)
        self._at_end = None if self.point is None else self._now()

    def _now(self) -> tuple[Any, ...]:
        return self._sum_now(), self.committer.state_marks()

    def _is_intact(self, point: Point) -> bool:
        is_intact = self.committer.is_intact(point)
        return is_intact and (self._at_end is None or self._at_end == self._now())

    def restore(self, saved: SavedImage) -> None:
        """Put the state of ``saved`` back into the objects."""
        try:
            self.committer.restore(saved)
        except OutOfDeviceMemory:  # an optimizer keeps more state than the dry run predicted
            self._grow(0)
            self.committer.restore(saved)

    def is_at_point(self, *, is_counted: bool) -> bool:
        """Return True if this boundary is a commit point.

        Args:
            is_counted: True if a trainer or accelerate counts bodies: it can restart only at an
                update. If False, each boundary before the first update is a point.
        """
        assert self.point is not None
        bodies = self.place.step - self.point.position.step
        is_free = not (is_counted or self.place.has_updated)
        return self.has_stepped or is_free or bodies >= MAX_BODIES_TO_A_POINT

    def is_whole(self) -> bool:
        """Return True if the last point still equals the current state."""
        return (
            self.point is not None
            and self.point.position == self.place.position
            and not self.has_stepped
            and self._is_intact(self.point)
        )

    def watch_writes(self) -> None:
        """Check whether the body wrote parameters before any optimizer step."""
        if self.point is not None:
            is_intact = self.committer.parameters_are_intact(self.point)
            if not self._watch.before_optimizer(is_intact, self._sum_now):
                self._timing.hurry()

    def end(self, *, force: bool = False, is_needed: bool = True) -> None:
        """Commit the last point before the script continues after the loop.

        If code after the last loop has written parameters, the point is lost: the last commit stays
        valid, and a resume recomputes from there. With ``force``, commit the current state instead.
        If ``is_needed``, commit the point even without the earlier images that it needs.
        """
        if self.activations is not None:
            self.activations.give_back()
        if self.point is None or not self.place.may_commit:
            return
        if force and not self.is_whole():
            self.place.end_loop()
            self.capture()
        self.commit_point(is_needed=is_needed)

    @property
    def committed_step(self) -> int | None:
        """Step of the last commit; None if there is no commit."""
        committed = self.committer.committed
        return None if committed is None else committed.position.step

    def commit_point(self, *, is_needed: bool = False) -> None:
        """Commit the last point unless it is committed or lost; wait until it is committed."""
        self.finish_commit()
        point = self.point
        if self._watch.may_commit and point is not None and self.committer.committed is not point:
            if not self.has_stepped:
                self.begin_commit(is_needed=is_needed)
            self.finish_commit()

    def begin_commit(self, *, may_grow: bool = True, is_needed: bool = False) -> None:
        """Start the commit of the last point, if it is still intact and, unless ``is_needed``, a
        resume from it would find the earlier images."""
        assert self.point is not None
        self.finish_commit()
        if (is_needed or self.committer.has_needed(self.point)) and self._is_intact(self.point):
            try:
                self.committer.begin(self.point)
                if self._at_end is not None:  # ``begin`` may have moved states into the slice
                    self._at_end = self._at_end[0], self.committer.state_marks()
            except OutOfDeviceMemory as error:
                if may_grow and not self._watch.is_in_body and self._moves(self.point):
                    self.capture()
                    self.begin_commit(may_grow=False, is_needed=is_needed)
                else:
                    self._commit_failed(error)

    def finish_commit(self, *, only_read: bool = False) -> bool:
        """Wait for the commit under way, or until it has read the slice. Report one that is over;
        return True if none is under way any more."""
        if self.committer.is_in_flight:
            try:
                if not self.committer.finish(only_read=only_read):
                    return False
            except Exception as error:
                self._commit_failed(error)
                return True
            took_ms = self.committer.last_duration_ms
            self._timing.committed(took_ms)
            self._host.report("committed", step=self.committed_step, duration_ms=took_ms)
        return True

    def _commit_failed(self, error: Exception) -> None:
        """Report a failed commit: the previous one stays valid, and training continues."""
        step = self.place.step
        self._timing.failed()
        self._host.report("commit_failed", step=step, text=str(error))
        text = f"the state after step {step} was not kept: {error}. Training continues; a "
        text += "resumed script starts from the last saved step"
        self._reports.warn_once("commit", text, UserWarning)

    def _commit_before_unwinding(self) -> None:
        """Commit the last point; the gate calls this before it unwinds the main thread."""
        if not self.place.may_commit:
            return
        step = self.place.step
        try:
            self.commit_point()
        except Exception as error:  # the last commit stays valid; unwinding must continue
            self._host.report("commit_failed", step=step, text=str(error))
        self._host.report("evicting", step=step, committed_step=self.committed_step)

    def goes_to_point(self, *, is_in_loop: bool) -> bool:
        """Return True if finished steps would be lost by an eviction now, but not after a wait: for
        the next point, or for the next epoch if this one's beginning was not committed."""
        point = self.point
        if point is None or not self.place.may_commit:
            return False
        kept_step, has_needed = self.committed_step or 0, self.committer.has_needed(point)
        if not is_in_loop and (has_needed or not self.place.in_epochs):
            return False
        may_commit = self._watch.may_commit and not self.has_stepped and has_needed
        if may_commit and self.committer.is_intact(point):
            kept_step = point.position.step
        return self.place.step > kept_step and self._timing.waits_for_step()


class OptimizerSteps:
    """Calls of ``optimizer.step()`` in one phase, and all hooks on its models and optimizers."""

    def __init__(self, phase: Phase, gate: Gate) -> None:
        self._phase, self._gate = phase, gate
        self._depth = 0  # nesting depth, as an optimizer may call another optimizer's step
        self._hooks = hook_modules(phase.objects.models.values())
        for optimizer in phase.objects.optimizers.values():
            hook_steps(optimizer)
            # Closures, not methods: a deep copy of the optimizer must not copy this object.
            self._hooks.append(optimizer.register_step_pre_hook(lambda *a: self._before_step(*a)))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after()))

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Reset the nesting depth at a boundary, as an optimizer may have raised in its step."""
        self._depth, self._gate.in_optimizer_step = 0, False

    def _before_step(self, _: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):  # an optimizer's own step may take anything
            return self._before()
        wrapped = self._before_closure(closure)
        if "closure" in keywords:
            return args, {**keywords, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), keywords

    def _before(self) -> None:
        """Check the gate one last time; wait until no commit reads the parameters."""
        if self._depth == 0:
            if Pacer.current is not None:
                Pacer.current.mark()
            self._gate.check("backward")
            if not self._phase.has_stepped:
                self._phase.watch_writes()
            self._phase.finish_commit(only_read=True)
            self._gate.in_optimizer_step = True
        self._depth += 1

    def _before_closure(self, closure: Closure) -> Closure:
        """Wrap ``closure``. While parameters are unchanged, its first run may be preempted like a
        body, because Lightning runs forward and backward in it."""
        self._gate.check("boundary")
        self._phase.finish_commit(only_read=True)
        self._gate.in_optimizer_step = True
        self._depth += 1
        is_first = self._depth == 1

        def compute(*args: Any, **keywords: Any) -> Any:
            nonlocal is_first
            point = self._phase.point
            assert point is not None
            may_stop = is_first and self._phase.committer.parameters_are_intact(point)
            is_first = False
            if not may_stop:
                return closure(*args, **keywords)
            self._gate.in_optimizer_step = False
            value = closure(*args, **keywords)
            self._depth = 0
            self._before()
            return value

        return compute

    def _after(self) -> None:
        self._phase.has_stepped = self._phase.place.has_updated = True
        self._depth = max(0, self._depth - 1)
        if Pacer.current is not None:
            Pacer.current.mark()
        if self._depth == 0:
            self._gate.in_optimizer_step = False
