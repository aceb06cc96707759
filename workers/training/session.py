"""What stands behind ``job`` in a worker: loops that can be suspended, evicted, resumed.

Life of a loop, in numbered steps:
1. ``steps`` sizes and leases the slice (first loop of a phase), binds the tensors, restores the
   commit if the job has one for this place of the script, or skips a finished loop.
2. Between two bodies stands a *boundary*. Behind an update it is a commit point, whichever of the
   optimizers has stepped, and before the first update: captured, and committed when the interval is
   over. Then the gate is looked at. A body that was seen to write parameters behind torch's back
   (``.data``) overlaps no commit.
3. The next batch is fetched with the device given up; the body runs with the hooks of
   ``hooks.py`` looking at the gate at every layer, forward and backward.
4. ``optimizer.step()`` first waits for the commit under way, and is never interrupted; a closure
   that it is given may be, the first time, as a body.
5. An eviction commits the last point and unwinds the script. If finished steps would be lost, the
   script goes on to the next point first, but no longer than ``_goes_to_point`` allows. At most the
   current step is recomputed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from pipeswitch.errors import HostStoreFull, InvalidInput, OutOfDeviceMemory, PipeSwitchError
from pipeswitch.inputs.loader import SharedLoader
from pipeswitch.inputs.randomness import RandomState
from pipeswitch.ipc.gate import Gate
from pipeswitch.job import InexactResumeWarning, warn_if_not_finite

from .activations import Activations
from .commits import Committer, Point, state_area_bytes
from .feed import AcceleratedEpoch, Source
from .hooks import Closure, hook_modules, hook_optimizer, use_gate
from .host import JobHost
from .layout import history_bytes
from .objects import TrainedObjects, bare
from .place import Position, SavedImage, ScriptPlace
from .reports import Reports
from .script_watch import ScriptWatch
from .slice import TrainingSlice
from .snapshot import DataPosition, named, named_extras
from .timing import CommitTiming, WriteWatch
from .torch_private import is_left_by_error

_Batch = TypeVar("_Batch")
MOST_BODIES_TO_A_POINT: Final = 64
GROWTH: Final = 2  # factor of the need, so that the state area grows rarely
GROWS_AGAIN_MS: Final = 5000.0  # after it found no room
LEAST_WAIT_FOR_STEP_MS: Final = 1000.0  # minimum wait of an eviction for a body that has begun


class TrainingSession:
    """``job`` inside the server; made by the worker before the script, used by its main thread.

    Args:
        commit_every_ms: time between two commits, reached by doubling from a short one.
        defaults: ``offload`` and ``activation_bytes`` of ``steps``, where they are not named there.
    """

    def __init__(
        self,
        host: JobHost,
        gate: Gate,
        *,
        commit_every_ms: float = 5_000.0,
        defaults: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._defaults = {"offload": "auto", "activation_bytes": "0", **dict(defaults)}
        self._host, self._gate = host, gate
        self._reports = Reports(host)
        self._timing = CommitTiming(commit_every_ms, host.now_ms)
        self._place = ScriptPlace(host.restore())
        saved = self._place.saved
        self._watch = WriteWatch(*((False, False) if saved is None else saved.values["bodies"]))
        self._objects: TrainedObjects | None = None
        self._layout: TrainingSlice | None = None
        self._committer: Committer | None = None
        self._bound_phase = -1
        self._hooks: list[RemovableHandle] = []
        self._activations: Activations | None = None
        self._point: Point | None = None
        self._data: DataPosition | None = None
        self._epochs = 1  # of the loop over them; without one, the data once
        self._has_stepped = False  # an optimizer, since the last point
        self._loader: Any = None
        self._script: ScriptWatch | None = None  # watch of this run's first phase
        self._frame_of_epochs = 0
        self._has_updated = saved is not None and bool(saved.values["has_updated"])
        self._optimizer_depth = 0
        self._open_loop: object | None = None
        self._in_body = False
        self._has_failed = False  # an error ended the last loop and may have been caught
        self._publish_due = False  # a commit is wanted at the next boundary
        self._warned: set[str] = set()
        self._over = False
        self._grows_at_ms = 0.0
        self._evicted_at_ms: float | None = None  # seen in a body that cannot end without loss
        gate.before_unwind = self._commit_before_unwinding
        gate.finishes_step = self._goes_to_point

    # ------------------------------------------------------------------------- the worker's

    def begin(self) -> None:
        """Call right before the script: its random generators start as in its first run."""
        saved = self._place.saved
        if saved is not None:
            saved.random("script_random").restore(self.device)
            self._place.entry["script_random"] = saved.values["script_random"]
        else:
            self._place.entry["script_random"] = RandomState(self.device).values()
        use_gate(self._gate)

    def finish(self) -> None:
        """Call when the script has ended well: commits its end and gives the device up.

        Raises:
            InvalidInput: it ended before it came to the loop in which it was interrupted.
        """
        if self._place.saved is not None:
            place = self._place.saved.position
            raise InvalidInput(
                f"the script ended before it came to the place of its last commit (step "
                f"{place.step}, {place.name}, epoch {place.epoch}): nothing was restored",
                hint="under a server job.epochs and job.steps resume: a script must not skip "
                "loops itself, by a checkpoint of its own or a limit of time",
            )
        if self._has_failed:
            self._end_loop()
        self._report(final=True)
        self._end_phase(force=True)
        committed = self._committer.committed if self._committer is not None else None
        step = self.step if committed is None else committed.position.step
        self._host.report("finished", step=self.step, committed_step=step)
        self.close()

    def fail(self) -> None:
        """Keep the script's last finished step, if its state is still whole. Call this when the
        script has failed."""
        if self._committer is not None and self._place.saved is None:
            with contextlib.suppress(PipeSwitchError):
                self._commit_point()

    def close(self) -> None:
        """Call in any case (also after an error or a preemption): hooks off, device given up."""
        self._over = True
        self._host.flush()
        self._remove_hooks()
        use_gate(None)
        if self._activations is not None:
            self._activations.close()
        self._gate.in_optimizer_step = False
        self._gate.leave()

    # ------------------------------------------------------------------------- the script's

    @property
    def device(self) -> str:
        """Where models belong."""
        return self._host.device

    @property
    def step(self) -> int:
        """Finished steps, over all loops and preemptions."""
        return self._place.step

    @property
    def kept_step(self) -> int:
        """Return the step of the commit from which this run of the script resumes."""
        return 0 if self._place.saved is None else self._place.saved.position.step

    @property
    def step_in_epoch(self) -> int:
        """See ``pipeswitch.job.step_in_epoch``."""
        return self._place.position.batches

    def epochs(self, count: int) -> Iterator[int]:
        """See ``pipeswitch.job.epochs``."""
        place, self._epochs = self._place, count
        self._frame_of_epochs = id(sys._getframe(1))  # which lives as long as this
        saved = place.begin_epochs(count)
        first = 0 if saved is None else saved.position.epoch
        try:
            for epoch in range(first, count):
                place.begin_epoch(epoch)
                if saved is not None and epoch == first:
                    saved.random("epoch_random").restore(self.device)
                    place.step = saved.position.step
                place.entry["epoch_random"] = RandomState(self.device).values()
                yield epoch
                self._unwind_if_evicted()
        finally:
            place.end_epochs()
            self._frame_of_epochs = 0
            if not self._is_unwinding:
                self._end_phase()

    def steps(
        self,
        loader: Iterable[_Batch],
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        extra_state: Any = None,
        name: str | None = None,
        offload: str | None = None,
        activation_bytes: int | None = None,
    ) -> Iterator[_Batch]:
        """See ``pipeswitch.job.steps``."""
        probe: dict[str, Any] = {}  # as an extra_state that is written in the call: held here alone
        is_literal = sys.getrefcount(extra_state) <= sys.getrefcount(probe)
        objects = TrainedObjects(
            named(model, "model"),
            {name: bare(one) for name, one in named(optimizer, "optimizer").items()},
            named(scheduler, "scheduler"),
            named_extras(extra_state, is_literal=is_literal),
        )
        if self._open_loop is not None or self._has_failed:
            self._end_loop()  # left by ``break``, and something still refers to it; or an error
        self._open_loop = this_loop = object()
        if not self._place.in_epochs:
            self._place.begin_phase()
            self._place.entry["epoch_random"] = RandomState(self.device).values()
        start = self._place.begin_loop(name)
        self._bind(objects)
        asked_for = (
            offload or self._defaults["offload"],
            activation_bytes or int(self._defaults["activation_bytes"]) or None,
        )
        self._activations = Activations.of_loop(
            self._activations, asked_for, self._host, self._gate
        )
        if self._activations is not None:
            self._activations.keep((*objects.parameters.values(), *objects.buffers.values()))
        if hasattr(loader, "base_dataloader"):
            loader = AcceleratedEpoch(loader, self.device)
        self._loader = loader
        self._data = DataPosition(loader, objects.extras)
        if "loader" not in self._warned and self._data.warn_if_inexact():
            self._warned.add("loader")
            self._host.report("warning", what="inexact_resume", step=self.step)
        if self._script is not None and id(sys._getframe(1)) == self._frame_of_epochs:
            self._watch_script()
        elif not isinstance(loader, Source):  # a function that is called anew has new variables
            self._script = ScriptWatch(sys._getframe(1), objects, loader)
        iterator, is_left = self._open(start), True
        try:
            if iterator is not None:
                yield from self._run(iterator, this_loop)
            is_left = False
        finally:
            if self._open_loop is this_loop:
                self._open_loop = None
                # One that fails shall not resume behind the loop; one that catches the error ends
                # the loop with whatever it calls next.
                self._has_failed = is_left and is_left_by_error(sys._getframe(1))
                if not self._is_unwinding and not self._has_failed:
                    self._end_loop()
                self._gate.leave()

    def trainer(self, trainer: Any, library: str) -> None:
        """See ``pipeswitch.job.trainer``."""
        if library == "transformers":
            from .transformers_trainer import TransformersLoop as Loop
        else:
            from .lightning_trainer import LightningLoop as Loop  # type: ignore[assignment]
        Loop(self, trainer)

    def upcoming(self) -> tuple[SavedImage, bool] | None:
        """Before a ``steps`` outside of epochs: what it will resume, and whether that had ended."""
        return self._place.upcoming()

    def shared(self, loader: Any, name: str, *, seed: int) -> SharedLoader:
        """See ``pipeswitch.job.shared``."""
        ring = self._host.ring
        return SharedLoader(loader, name, seed=seed, step=lambda: self.step, ring=ring)

    def log(self, values: Mapping[str, Any]) -> None:
        """See ``pipeswitch.job.log``."""
        for name, number in self._reports.log(values, self.step).items():
            if warn_if_not_finite(name, number, self.step):
                self._host.report("nan_loss", step=self.step, name=name, value=str(number))

    def publish(self, name: str, part: str) -> None:
        """See ``pipeswitch.job.publish``."""
        if self._place.saved is not None:
            return  # this life only comes to the place where an earlier one was
        if self._objects is None or self._point is None:
            raise InvalidInput(
                "job.publish: no loop has begun, so there is nothing to publish",
                hint="call it in a job.steps loop or after one",
            )
        if self._host.is_publishing and not self._publish_due:  # another step's, probably
            self._gate.leave()
            self._host.await_copy()
            self._gate.enter()
        is_whole = self._is_whole(self._point) and not (
            self._in_body and not self._watch.is_trusted
        )
        step = self._point.position.step if is_whole else self.step + 1
        self._host.publish(name, step, part, self._objects.weights())
        if is_whole:
            self._commit_point()
        else:
            self._timing.hurry()
            self._publish_due = True

    # ------------------------------------------------------------------------- binding

    def _bind(self, objects: TrainedObjects) -> None:
        """Lease and rebind for a new phase; within a phase the objects must stay the same."""
        if self._bound_phase == self._place.phase:
            assert self._objects is not None
            self._objects.refuse_other_objects(objects)
            self._objects.extras = objects.extras  # may be others, of the same names
            return
        self._release()
        if self._script is not None:
            self._warned.add("script")  # what stands between phases is done again
        objects.refuse_shared_memory()
        if "lost" not in self._warned:
            self._warned.add("lost")
            objects.warn_of_what_is_lost()
        saved = self._place.saved
        before = 0 if saved is None else int(saved.values["state_capacity"])
        state_bytes = state_area_bytes(objects, before)
        self._layout = TrainingSlice(objects, state_bytes, self._place.past_bytes)
        try:
            memory = self._lease(self._layout, objects)
        except (OutOfDeviceMemory, HostStoreFull):
            if not self._place.drop_past(0):
                raise
            self._warn_of_many_phases()
            self._layout = TrainingSlice(objects, state_bytes, self._place.past_bytes)
            memory = self._lease(self._layout, objects)
        self._layout.bind(memory)
        if self._bound_phase < 0:
            self._compare_beginnings()
        self._committer = Committer(self._host, self._layout, self._place.past, self.device)
        self._objects, self._bound_phase, self._point = objects, self._place.phase, None
        self._has_stepped = False
        self._hooks = hook_modules(objects.models.values())
        for optimizer in objects.optimizers.values():
            self._hooks += hook_optimizer(
                optimizer, self._before_optimizer, self._before_closure, self._after_optimizer
            )

    def _moves(self, point: Point) -> bool:
        """Make room for the next commits, between two bodies; return True if everything has
        moved."""
        assert self._committer is not None
        if self._host.now_ms() < self._grows_at_ms or self._gate.is_evicting:
            return False
        try:
            self._grow(self._committer.outgrown_bytes(point))
        except (OutOfDeviceMemory, HostStoreFull) as error:
            self._grows_at_ms = self._host.now_ms() + GROWS_AGAIN_MS
            self._commit_failed(error)
        return True

    def _grow(self, state_bytes: int) -> None:
        """Move into a larger slice: extra_state or an optimizer has outgrown the current one.

        Call this only between two bodies. The caller captures the state again.

        Raises:
            OutOfDeviceMemory, HostStoreFull: there is no room; the slice is as before.
        """
        old, objects, problem = self._layout, self._objects, None
        assert old is not None
        assert objects is not None
        assert self._committer is not None
        self._finish_commit()
        committed = self._committer.committed
        self._gate.leave()
        old.unbind()
        now_bytes, past_bytes = old.state.capacity_bytes, old.past.capacity_bytes
        layout = TrainingSlice(objects, max(GROWTH * state_bytes, now_bytes), past_bytes)
        try:
            memory = self._lease(layout, objects)
        except (OutOfDeviceMemory, HostStoreFull) as error:
            problem = error
            layout = TrainingSlice(objects, now_bytes, past_bytes, old.optimizer.capacity_bytes)
            memory = self._lease(layout, objects)
        self._layout = layout
        layout.bind(memory)
        self._committer = Committer(self._host, layout, self._place.past, self.device)
        self._committer.committed = committed
        if self._activations is not None:
            self._activations.keep((*objects.parameters.values(), *objects.buffers.values()))
        if problem is not None:
            raise problem

    def _lease(self, layout: TrainingSlice, objects: TrainedObjects) -> torch.Tensor:
        """Lease what ``layout`` needs; a refusal says when it is an optimizer's history."""
        try:
            return self._host.lease(layout.slice_bytes, layout.image_bytes)
        except (OutOfDeviceMemory, HostStoreFull) as error:
            history = sum(map(history_bytes, objects.optimizers.values()))
            if 2 * history > layout.slice_bytes:
                error.hint = f"LBFGS may keep {history} bytes of it: lower its history_size"
            raise

    def _release(self) -> None:
        """Leave the previous phase's slice; keep its end among the past ones."""
        if self._layout is None or self._committer is None:
            return
        self._finish_commit()
        if self._place.saved is None:
            if self._committer.committed is None:
                self._end_phase(force=True)
            image = self._host.restore()
            assert image is not None  # the end of a phase was committed
            if not self._place.keep_past(self._bound_phase, image):
                self._warn_of_many_phases()
        self._remove_hooks()
        self._layout.unbind()

    def _compare_beginnings(self) -> None:
        """Every life of a script makes the same models, unless it loads what it saved itself."""
        assert self._layout is not None
        now = self._layout.sum_of_parameters()
        saved = self._place.saved
        first = now if saved is None else saved.values["beginning"]
        self._place.entry["beginning"] = first
        if first != now:
            warnings.warn(
                "the models began with other values than in this job's first life. If the script "
                "loads a checkpoint of its own, it must not skip epochs or loops by it as well: "
                "job resumes where it stopped",
                InexactResumeWarning,
                stacklevel=5,
            )

    def _warn_of_many_phases(self) -> None:
        if "phases" not in self._warned:
            self._warned.add("phases")
            warnings.warn(
                "the ends of the first loops (of job.epochs, or of job.steps outside of it) are no "
                "longer kept: a resumed script finds a later loop's weights there, and what it "
                "computes behind them again, as metrics, is of those. Write such results to a file "
                "in the loop that makes them, or give each model a job of its own",
                InexactResumeWarning,
                stacklevel=6,
            )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ------------------------------------------------------------------------- resuming

    def _open(self, start: Position) -> Iterator[Any] | None:
        """Start, resume or skip (None) the loop that begins at ``start``."""
        assert self._committer is not None
        saved = self._place.image_of_phase()
        if saved is None:
            return self._open_fresh(start)
        self._place.go_to(saved, start)
        if saved.position.phase != start.phase:
            # its own end was dropped: show a later one, if it is of these models
            with contextlib.suppress(InvalidInput):
                self._restore(saved)
            return None
        self._restore(saved)
        if start.order < saved.position.order:
            return None  # finished before the commit
        if start.name != saved.position.name:
            raise InvalidInput(f"loop {start.name!r} was {saved.position.name!r} when committed")
        return self._open_saved(saved)

    def _restore(self, saved: SavedImage) -> None:
        assert self._committer is not None
        try:
            self._committer.restore(saved)
        except OutOfDeviceMemory:  # an optimizer keeps more than its dry run has shown
            self._grow(0)
            self._committer.restore(saved)

    def _open_fresh(self, start: Position) -> Iterator[Any]:
        assert self._data is not None
        # First: a loader that is asked for its state may begin, and draw.
        self._place.entry["loop_random"] = RandomState(self.device).values()
        data = self._data.capture()
        self._place.entry["loop_data"] = (data.generators, data.own)
        self._place.position = start
        iterator = self._data.open_new()
        self._capture()
        return iterator

    def _open_saved(self, saved: SavedImage) -> Iterator[Any] | None:
        """Random generators of the loop's start, iterator, skip; those of the commit."""
        assert self._data is not None
        assert self._committer is not None
        for key in ("epoch_random", "loop_random", "loop_data"):
            self._place.entry[key] = saved.values[key]
        iterator = None
        if saved.position.finished:
            self._data.pass_by(saved.data("data"))
        else:
            begin = saved.random("loop_random"), saved.data("loop_data")
            batches, proof = saved.position.batches, saved.values["proof"]
            if proof is not None:
                iterator = self._data.open_proved(batches, proof, [begin], self.device)
            if iterator is None:
                begin[0].restore(self.device)
                self._data.restore_generators(begin[1])
                iterator = self._data.open_at(batches, saved.data("data"), begin[1])
        saved.random("random").restore(self.device)
        self._data.restore_generators(saved.data("data"))
        if saved is self._place.saved:
            self._place.saved = None
            self._capture()
            self._committer.committed = self._point
            self._host.report("resumed", step=self.step, epoch=self._place.position.epoch)
        return iterator

    # ------------------------------------------------------------------------- the loop

    def _run(self, iterator: Iterator[Any], this_loop: object) -> Iterator[Any]:
        away_ms = 0.0
        while True:
            self._unwind_if_evicted()
            self._gate.leave("loader")
            began_ms = self._host.now_ms()
            is_at_point = self._point is not None and self._point.position == self._place.position
            before = self._point if is_at_point else None
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if before is not None:
                assert self._data is not None
                self._data.fetched(batch, before.random, before.data)
            self._reports.was_away(away_ms + self._host.now_ms() - began_ms)
            self._gate.enter()
            self._watch.begin_body()
            self._in_body = True
            if self._activations is None:
                yield batch
            else:
                with self._activations.body(batch):
                    yield batch
                away_ms = self._activations.away_ms
            if self._open_loop is not this_loop:
                raise InvalidInput(
                    "job.steps inside job.steps: a loop began in the body of this one",
                    hint="make the inner one a plain loop over its loader",
                )
            self._in_body = False
            self._place.end_body()
            self._host.reached(self.step)
            self._boundary()

    def _unwind_if_evicted(self) -> None:
        """A check that does not take the device."""
        if self._gate.is_evicting:
            self._gate.check("boundary")

    def _boundary(self) -> None:
        """Capture the commit point between two bodies; an optimizer may step in only a few of
        them."""
        self._optimizer_depth, self._gate.in_optimizer_step = 0, False  # a step may have raised
        self._report()
        if not self._has_stepped:
            self._watch_writes()
        if self._is_at_point:
            self._commit_if_due()
        self._gate.check("boundary")

    @property
    def _is_at_point(self) -> bool:
        """This boundary is a commit point. What bodies count otherwise than by ``job.step`` begins
        anew at an update, as accelerate and trainers do; before the first one each boundary is."""
        assert self._point is not None
        if self._has_stepped:
            return True
        bodies = self.step - self._point.position.step
        is_counted = isinstance(self._loader, Source) or self._has_updated
        return not is_counted or bodies >= MOST_BODIES_TO_A_POINT

    def _commit_if_due(self) -> None:
        self._capture()
        is_due = self._timing.is_due and not self._host.is_publishing
        if (is_due or self._publish_due) and self._place.saved is None:
            self._watch_script()
            self._publish_due = False
            self._begin_commit()
            if not self._watch.may_overlap:
                self._finish_commit()

    def _end_loop(self) -> None:
        """After the last batch, or a ``break``: what follows must find the state as it is now."""
        self._has_failed = False
        self._watch_script()
        self._optimizer_depth, self._gate.in_optimizer_step = 0, False
        self._in_body = False
        if self._place.saved is None and not (self._point and self._is_whole(self._point)):
            self._place.end_loop()
            self._capture()
        if not self._place.in_epochs:
            self._end_phase()

    def _watch_script(self) -> None:
        """Warn once about variables that the loop changes and that start over in a resumed
        script."""
        if self._script is None or "script" in self._warned:
            return
        assert self._objects is not None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        names = self._script.changed(frame, self._objects, self._loader)
        if names:
            self._warned.add("script")
            self._host.report("warning", what="inexact_resume", step=self.step)
            warnings.warn(
                f"job.steps: {', '.join(names[:6])}: the loop changes this, but job.steps does not "
                "capture it, so it starts over in a resumed script. Keep numbers in a dict "
                "(note = {'best': 9.0}; extra_state=note); pass lists, generators and objects with "
                "state_dict() in extra_state, networks as model",
                InexactResumeWarning,
                stacklevel=4,
            )

    def _end_phase(self, *, force: bool = False) -> None:
        """Commit the last point, for whatever the script does next.

        Where code behind the last loop has written parameters, the point is gone. Then the last
        commit stays, and a resume recomputes from there; unless ``force``: commit what is now.
        """
        if self._activations is not None:
            self._activations.give_back()
        if self._place.saved is not None or self._point is None or self._over:
            return
        if force and not self._is_whole(self._point):
            self._place.end_loop()
            self._capture()
        self._commit_point()

    def _is_whole(self, point: Point) -> bool:
        """Return whether nothing has moved since the point was captured."""
        assert self._committer is not None
        return (
            point.position == self._place.position and not self._has_stepped
            and self._committer.is_intact(point)
        )  # fmt: skip

    # ------------------------------------------------------------------------- committing

    def _capture(self) -> None:
        assert self._committer is not None
        assert self._data is not None
        self._finish_commit()
        entry = {
            **self._place.entry,
            "bodies": (self._watch.was_watched, self._watch.writes_unseen),
            "has_updated": self._has_updated,
        }
        now = self._place.position, self._data.capture(), entry, self._point
        try:
            self._point = self._committer.capture(*now)
            outgrown_bytes = self._committer.outgrown_bytes(self._point)
        except OutOfDeviceMemory:  # an optimizer keeps more than its dry run has shown
            self._grow(0)
            outgrown_bytes = 0
            self._point = self._committer.capture(*now)
        if outgrown_bytes and self._moves(self._point):
            self._point = self._committer.capture(*now)
        self._has_stepped = False
        self._watch.at_point(self._committer.sum_of_parameters, is_due=self._timing.is_due)

    def _commit_point(self) -> None:
        """Commit the last point, unless it is committed or cannot be; waits."""
        assert self._committer is not None
        self._finish_commit()
        if self._in_body and not self._watch.is_trusted:
            return
        point = self._point
        if point is not None and self._committer.committed is not point:
            if not self._has_stepped and self._committer.is_intact(point):
                self._begin_commit()
            self._finish_commit()

    def _begin_commit(self, *, may_grow: bool = True) -> None:
        assert self._committer is not None
        assert self._point is not None
        if self._committer.is_intact(self._point):
            try:
                self._committer.begin(self._point)
            except OutOfDeviceMemory as error:
                if may_grow and not self._in_body and self._moves(self._point):
                    self._capture()
                    self._begin_commit(may_grow=False)
                else:
                    self._commit_failed(error)

    def _commit_failed(self, error: Exception) -> None:
        """Report a failed commit: the previous one stays valid, and training continues."""
        self._timing.failed()
        self._host.report("commit_failed", step=self.step, text=str(error))
        if "commit" not in self._warned:
            self._warned.add("commit")
            warnings.warn(
                f"the state after step {self.step} was not kept: {error}. Training continues; a "
                "resumed script starts from the last saved step",
                UserWarning,
                stacklevel=2,
            )

    def _finish_commit(self) -> None:
        assert self._committer is not None
        if self._committer.is_in_flight:
            try:
                self._committer.finish()
            except Exception as error:
                self._commit_failed(error)
                return
            took_ms = self._committer.last_duration_ms
            self._timing.committed(took_ms)
            assert self._committer.committed is not None
            step = self._committer.committed.position.step
            self._host.report("committed", step=step, duration_ms=took_ms)

    def _commit_before_unwinding(self) -> None:
        """The gate calls this once, on the main thread, before the first ``TaskPreempted``."""
        if self._committer is None or self._place.saved is not None or self._over:
            return
        try:
            self._commit_point()
        except Exception as error:  # the last commit stands; unwinding must go on
            self._host.report("commit_failed", step=self.step, text=str(error))
        committed = self._committer.committed
        self._host.report(
            "evicting",
            step=self.step,
            committed_step=None if committed is None else committed.position.step,
        )

    def _goes_to_point(self) -> bool:
        """Return whether an eviction now would lose finished steps that the next commit point
        saves.

        Waiting may take no longer than the steps since the last commit took, since that is the time
        that it saves.
        """
        if self._open_loop is None or self._committer is None or self._place.saved is not None:
            return False
        point, committed = self._point, self._committer.committed
        if point is None or self._over:
            return False
        kept_step = 0 if committed is None else committed.position.step
        is_trusted = self._watch.is_trusted or not self._in_body
        if is_trusted and not self._has_stepped and self._committer.is_intact(point):
            kept_step = point.position.step
        if self.step <= kept_step:
            return False
        now_ms = self._host.now_ms()
        if self._evicted_at_ms is None:
            self._evicted_at_ms = now_ms
        since_commit_ms = self._evicted_at_ms - self._timing.committed_at_ms
        return now_ms - self._evicted_at_ms < max(LEAST_WAIT_FOR_STEP_MS, since_commit_ms)

    @property
    def _is_unwinding(self) -> bool:
        is_leaving = self._gate.is_evicting and not self._in_body  # ``break`` ends a body, too
        return self._over or self._gate.is_unwinding or is_leaving

    # ------------------------------------------------------------------------- optimizer hooks

    def _before_optimizer(self) -> None:
        """1. A last look at the gate. 2. The commit under way reads the parameters: wait."""
        if self._optimizer_depth == 0:
            self._gate.check("backward")
            if not self._has_stepped:
                self._watch_writes()
            self._finish_commit()
            self._gate.in_optimizer_step = True
        self._optimizer_depth += 1

    def _watch_writes(self) -> None:
        """Check whether the body itself wrote parameters: no optimizer has stepped in it yet."""
        if self._point is not None and self._committer is not None:
            is_intact = self._committer.parameters_are_intact(self._point)
            if not self._watch.before_optimizer(is_intact, self._committer.sum_of_parameters):
                self._timing.hurry()

    def _before_closure(self, closure: Closure) -> Closure:
        """As long as nothing is updated the first run of ``closure`` is a body as any other: in
        Lightning's loop forward and backward lie in there."""
        self._gate.check("boundary")
        self._finish_commit()
        self._gate.in_optimizer_step = True
        self._optimizer_depth += 1
        is_first = self._optimizer_depth == 1

        def compute(*args: Any, **keywords: Any) -> Any:
            nonlocal is_first
            assert self._committer is not None
            assert self._point is not None
            may_stop = is_first and self._committer.parameters_are_intact(self._point)
            is_first = False
            if not may_stop:
                return closure(*args, **keywords)
            self._gate.in_optimizer_step = False
            value = closure(*args, **keywords)
            self._optimizer_depth = 0
            self._before_optimizer()
            return value

        return compute

    def _after_optimizer(self) -> None:
        self._has_stepped = self._has_updated = True
        self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._optimizer_depth == 0:
            self._gate.in_optimizer_step = False

    # ------------------------------------------------------------------------- reporting

    def _steps_left(self) -> int:
        """Until the last of ``epochs`` ends, where the loader has a length; -1: not known."""
        length = self._data.length if self._data is not None else None
        if length is None:
            return -1
        position = self._place.position
        loops = self._epochs - position.epoch if position.epoch >= 0 else 1
        return loops * length - position.batches

    def _report(self, *, final: bool = False) -> None:
        if self._reports.are_due or final:
            figures = {} if self._activations is None else self._activations.figures
            left = self._steps_left()
            self._reports.progress(self.step, self._place.position.epoch, left, **figures)
