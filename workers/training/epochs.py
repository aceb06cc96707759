"""Earlier states that a resume needs: an epoch's beginning, and the ends of its loops (ADR 65).

A resumed script runs an epoch's code again, so its objects must be as they were there, before
``job.steps`` names any of them. So commits have the paths by which the script reaches its objects.
They begin at variables that the script has not assigned since ``job.epochs`` began. An object
without a path is made by the epoch's own code, or is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

from torch import nn

from pipeswitch.base.errors import HostStoreFull, InvalidInput, TaskPreempted
from pipeswitch.ipc.gate import Gate

from . import persistent_loaders
from .commit_points import Older
from .host import JobHost
from .objects import TrainedObjects, bare
from .phase import Phase
from .reachable import MAX_PARTS, expressions, resolve, script_frames, walk
from .reports import Reports
from .script_cursor import BEGINNING, SavedImage, ScriptCursor
from .script_values import AUTO, ScriptValues, initial_values
from .snapshot import NOTES, DataPosition, has_state, load_state, state_of
from .timing import CommitTiming
from .torch_private import wrapped_by

KINDS: Final = ("models", "optimizers", "schedulers", "extras")
MAX_WALKS: Final = 8  # in each ``job.epochs``; a walk over the script's variables takes a few ms


class Epochs:
    """Commits of earlier states in a session, and restoring of an epoch's beginning."""

    def __init__(
        self, host: JobHost, gate: Gate, place: ScriptCursor, reports: Reports, timing: CommitTiming
    ) -> None:
        self._host, self._gate, self._place = host, gate, place
        self._reports, self._timing = reports, timing
        self._began_ms, self._took_ms = host.now_ms(), 0.0  # this epoch's start, the last's time
        self._variables: list[dict[str, int]] = []  # ids of values, by the script's frames
        self._paths: dict[tuple[str, Any], Any] = {}  # by kind and name: a path, or the parts'
        self._walks = 0
        self.initial: dict[Any, Any] = {}  # of ``ScriptValues``
        self.is_restored = True  # the epoch's beginning was restored before its code ran

    def begin(self, frame: FrameType) -> None:
        """Begin a ``job.epochs`` that ``frame`` calls."""
        frames = script_frames(frame)
        self._variables = [{k: id(v) for k, v in one.f_locals.items()} for one in frames]
        self.begin_values(frames)
        self._paths, self._walks = {}, 0
        self._began_ms, self._took_ms = self._host.now_ms(), 0.0

    def begin_values(self, frames: list[FrameType]) -> None:
        """Record what the script has made when it first calls ``job``."""
        if not self.initial:
            self.initial.update(initial_values(frames))

    def script_values(self, frame: FrameType) -> ScriptValues:
        """Return the ``extra_state`` of a loop of ``frame`` with ``extra_state="auto"``."""
        self.begin_values(script_frames(frame))
        return ScriptValues(self.initial)

    def commit_beginning(self, phase: Phase | None, frame: FrameType) -> None:
        """Commit the beginning of an epoch in which a commit may be due."""
        now_ms, place = self._host.now_ms(), self._place
        self._took_ms, self._began_ms = now_ms - self._began_ms, now_ms
        if phase is None or phase.number != place.phase or not self._may_need_commit:
            return
        extras = phase.objects.extras.items()
        phase.objects.extras = {
            k: _now(frame, self._paths.get(("extras", k)), v) for k, v in extras
        }
        loaders = {
            loop: {name: state_of(one) for name, one in data.parts().items()}
            for loop, data in phase.loops.items()
        }
        place.position = place.beginning
        phase.capture(paths=[*self._paths.items()], loaders=loaders)
        self.keep(phase)

    @property
    def _may_need_commit(self) -> bool:
        """True if a commit may be due before the epoch ends, or if it is the last epoch."""
        ms = max(self._took_ms, self._host.now_ms() - self._began_ms)
        is_due = self._place.is_last_epoch or self._timing.is_due_within(ms)
        may_commit = self._place.may_commit and not self._host.is_publishing
        return may_commit and (is_due or self._gate.is_evicting)

    def keep(self, phase: Phase, *, is_last: bool = False) -> None:
        """Commit the last point, and make room for the commits that contain it as well.

        Args:
            is_last: no loop follows in this epoch.
        """
        point, committer, layout = phase.point, phase.committer, phase.layout
        if point is None or not self._may_need_commit:
            return
        if phase.is_whole():
            phase.commit_point()
            committer.end_loop(point)
        older_bytes = committer.older.own_bytes + committer.older.older_bytes
        has_next = committer.older.last == point.position.order and not is_last
        if has_next and older_bytes > phase.older_bytes and not self._gate.is_evicting:
            self._gate.leave()
            room_bytes = layout.image_bytes + older_bytes
            try:
                self._host.lease(layout.slice_bytes, room_bytes, is_same=True)
                phase.older_bytes, committer.room_bytes = older_bytes, room_bytes
            except HostStoreFull as error:
                text = "commits are made only between epochs, because a commit within an epoch "
                text += f"also contains the state of the epoch's beginning: {error}"
                self._reports.warn_once("room", text, UserWarning)
            except TaskPreempted:  # the script unwinds at its next layer
                pass

    def resume(self, saved: SavedImage, frame: FrameType, bind: Callable[..., Phase]) -> None:
        """Restore the state at an epoch's beginning, before the epoch's code runs."""
        place, position = self._place, saved.position
        place.step = saved.values.get("epoch_step", position.step)
        beginning = saved.at((position.phase, position.epoch, BEGINNING))
        objects = None if beginning is None else _objects_at(frame, beginning, self.initial)
        self.is_restored = objects is not None or position.epoch <= 0
        if beginning is not None and objects is not None:
            place.entry.setdefault("beginning", saved.values["beginning"])
            phase, options = bind(objects), beginning.options
            phase.is_early, phase.data = True, DataPosition((), objects.extras)
            options["extras"] = {name: options["extras"][name] for name in objects.extras}
            phase.restore(beginning)
            for (kind, name), path in beginning.values["paths"]:
                if kind == "data" and (one := _value(frame, path, None)) is not None:
                    load_state(one, beginning.values["loaders"][name[0]][name[1]])
            persistent_loaders.restore(beginning.data("data").workers)
            if beginning is saved:
                place.position = position
                self.resumed(phase, saved)
        elif not self.is_restored:
            self.warn_of_other_state(saved)
        saved.random("epoch_random").restore(self._host.device)

    def resumed(self, phase: Phase, saved: SavedImage) -> None:
        """Begin with the restored state as the last point."""
        if self._place.reached(saved):
            phase.capture()
            phase.committer.committed, phase.committer.older = phase.point, Older.of(saved)
            sys.stderr.write(f"the job continues after step {self._place.step}\n")
            self._host.report("resumed", step=self._place.step, epoch=self._place.position.epoch)

    def values(self, frame: FrameType) -> Iterator[Any]:
        """Yield what the script has now at the paths of the objects that it passed."""
        for one in self._paths.values():
            for path in one.values() if isinstance(one, dict) else [one]:
                yield _value(frame, path, None)

    def warn_of_other_state(self, saved: SavedImage) -> None:
        self._reports.warn_once(
            "state",
            f"epoch {saved.position.epoch}: its code before job.steps runs again with another "
            "state, which is not in the last commit, or has no variables there. Create models, "
            "optimizers and schedulers before job.epochs",
        )

    def find(self, phase: Phase, loop: int, frame: FrameType) -> None:
        """Find the paths of a loop's objects; ``frame`` calls ``job.steps``."""
        paths, frames = self._paths, script_frames(frame)[: len(self._variables)]
        values = phase.objects.extras.get(AUTO)
        if isinstance(values, ScriptValues):  # it finds the variables itself
            paths["extras", AUTO] = AUTO
        objects = {
            key: one
            for key, one in _named(phase.objects, loop, phase.data)
            if key not in paths or _value(frame, paths[key], one) is not one
        }
        if not objects or self._walks >= MAX_WALKS or not self._place.in_epochs:
            return
        self._walks += 1
        ids = {id(part) for one in objects.values() for part in _leaves(one)}

        def unchanged(one: FrameType) -> list[str]:
            then = self._variables[frames.index(one)]
            return [name for name, value in one.f_locals.items() if then.get(name) == id(value)]

        by_id: dict[int, Any] = {}
        for path, value in walk(frames, unchanged, is_private=True):
            if id(value) in ids:
                by_id.setdefault(id(value), path)
                if len(by_id) == len(ids):
                    break
        paths.update({key: _path(one, by_id) for key, one in objects.items()})
        others = {id(one): key for key, one in objects.items() if not paths[key]}
        own = expressions(frame, others) if others else {}  # made by the epoch's own code
        names = [f"{k} {n!r}" for i, (k, n) in others.items() if i not in own and k != "data"]
        if names:
            self._reports.warn_once(
                "path",
                f"{', '.join(names[:4])}: no variable of the function with job.epochs, or of its "
                "callers, leads to this. In a resumed script the code between job.epochs and "
                "job.steps runs before it is restored. Assign it to a variable or attribute",
            )


def _named(
    objects: TrainedObjects, loop: int, data: DataPosition
) -> Iterator[tuple[tuple[str, Any], Any]]:
    for kind in KINDS:
        items = objects.wrapped if kind == "optimizers" else getattr(objects, kind)
        yield from (((kind, name), one) for name, one in items.items())
    yield from ((("data", (loop, name)), one) for name, one in data.parts().items())


def _parts(one: Any) -> dict[Any, Any]:
    parts = one if type(one) is dict else dict(enumerate(one)) if type(one) is list else {}
    return {} if len(parts) > MAX_PARTS else parts


def _leaves(one: Any) -> Iterator[Any]:
    yield one
    for part in _parts(one).values():
        yield from _leaves(part) if type(part) in NOTES or has_state(part) else ()


def _path(one: Any, by_id: Mapping[int, Any]) -> Any:
    if id(one) in by_id:
        return by_id[id(one)]
    return {name: path for name, part in _parts(one).items() if (path := _path(part, by_id))}


def _value(frame: FrameType, path: Any, default: Any) -> Any:
    """Return what the script has at a path, or None; for paths of parts or none, ``default``."""
    try:
        return resolve(frame, path) if isinstance(path, tuple) else default
    except LookupError:
        return None


def _now(frame: FrameType, path: Any, one: Any) -> Any:
    """Return what the script has now in place of an object: it may have replaced it, or a part."""
    if isinstance(path, dict) and path:
        parts = {name: _now(frame, path.get(name), part) for name, part in _parts(one).items()}
        return parts if type(one) is dict else [*parts.values()]
    now = _value(frame, path, one)
    return now if has_state(now) or type(now) in NOTES else one


def _object(frame: FrameType, path: Any, state: Any) -> Any:
    """Return the script's object at ``path`` if it can take ``state``, else None."""
    if isinstance(path, dict):
        parts = {name: _object(frame, one, state[name]) for name, one in path.items()}
        return [parts.get(i) for i in range(len(state))] if type(state) is list else parts or None
    one = _value(frame, path, None)
    return one if has_state(one) or (type(one) in NOTES and type(one) is type(state)) else None


def _objects_at(
    frame: FrameType, saved: SavedImage, initial: dict[Any, Any]
) -> TrainedObjects | None:
    """Return the objects of an epoch's beginning, or None if the script does not have all of them.

    ``extras`` may be missing: the code of the epoch makes them.
    """
    objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for (kind, name), path in saved.values.get("paths", ()):
        if path == AUTO:
            objects[kind][name] = ScriptValues(initial)
        elif kind in objects:
            objects[kind][name] = _object(frame, path, saved.options.get(kind, {}).get(name))
    models, optimizers, schedulers, extras = objects.values()
    is_whole = all(isinstance(one, nn.Module) for one in models.values())
    is_whole = is_whole and all(map(_is_optimizer, optimizers.values()))
    if not models or not is_whole or None in schedulers.values():
        return None
    try:
        extras = {name: one for name, one in extras.items() if one is not None}
        return TrainedObjects(models, optimizers, schedulers, extras)
    except InvalidInput:
        return None


def _is_optimizer(one: Any) -> bool:
    return one is not None and bool(hasattr(bare(one), "param_groups") or wrapped_by(one))
