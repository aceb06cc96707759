"""Session behind ``job`` in a worker: loops that can be suspended, evicted and resumed.

Life of a loop, in numbered steps:
1. ``steps`` sizes and leases the slice (first loop of a phase) and binds the tensors. Then it
   restores the commit, if the job has one for this place of the script, or skips a finished loop.
2. A *body* is the script's code for one batch, and between two bodies is a *boundary*. It is a
   commit point before the first update and after each update, by any optimizer: the state is
   captured, and committed if a commit is due. Then the gate is checked. If bodies were seen to
   write parameters without torch's knowledge (``.data``), no body overlaps a commit.
3. The job leaves the device while it fetches the next batch. Then the body runs, and the hooks of
   ``hooks.py`` check the gate at every layer, forward and backward.
4. ``optimizer.step()`` first waits for the commit in progress and is never interrupted, except that
   the first run of its closure may be interrupted like a body.
5. An eviction commits the last point and unwinds the script. If finished steps would be lost, the
   script first continues to the next point, for at most the time of
   ``CommitTiming.waits_for_step``. At most the current step is recomputed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipeswitch.base.errors import InvalidInput, PipeSwitchError
from pipeswitch.base.extras import JOBS
from pipeswitch.ipc.gate import Gate
from pipeswitch.job import warn_if_not_finite

from . import persistent_loaders, reachable
from .consumers import batches_left, loops_of
from .epochs import Epochs
from .hooks import use_gate
from .host import JobHost
from .loader_proxy import AcceleratedEpoch, Source
from .objects import TrainedObjects
from .phase import Phase, SavedTensors, saved_tensors
from .randomness import RandomState
from .reports import Reports
from .script_changes import ScriptChanges
from .script_cursor import BEGINNING, CursorPosition, SavedImage, ScriptCursor
from .script_files import ScriptFiles, ScriptSources
from .script_values import AUTO
from .snapshot import CHANGED, DataPosition, named, named_extras
from .timing import CommitTiming, WriteWatch
from .torch_private import is_left_by_error

_Batch = TypeVar("_Batch")


class TrainingSession:
    """``job`` inside the server; created before the script runs, used by the main thread only.

    Args:
        commit_every_ms: interval of commits; the first intervals are shorter and double up to it.
        files: record of the script's files, which outlives this process; None: there is none.
        defaults: ``offload`` and ``activation_bytes`` of ``steps`` calls that do not set them.
    """

    def __init__(
        self,
        host: JobHost,
        gate: Gate,
        *,
        commit_every_ms: float = 5_000.0,
        files: Path | None = None,
        defaults: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._defaults = {"offload": "auto", "activation_bytes": "0", **dict(defaults)}
        self._host, self._gate = host, gate
        self._reports = Reports(host)
        self._timing = CommitTiming(commit_every_ms, host.now_ms)
        self.place = ScriptCursor(host.restore())
        self._files = ScriptFiles(files, self.place, self._reports)
        self.open = self._files.open  # see ``pipeswitch.job.open``
        sources = ScriptSources(self.place, self._reports)
        self.place.parts = {"files": self._files, "sources": sources}
        saved = self.place.saved
        self.is_resumed = saved is not None
        self._epochs = Epochs(host, gate, self.place, self._reports, self._timing)
        self._watch = WriteWatch(*((False, False) if saved is None else saved.values["bodies"]))
        self._phase: Phase | None = None
        self._activations: SavedTensors | None = None
        self._loader: Any = None
        self._changes = ScriptChanges(self._reports)
        self._open_loop: object | None = None
        self._has_failed = False  # an error left the last loop; the script may have caught it
        self._publish_due = False  # ``publish`` needs a commit at the next boundary

    # ------------------------------------------------------------------------- the worker's

    def begin(self) -> None:
        """Restore the random generators of the script's start; called right before the script."""
        saved = self.place.saved
        if saved is not None:
            saved.random("script_random").restore(self.device)
            self.place.entry["script_random"] = saved.values["script_random"]
        else:
            self.place.entry["script_random"] = RandomState(self.device).values()
        use_gate(self._gate)
        persistent_loaders.watch()
        reachable.begin(sys._getframe(1))

    def finish(self) -> None:
        """Commit the end of the script and leave the device; called if it ended without an error.

        Raises:
            InvalidInput: the script ended before it reached the position of its last commit.
        """
        if self.place.saved is not None:
            place = self.place.saved.position
            raise InvalidInput(
                f"the script ended before it reached its last commit (step {place.step}, "
                f"{place.name}, epoch {place.epoch}): nothing was restored",
                hint="under a server job.epochs and job.steps resume: a script must not skip "
                "loops itself, by a checkpoint of its own or a limit of time",
            )
        if self._has_failed:
            self._end_loop()
        self._report(final=True)
        step = None
        if self._phase is not None:
            self._phase.end(force=True)
            step = self._phase.committed_step
        step = self.step if step is None else step
        self._host.report("finished", step=self.step, committed_step=step)
        self.close()

    def fail(self) -> None:
        """Commit the last finished step of a failed script if its state is still intact."""
        if self._phase is not None and self.place.may_commit:
            with contextlib.suppress(PipeSwitchError):
                self._phase.commit_point()

    def close(self) -> None:
        """Remove all hooks and leave the device; called at every end of the script."""
        self.place.is_over = True
        self._host.flush()
        if self._phase is not None:
            self._phase.optimizers.remove()
        use_gate(None)
        self._files.close()
        persistent_loaders.unwatch()
        if self._activations is not None:
            self._activations.close()
        self._gate.in_optimizer_step = False
        self._gate.leave()

    # ------------------------------------------------------------------------- the script's

    @property
    def is_in_loop(self) -> bool:
        """True in ``job.epochs`` or ``job.steps``."""
        return self._open_loop is not None or self.place.in_epochs

    @property
    def device(self) -> str:
        """Device for the script's models."""
        return self._host.device

    @property
    def step(self) -> int:
        """Number of finished steps, over all loops and preemptions."""
        saved = self.place.saved if self.place.phase < 0 else None  # the script's top
        return self.place.step if saved is None else saved.position.step

    @property
    def step_in_epoch(self) -> int:
        return self.place.position.batches

    def epochs(self, count: int) -> Iterator[int]:
        place = self.place
        self._epochs.begin(sys._getframe(1))
        saved = place.begin_epochs(count)
        first, has_ended = 0 if saved is None else saved.position.epoch, False
        try:
            for epoch in range(first, count):
                if self._open_loop is not None or self._has_failed:
                    self._end_loop()
                    self._open_loop = None
                place.begin_epoch(epoch)
                if saved is not None and epoch == first:
                    self._epochs.resume(saved, sys._getframe(1), self._bind)
                place.entry["epoch_random"] = RandomState(self.device).values()
                place.entry["epoch_step"] = place.step
                if saved is None or epoch > first:
                    self._epochs.commit_beginning(self._phase, sys._getframe(1))
                frame, paths = sys._getframe(1), self._epochs
                self._changes.begin_epoch(frame, self._phase, paths, is_first=epoch == first)
                if self._gate.is_evicting:
                    self._gate.check()
                yield epoch
            if self._gate.is_evicting:
                self._gate.check()
            has_ended = True
        finally:
            place.end_epochs()
            if not self._is_unwinding and self._phase is not None:
                has_failed = self._open_loop is not None or self._has_failed
                has_failed = has_failed or is_left_by_error(sys._getframe().f_back)
                self._phase.end(is_needed=has_ended or not has_failed)

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
        probe: dict[str, Any] = {}  # has as few references as an extra_state literal
        is_literal = sys.getrefcount(extra_state) <= sys.getrefcount(probe)
        is_auto = isinstance(extra_state, str) and extra_state == AUTO
        objects = TrainedObjects(
            named(model, "model"),
            named(optimizer, "optimizer"),
            named(scheduler, "scheduler"),
            {AUTO: self._epochs.script_values(sys._getframe(1))}
            if is_auto
            else named_extras(extra_state, is_literal=is_literal),
        )
        if self._open_loop is not None or self._has_failed:
            self._end_loop()  # an error or ``break`` left the last loop open
        self._open_loop = this_loop = object()
        if not self.place.in_epochs:
            self.place.begin_phase()
            self.place.entry["epoch_random"] = RandomState(self.device).values()
        start = self.place.begin_loop(name)
        if hasattr(loader, "base_dataloader"):
            loader = AcceleratedEpoch(loader, self.device)
        data = DataPosition(loader, objects.extras)
        self._loader, phase = loader, self._bind(objects)
        phase.data = phase.loops[start.loop] = data
        asked_for = (
            offload or self._defaults["offload"],
            activation_bytes or int(self._defaults["activation_bytes"]) or None,
        )
        self._activations = phase.activations = saved_tensors(
            self._activations, asked_for, self._host, self._gate
        )
        phase.keep_parameters()
        if "loader" not in self._reports.warned and data.warn_if_inexact():
            self._reports.inexact("loader", "a resumed script may see other batches", self.step)
        iterator, is_left, loops = self._open(phase, start), True, loops_of(sys._getframe(1))
        try:
            if iterator is not None:
                yield from self._run(phase, iterator, this_loop)
            is_left = False
        finally:
            if self._open_loop is this_loop:
                self._open_loop = None
                # A failed script must not resume after this loop. If it catches the error, its next
                # call of ``job`` ends the loop.
                self._has_failed = is_left and is_left_by_error(sys._getframe().f_back, loops)
                if not self._is_unwinding and not self._has_failed:
                    self._end_loop()
                self._gate.leave()

    def trainer(self, trainer: Any, library: str) -> None:
        JOBS.load(library)(self, trainer)

    def shared(self, loader: Any, name: str, *, seed: int) -> Iterable[Any]:
        make: Any = JOBS.load("shared_input")
        batches: Iterable[Any] = make(
            loader, name, seed=seed, step=lambda: self.step, ring=self._host.ring
        )
        return batches

    def log(self, values: Mapping[str, Any]) -> None:
        for name, number in self._reports.log(values, self.step).items():
            if warn_if_not_finite(name, number, self.step):
                self._host.report("nan_loss", step=self.step, name=name, value=str(number))

    def publish(self, name: str, part: str) -> None:
        if self.place.saved is not None:
            return  # this run has not reached the position of the last commit yet
        phase = self._phase
        if phase is None or phase.point is None:
            raise InvalidInput(
                "job.publish: no loop has begun, so there are no weights to publish",
                hint="call it in a job.steps loop or after one",
            )
        while self._host.is_publishing and not self._publish_due:  # probably of another step
            self._gate.leave()
            self._host.await_copy()
            self._gate.enter()
        is_whole = phase.is_whole() and self._watch.may_commit
        step = phase.point.position.step if is_whole else self.step + 1
        self._host.publish(name, step, part, phase.objects.weights())
        if is_whole:
            phase.commit_point(is_needed=True)
        else:
            self._timing.hurry()
            self._publish_due = True

    def _bind(self, objects: TrainedObjects) -> Phase:
        """Return the phase of the next loop; lease and bind a slice if the phase is new."""
        phase, warned = self._phase, self._reports.warned
        if phase is not None and phase.number == self.place.phase:
            if phase.is_early:  # the epoch's own code has made the rest
                phase.objects.extras, phase.is_early = objects.extras, False
            phase.objects.wrapped = objects.wrapped
            phase.objects.refuse_other_objects(objects)
            phase.objects.extras = objects.extras  # other objects with equal names are allowed
            return phase
        if phase is not None:
            phase.leave()
        objects.refuse_shared_memory()
        if "lost" not in warned:
            warned.add("lost")
            objects.warn_of_what_is_lost()
        rest = self._reports, self._timing, self._watch, objects
        self._phase = new_phase = Phase(self._host, self._gate, self.place, *rest)
        self._gate.finishes_step = lambda: new_phase.goes_to_point(
            is_in_loop=self._open_loop is not None
        )
        return new_phase

    def _open(self, phase: Phase, start: CursorPosition) -> Iterator[Any] | None:
        """Start, resume or skip the loop that begins at ``start``; return None to skip it."""
        self._epochs.find(phase, start.loop, sys._getframe())
        saved = self.place.image_of_phase()
        if saved is None:
            return self._open_fresh(phase, start)
        ended = saved.at(start.order) if start.order < saved.position.order else saved
        self.place.go_to(ended or saved, start)
        if saved.position.phase != start.phase:
            # The image of this phase's end was dropped; restore a later one if its models fit.
            with contextlib.suppress(InvalidInput):
                phase.restore(saved)
            return None
        if saved.position.loop == BEGINNING:  # it was not restored at the epoch's beginning
            phase.restore(saved)
            self._epochs.resumed(phase, saved)
            return self._open_fresh(phase, start)
        if ended is not saved:  # this loop finished before the commit
            if ended is None:
                self._epochs.warn_of_other_state(saved)
            phase.restore(ended or saved)
            if ended is not None:
                phase.data.pass_by(ended.data("data"))
                phase.data.restore_generators(ended.data("data"))
                ended.random("random").restore(self.device)
            return None
        if start.name != saved.position.name:
            raise InvalidInput(f"loop {start.name!r} was {saved.position.name!r} when committed")
        return self._open_saved(phase, saved)

    def _open_fresh(self, phase: Phase, start: CursorPosition) -> Iterator[Any]:
        if start.loop > 0:
            self._epochs.keep(phase)  # the end of the loop before, which commits of this one need
        # Captured first, because reading a loader's state may start the loader and draw numbers.
        self.place.entry["loop_random"] = RandomState(self.device).values()
        data = phase.data.capture()
        self.place.entry["loop_data"] = (data.generators, data.own)
        self.place.entry["loop_length"] = phase.data.length
        self.place.position = start
        iterator = phase.data.open_new()
        phase.capture()
        return iterator

    def _open_saved(self, phase: Phase, saved: SavedImage) -> Iterator[Any] | None:
        """Restore the loop's position in its data, and the random generators of the commit."""
        for key in ("epoch_random", "loop_random", "loop_data", "loop_length"):
            self.place.entry[key] = saved.values.get(key)
        persistent_loaders.restore(saved.data("data").workers)
        iterator = None
        if saved.position.finished:
            phase.data.pass_by(saved.data("data"))
        else:
            begin = saved.random("loop_random"), saved.data("loop_data")
            batches, proof = saved.position.batches, saved.values["proof"]
            length, now = self.place.entry["loop_length"], phase.data.length
            if length is not None and now is not None and length != now >= batches:
                phase.data.warn(f"it had {length} batches, and now has {now}. {CHANGED}")
            if proof is not None or not self._epochs.is_restored:
                phase.restore(saved)
            if proof is not None:
                iterator = phase.data.open_proved(batches, proof, [begin], self.device)
            if iterator is None:
                begin[0].restore(self.device)
                phase.data.restore_generators(begin[1])
                iterator = phase.data.open_at(batches, saved.data("data"), begin[1])
                phase.data.check_order(saved.values.get("drawn"))
        phase.restore(saved)  # last, because a sampler draws its order from the loop's beginning
        saved.random("random").restore(self.device)
        phase.data.restore_generators(saved.data("data"))
        self._epochs.resumed(phase, saved)
        return iterator

    # ------------------------------------------------------------------------- a loop

    def _run(self, phase: Phase, iterator: Iterator[Any], this_loop: object) -> Iterator[Any]:
        away_ms, left = 0.0, batches_left(sys._getframe(1), self.step_in_epoch)
        self._changes.begin_loop(sys._getframe(1), phase, self._loader)
        while left:
            if self._gate.is_evicting:  # a later check would first take the device
                self._gate.check()
            self._gate.leave("loader")
            began_ms = self._host.now_ms()
            point = phase.point
            before = point if point and point.position == self.place.position else None
            try:
                batch = next(iterator)
            except StopIteration:
                self._changes.look(sys._getframe(1), phase, self._loader)
                return
            if before is not None:
                phase.data.fetched(batch, before.random, before.data)
            self._reports.was_away(away_ms + self._host.now_ms() - began_ms)
            self._gate.enter()
            self._watch.begin_body()
            if self._activations is None:
                yield batch
            else:
                with self._activations.body(batch):
                    yield batch
                away_ms = self._activations.away_ms
            left -= 1
            if not left:
                return  # like ``islice``, which does not return to the last body
            if self._open_loop is not this_loop:
                raise InvalidInput(
                    "job.steps inside job.steps",
                    hint="make the inner loop a plain loop over its loader",
                )
            self._watch.is_in_body = False
            self.place.end_body()
            self._host.reached(self.step)
            self._boundary(phase)

    def _boundary(self, phase: Phase) -> None:
        """Capture and commit at the boundary between two bodies if due; then check the gate."""
        phase.optimizers.reset()
        self._report()
        if not phase.has_stepped:
            phase.watch_writes()
        if phase.is_at_point(is_counted=isinstance(self._loader, Source)):
            phase.capture()
            is_due = self._timing.is_due and not self._host.is_publishing
            is_due = is_due and phase.finish_commit(only_read=True)
            if (is_due or self._publish_due) and self.place.may_commit:
                self._changes.look(sys._getframe(1), phase, self._loader)
                phase.begin_commit(is_needed=self._publish_due)
                self._publish_due = False
                if not self._watch.may_overlap:
                    phase.finish_commit(only_read=True)
        self._gate.check("boundary")

    def _end_loop(self) -> None:
        """End a loop after its last batch or a ``break``, and capture its end."""
        self._has_failed = False
        persistent_loaders.end_pass(self._loader)
        phase, self._watch.is_in_body = self._phase, False
        if phase is None:
            return  # ``_bind`` refused the objects
        phase.optimizers.reset()
        place, is_last = self.place, self.place.position.loop + 1 >= self.place.loops
        may_follow = place.in_epochs and not (place.loops and is_last)
        if place.may_commit and (may_follow or not phase.is_whole()):  # a sampler's end may draw
            self.place.end_loop()
            phase.capture()
        phase.end_loop()
        if place.in_epochs and (not is_last or place.is_last_epoch):
            self._epochs.keep(phase, is_last=is_last)  # before code behind the loop changes it
        if not place.in_epochs:
            phase.end()

    @property
    def _is_unwinding(self) -> bool:
        # ``break`` in a body does not unwind.
        is_leaving = self._gate.is_evicting and not self._watch.is_in_body
        return self.place.is_over or self._gate.is_unwinding or is_leaving

    def _report(self, *, final: bool = False) -> None:
        if self._reports.are_due or final:
            figures = {} if self._activations is None else self._activations.figures
            length = None if self._phase is None else self._phase.data.length
            steps_left = self.place.steps_left(length)
            self._reports.progress(self.step, self.place.position.epoch, steps_left, **figures)
