"""What is explored: a small world, and how many faults may strike it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .channel import IMAGE_BYTES

MIB: Final = 1 << 20
CYCLE_MS: Final = 1000.0  # of training, in turns
GRACE_MS: Final = 30000.0  # one for all: a jump of the clock lets all of them run out


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A training job, some requests, some faults; every order of everything.

    ``kills``: of workers, each at any step. ``daemon_kills``: of the memory daemon. ``suspicions``:
    the clock jumps to an instant at which the scheduler wants to look again, so that a worker
    that is merely slow is taken for hung and killed while it still acts. ``late``: an exit that
    overtakes what the process had said. ``repeats``: a message that arrives twice, the second time
    before any later one of its channel: from a worker, a signal to one, from the memory daemon, an
    order to commit to it.

    ``is_coarse``: larger moves, for larger scopes; the fine ones take all of this apart. The job
    is there from the start. A process is ready when it is spawned, a signal is heard when it is
    sent, all that a channel holds is heard together, what the memory daemon has done is known at
    once, an optimizer step, a commit and a scrub are one move each. Faults that change nothing
    (an idle standby dies and is replaced, the clock jumps and no worker is suspected) are left
    out; it jumps to the first instant at which one is.
    """

    name: str
    steps: int = 3
    has_job: bool = True
    jobs: int = 1
    training: str = "rotate"  # which of them is next
    cycles: int = 0  # that end while the other job waits, or a step that was to end has not
    requests: int = 2
    kills: int = 0
    daemon_kills: int = 0
    suspicions: int = 0
    late: int = 0
    pauses: int = 0  # and as many resumptions, by the user
    repeats: int = 0
    deadlines: int = 0  # so many of the last requests carry one; it may pass while all are slow
    cancels: int = 0  # of requests, by their clients
    hints: int = 0  # that a request for a model will come
    moves: int = 0  # of the job, to the other device
    pins: int = 0  # of the first model, by the operator; it stays pinned
    drains: int = 0  # the server is asked to finish what it has accepted and to leave
    models: int = 2
    devices: int = 1
    placement: str = "least-finish"
    limited: str = ""  # models that only the last device may serve
    daemon_restarts: int = 9  # more than can happen; 0: a device whose daemon dies is given up
    asks: str = ""  # the requests' models; empty: in turns
    callers: str = ""  # who sends each request; empty: one for all
    runs: int = 0  # of each request, a generation of so many tokens; 0: they are no generations
    parks: int = 0  # times that one has no room for its next run, for a while
    batch: int = 0  # up to which requests are joined; one waits for others as long as a deadline
    groups: int = 1
    arena_mib: int = 8  # fences take 2, the slice 2
    model_mib: int = 4
    small_mib: int = 0  # of all models but the first, which have one group; 0: they are alike
    standby: int = 1
    commit_steps: tuple[int, ...] = (1, 2, 3, 4)  # at other boundaries nothing is committed
    is_coarse: bool = False
    hears_late: bool = False  # in a coarse scope: signals take their time all the same
    max_deaths: int = 9  # the same of workers: no request may fail

    slice_bytes = 2 * MIB
    state_bytes = IMAGE_BYTES
    store_bytes = 64 * MIB
    fence_count = 64
    grace_ms = GRACE_MS

    def size_of(self, model: str) -> tuple[int, int]:
        """Its bytes and groups."""
        if self.small_mib and model != "A":
            return self.small_mib * MIB, 1
        return self.model_mib * MIB, self.groups

    @property
    def arena_bytes(self) -> int:
        return self.arena_mib * MIB

    def describe(self) -> str:
        """The scope in one line."""
        steps, devices = self.steps * self.has_job, self.devices * (self.devices > 1)
        parts = [
            f"{steps} steps",
            f"{self.requests} requests",
            f"{self.kills} kills",
            f"{self.suspicions} false suspicions",
            f"{self.daemon_kills} daemon deaths",
            f"{self.late} late messages",
            f"{self.pauses} pauses",
            f"{self.repeats} repeated messages",
            f"{self.deadlines} deadlines",
            f"{self.cancels} cancels",
            f"{self.hints} hints",
            f"{self.drains} drains",
            f"{self.moves} moves",
            f"{self.pins} pins",
            f"{devices} devices",
            f"arena {self.arena_mib} MiB",
        ]
        return f"{self.name}: " + ", ".join(part for part in parts if not part.startswith("0 "))
