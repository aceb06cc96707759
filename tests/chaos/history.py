"""What happened in a chaos run, and what must be true of it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

LASTING: Final = ("SIGSTOP", "hang", "slow peer")
LONG: Final = ("controller", "daemon", "device 2 daemon", "fork server")
LASTS_S: Final = 3.0  # a stopped process is found within two and a half
LANES: Final = {"gateway": "http", "stage": "staged"}  # of others: probe
RECOVERED_WITHIN_S: Final = 60.0  # no answer to anybody for that long: not survived


@dataclass(frozen=True)
class Outcome:
    """One request of the load, as its client saw it."""

    lane: str
    model: str
    sent_at_s: float
    ended_at_s: float
    kind: str  # ok, wrong, no answer, duplicate, or an error's type
    may_fail: bool = False  # it had a deadline, or was taken back


@dataclass(frozen=True)
class Fault:
    """One fault that was injected."""

    component: str
    fault: str
    at_s: float
    ends_controller: bool = False  # by design: one that has no state left to trust leaves

    def holds_up(self, other: Fault) -> bool:
        """Whether its own effect may last into the other's recovery."""
        lasts = self.fault in LASTING or self.component in LONG
        return lasts and 0 < other.at_s - self.at_s < LASTS_S


def lane_of(fault: Fault) -> str:
    """Whose requests show that a fault is over."""
    return LANES.get(fault.component, "probe")


@dataclass
class History:
    """Everything that is judged at the end; appended to by all threads (lists only grow)."""

    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    controller_downs: list[tuple[float, float]] = field(default_factory=list)  # from, to
    violations: list[str] = field(default_factory=list)

    def was_down(self, from_s: float, to_s: float) -> bool:
        """Whether the controller was away at some time between."""
        return any(down <= to_s and up >= from_s for down, up in self.controller_downs)

    def lost(self) -> list[Outcome]:
        """Requests that should have been answered and were not.

        A typed error is an answer. ``ServerUnavailable`` is one only if the controller was away,
        ``SequenceNotFound`` only if it was since the sequence began;
        a request that cannot fail must not be told of a deadline or a cancellation; and no more
        requests may be told that their model failed than errors were put into its code.
        """
        lost_outcomes = [outcome for outcome in self.outcomes if self._is_lost(outcome)]
        failed = [outcome for outcome in self.outcomes if outcome.kind == "TaskFailed"]
        return lost_outcomes + failed[self._failures_injected() :]

    def _failures_injected(self) -> int:
        """Each of them fires once, in the code of one request, which is told so."""
        return sum(
            fault.component in ("active worker", "stage")
            and fault.fault in ("exception", "OOM", "ENOSPC")
            for fault in self.faults
        )

    def _is_lost(self, outcome: Outcome) -> bool:
        match outcome.kind:
            case "ok" | "WorkerLost" | "ModelQuarantined" | "QueueFull" | "never accepted":
                return False
            case "TaskFailed":  # counted by lost()
                return False
            case "ServerUnavailable" | "SequenceNotFound" | "no answer to a raw request":
                return not self.was_down(outcome.sent_at_s, outcome.ended_at_s)
            case "hung up":  # to be asked again
                times = outcome.sent_at_s, outcome.ended_at_s
                return not (self.was_down(*times) or self._had_no_gateway(*times))
            case "DeadlineExceeded" | "Cancelled" | "CancelledError":
                return not outcome.may_fail
            case "duplicate":
                return False
            case _:
                return True

    def _had_no_gateway(self, from_s: float, to_s: float) -> bool:
        """Whether it had been killed, and its next life had answered nothing yet."""
        return any(
            fault.at_s <= to_s and fault.at_s + (self.recovery_s(fault) or to_s) >= from_s
            for fault in self.faults
            if (fault.component, fault.fault) == ("gateway", "kill -9")
        )

    def recovery_s(self, fault: Fault) -> float | None:
        """From the fault to the first good answer to a request that was sent after it; of a
        gateway's, through the gateway."""
        lane = lane_of(fault)
        times = [
            outcome.ended_at_s - fault.at_s
            for outcome in self.outcomes
            if outcome.lane == lane and outcome.kind == "ok" and outcome.sent_at_s >= fault.at_s
        ]
        return min(times, default=None)

    def report(self) -> dict[str, Any]:
        """The figures, as the JSON file has them."""
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
        """Of faults that end a worker's process at once, so that a standby takes over.

        ``alone``: no fault that leaves something stopped, slow or away came just before. Of the
        others, a request may have to wait for that one's end.
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
    """Of a sorted list, by nearest rank; None when it is empty."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
