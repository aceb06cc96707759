"""Warnings of values that a resumed script would not have: when to look, and what to say.

A loop's marks are compared when a commit is due and at its end; those of the first epoch's
beginning at each later epoch's. Each kind of look takes at most 0.5 % of the time, after its first
50 ms. So a change that a script makes seldom may be named later than it happens.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from pipeswitch.job import InexactResumeWarning, script_level

from .epochs import Epochs
from .loader_proxy import Source
from .phase import Phase
from .reports import Reports
from .script_values import AUTO, ScriptValues
from .script_watch import Changed, ScriptWatch
from .snapshot import has_state

SHARE: Final = 0.005
FREE_S: Final = 0.05
MAX_NAMED: Final = 6  # in one warning


class ScriptChanges:
    """The watches of one script: of its epochs' beginnings, and of the loop that runs."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._loop: ScriptWatch | None = None
        self._first: ScriptWatch | None = None  # the beginning of the first epoch
        self._since_first: list[Changed] = []
        self._allowances = Allowance(), Allowance()
        self._named: set[str] = set()
        self._has_told = False  # what ``extra_state="auto"`` keeps

    def begin_epoch(
        self, frame: FrameType, phase: Phase | None, epochs: Epochs, *, is_first: bool
    ) -> None:
        """Look at the beginning of an epoch; ``frame`` runs ``job.epochs``."""
        if is_first:
            self._first, self._since_first = None, []
        with self._allowances[0] as is_left:
            if self._first is None:
                self._first = ScriptWatch(frame)
            elif phase is not None and is_left:
                others = [*_parts(phase), *epochs.values(frame)]
                self._since_first = self._first.changed(frame, phase.objects, [], others)

    def begin_loop(self, frame: FrameType, phase: Phase, loader: Any) -> None:
        """Mark what the script has before a loop, and name what earlier epochs have changed."""
        self._loop = None
        if isinstance(loader, Source):  # a library's loop, whose own state is captured
            return
        values = phase.objects.extras.get(AUTO)
        if isinstance(values, ScriptValues) and not self._has_told:
            self._has_told = True
            sys.stderr.write(f"job.steps(extra_state='auto') keeps: {values.text}\n")
        with self._allowances[1] as is_left:
            if is_left or self._since_first:
                self._loop = watch = ScriptWatch(frame, phase.objects, loader, _parts(phase))
                # What the epoch's own code has just set is not missed.
                self._name([c for c in self._since_first if _is_kept(c, watch)], phase)
                self._since_first = []

    def look(self, frame: FrameType, phase: Phase, loader: Any) -> None:
        """Name what the loop has changed since it began."""
        if self._loop is not None and self._allowances[1].is_left:
            with self._allowances[1]:
                changed = self._loop.changed(frame, phase.objects, loader, _parts(phase))
                self._name(changed, phase)

    def _name(self, changed: list[Changed], phase: Phase) -> None:
        """Warn of expressions that were not named before."""
        values = phase.objects.extras.get(AUTO)
        paths = values.paths if isinstance(values, ScriptValues) else {}
        new = [
            one
            for one in changed
            if one not in self._named
            and not any(one.path[:length] in paths for length in range(1, len(one.path) + 1))
        ]
        if not new:
            return
        self._named.update(new)
        more = f" and {len(new) - MAX_NAMED} more" if len(new) > MAX_NAMED else ""
        what = f"{', '.join(new[:MAX_NAMED])}{more}"
        texts = f"{what}: the script changes this, but job.steps does not restore it"
        self._reports.not_restored([*map(str, new)], texts, phase.place.step)
        warnings.warn(
            f"job.steps: {texts}, so it starts over in a resumed script. To restore {new[0]}: "
            f"{new[0].help}",
            InexactResumeWarning,
            stacklevel=script_level(),
        )


class Allowance:
    """Limit of the time that looks take; as a context, it counts the time of one look."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._began_s, self._spent_s = now_s, now_s(), 0.0

    @property
    def is_left(self) -> bool:
        return self._spent_s < FREE_S + SHARE * (self._now_s() - self._began_s)

    def __enter__(self) -> bool:
        self._at_s = self._now_s()
        return self.is_left

    def __exit__(self, *_: object) -> None:
        self._spent_s += self._now_s() - self._at_s


def _parts(phase: Phase) -> list[Any]:
    """Return the loops' loaders, or the parts of them, that are captured."""
    loops = phase.loops.values()
    parts = [one for data in loops for one in data.parts().values()]
    return [*parts, *(data.loader for data in loops if has_state(data.loader))]


def _is_kept(one: Changed, now: ScriptWatch) -> bool:
    """Return False if this epoch's own code has just set the attribute, as in each life."""
    return one.is_carried or now.marks.get(one.path, one.mark)[0] == one.mark[0]
