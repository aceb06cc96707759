"""Records of a chaos run, and checks of these records, without I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

LASTING: Final = ("SIGSTOP", "hang", "slow peer")
LONG: Final = ("controller", "daemon", "device 2 daemon", "fork server")
LASTS_S: Final = 3.0  # longest effect of a fault: a stopped process is detected within 2.5 s
LANES: Final = {"gateway": "http", "stage": "staged"}  # component -> lane; "probe" for the rest
RECOVERED_WITHIN_S: Final = 60.0  # limit of the time from a fault to the next good answer


@dataclass(frozen=True)
class Outcome:
    """Result of one request of the load, as its client has seen it."""

    lane: str
    model: str
    sent_at_s: float
    ended_at_s: float
    kind: str  # ok, wrong, no answer, duplicate, or the name of an error's class
    may_fail: bool = False  # True if the request had a deadline or was cancelled


@dataclass(frozen=True)
class Fault:
    """A fault that was injected."""

    component: str
    fault: str
    at_s: float
    ends_controller: bool = False  # True if the controller must exit, because its state is damaged

    def holds_up(self, other: Fault) -> bool:
        """Return True if this fault may still have an effect when ``other`` is injected."""
        lasts = self.fault in LASTING or self.component in LONG
        return lasts and 0 < other.at_s - self.at_s < LASTS_S


def lane_of(fault: Fault) -> str:
    """Return the lane (kind of load) whose answers show that the server has recovered."""
    return LANES.get(fault.component, "probe")


@dataclass
class History:
    """All records that are checked at the end. All threads append to the lists, which only grow."""

    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    controller_downs: list[tuple[float, float]] = field(default_factory=list)  # from, to (seconds)
    violations: list[str] = field(default_factory=list)

    def was_down(self, from_s: float, to_s: float) -> bool:
        """Return True if the controller was down at any time in this interval."""
        return any(down <= to_s and up >= from_s for down, up in self.controller_downs)

    def lost(self) -> list[Outcome]:
        """Return the requests that should have been answered, but were not.

        A typed error is an answer, with exceptions. ``ServerUnavailable`` is an answer only if the
        controller was down, ``SequenceNotFound`` only if it was down since the sequence began. An
        expired deadline or a cancellation is an answer only if the request may fail. ``TaskFailed``
        is an answer once per injected error.
        """
        lost_outcomes = [outcome for outcome in self.outcomes if self._is_lost(outcome)]
        failed = [outcome for outcome in self.outcomes if outcome.kind == "TaskFailed"]
        return lost_outcomes + failed[self._failures_injected() :]

    def _failures_injected(self) -> int:
        """Return the number of injected errors, each of which fails one request."""
        return sum(
            fault.component in ("active worker", "stage")
            and fault.fault in ("exception", "OOM", "ENOSPC")
            for fault in self.faults
        )

    def _is_lost(self, outcome: Outcome) -> bool:
        match outcome.kind:
            case "ok" | "WorkerLost" | "ModelQuarantined" | "QueueFull" | "never accepted":
                return False
            case "TaskFailed":  # ``lost`` itself counts these
                return False
            case "ServerUnavailable" | "SequenceNotFound" | "no answer to a raw request":
                return not self.was_down(outcome.sent_at_s, outcome.ended_at_s)
            case "hung up":  # allowed if the gateway ended: the client must send the request again
                times = outcome.sent_at_s, outcome.ended_at_s
                return not (self.was_down(*times) or self._had_no_gateway(*times))
            case "DeadlineExceeded" | "Cancelled" | "CancelledError":
                return not outcome.may_fail
            case "duplicate":
                return False
            case _:
                return True

    def _had_no_gateway(self, from_s: float, to_s: float) -> bool:
        """Return True if, during this interval, a killed gateway had no successor that answers."""
        return any(
            fault.at_s <= to_s and fault.at_s + (self.recovery_s(fault) or to_s) >= from_s
            for fault in self.faults
            if (fault.component, fault.fault) == ("gateway", "kill -9")
        )

    def recovery_s(self, fault: Fault) -> float | None:
        """Return the seconds from the fault to the first good answer of its lane that was requested
        after the fault; None without such an answer."""
        lane = lane_of(fault)
        times = [
            outcome.ended_at_s - fault.at_s
            for outcome in self.outcomes
            if outcome.lane == lane and outcome.kind == "ok" and outcome.sent_at_s >= fault.at_s
        ]
        return min(times, default=None)

    def report(self) -> dict[str, Any]:
        """Return the figures for the JSON report."""
        grid: dict[str, dict[str, Any]] = {}
        recovered = 0
        for fault in self.faults:
            cell = grid.setdefault(f"{fault.component} x {fault.fault}", {"count": 0, "s": []})
            seconds = self.recovery_s(fault)
            cell["count"] += 1
            if seconds is not None and seconds <= RECOVERED_WITHIN_S:
                recovered += 1
                cell["s"].append(seconds)
        return {
            "faults_injected": len(self.faults),
            "faults_survived": recovered,
            "requests": len(self.outcomes),
            "outcomes": dict(Counter(outcome.kind for outcome in self.outcomes).most_common()),
            "wrong": sum(outcome.kind == "wrong" for outcome in self.outcomes),
            "lost": len(self.lost()),
            "duplicated": sum(outcome.kind == "duplicate" for outcome in self.outcomes),
            "controller_restarts": len(self.controller_downs),
            "violations": self.violations,
            "lost_requests": [
                {"lane": o.lane, "model": o.model, "kind": o.kind, "at_s": o.sent_at_s}
                for o in self.lost()
            ][:20],
            "dead_worker_recovery_ms": self._dead_worker_ms(),
            "recovery": {name: _cell(cell) for name, cell in sorted(grid.items())},
        }

    def _dead_worker_ms(self) -> dict[str, Any]:
        """Return recovery times in ms after kills of workers, which standby workers replace.

        ``alone`` omits kills shortly after another fault whose effect lasts, because a request may
        have to wait for the end of that fault.
        """
        kills = [
            fault
            for fault in self.faults
            if fault.component in ("active worker", "standby worker") and fault.fault == "kill -9"
        ]
        alone = [kill for kill in kills if not any(other.holds_up(kill) for other in self.faults)]
        return {"all": self._times(kills), "alone": self._times(alone)}

    def _times(self, faults: list[Fault]) -> dict[str, Any]:
        seconds = [self.recovery_s(fault) for fault in faults]
        times_ms = sorted(1000.0 * s for s in seconds if s is not None)
        return {
            "count": len(faults),
            "p50": quantile(times_ms, 0.5),
            "p99": quantile(times_ms, 0.99),
            "max": quantile(times_ms, 1.0),
        }


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    times_ms = sorted(1000.0 * s for s in cell["s"])
    return {
        "count": cell["count"],
        "survived": len(times_ms),
        "recovery_ms_p50": quantile(times_ms, 0.5),
        "recovery_ms_p99": quantile(times_ms, 0.99),
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """Return a quantile of a sorted list, by nearest rank; None if the list is empty."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
