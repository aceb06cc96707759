"""Progress reports of a session, and the values that the script logs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import torch

from pipeswitch.job import InexactResumeWarning, as_number, script_level

from .host import JobHost

REPORT_EVERY_MS: Final = 100.0  # a fast loop must not flood the controller
MAX_NAMES: Final = 64  # of values that are not restored, in one report
FETCHES: Final = 16  # recent fetches over which ``away_ms`` is averaged


class Reports:
    """Reports to the controller; a progress report is due after ``REPORT_EVERY_MS``."""

    def __init__(self, host: JobHost) -> None:
        self._host = host
        self.warned: set[str] = set()  # keys of warnings that were given
        self._log: dict[str, float] = {}
        self._at_ms = 0.0
        self._away_ms: deque[float] = deque(maxlen=FETCHES)

    def warn_once(self, key: str, text: str, kind: type[Warning] = InexactResumeWarning) -> None:
        """Warn the script, once for each key."""
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(text, kind, stacklevel=script_level())

    def inexact(self, key: str, text: str, step: int) -> None:
        """Report how a resume may differ, and mark ``key`` as reported; the log has details."""
        self.warned.add(key)
        text = f"{text} (see its log)"
        self._host.report("warning", what="inexact_resume", text=text, step=step)

    def not_restored(self, names: Sequence[str], text: str, step: int) -> None:
        """Report expressions whose values a resumed script would not have."""
        names, text = [*names[:MAX_NAMES]], f"{text} (see its log)"
        self._host.report("warning", what="not_restored", text=text, step=step, names=names)

    @property
    def are_due(self) -> bool:
        return self._host.now_ms() >= self._at_ms

    def log(self, values: Mapping[str, Any], step: int) -> dict[str, float]:
        """Store the values in the job's history, and return them as numbers.

        Values on a device are slow to read, so they are skipped unless a report is due.
        """
        due = self.are_due
        known: dict[str, float] = {}
        for name, value in values.items():
            if due or not (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
                self._log[name] = known[name] = as_number(value, name)
        if known:
            self._host.remember(step, known)
        return known

    def was_away(self, ms: float) -> None:
        """Record ms that the job spent off the device for a fetch or for the last step's copies."""
        self._away_ms.append(ms)

    def progress(self, step: int, epoch: int, steps_left: int, **activations: Any) -> None:
        """Report progress. ``steps_left``: steps until the job ends; -1 if unknown."""
        self._at_ms = self._host.now_ms() + REPORT_EVERY_MS
        self._host.flush()
        more = {"activations": activations} if activations else {}
        log, away = dict(self._log), round(fmean(self._away_ms)) if self._away_ms else -1
        self._host.report(
            "progress", step=step, epoch=epoch, left=steps_left, away_ms=away, log=log, **more
        )
        self._log.clear()
