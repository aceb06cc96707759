"""Settings of one exploration: a small world, and the number of faults of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .channel import IMAGE_BYTES

MIB: Final = 1 << 20
CYCLE_MS: Final = 1000.0  # how long a job trains before another job gets the device
GRACE_MS: Final = 30000.0  # all grace periods are equal, so that one jump of the clock ends them


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A training job, some requests and some faults, explored in every possible order.

    Numbers of faults. ``kills``: kills of workers, each at any step. ``daemon_kills``: kills of the
    memory daemon. ``suspicions``: jumps of the clock to a wake-up of the scheduler, at which a slow
    worker counts as hung; the scheduler kills it while it still acts. ``late``: exits that are
    reported before the process's last messages. ``repeats``: messages that arrive a second time
    before the channel's next message. They come from a worker or from the memory daemon, or are a
    signal to a worker, or an order to copy a commit.

    ``is_coarse``: larger moves, for larger scopes. The job is submitted at the start. Processes
    are ready at once, and signals arrive at once. All messages of a channel are handled together,
    and so are the memory daemon's results. An optimizer step, a commit and a scrub are one move
    each. Faults without effect are left out: kills of an idle standby, and jumps of the clock after
    which no worker counts as hung."""

    name: str
    steps: int = 3
    has_job: bool = True
    jobs: int = 1
    training: str = "rotate"  # the policy that chooses the next job
    cycles: int = 0  # ends of a training cycle while the other job waits, or during a slow step
    requests: int = 2
    kills: int = 0
    daemon_kills: int = 0
    suspicions: int = 0
    late: int = 0
    pauses: int = 0  # pauses by the user, each with a resume
    repeats: int = 0
    deadlines: int = 0  # number of requests, counted from the last, whose deadline may expire
    cancels: int = 0  # requests that their clients cancel
    hints: int = 0  # announcements of a request, without the request
    moves: int = 0  # moves of the job to the other device
    pins: int = 0  # pins of the first model by the operator
    drains: int = 0  # orders to finish all accepted requests and then to stop the server
    models: int = 2
    devices: int = 1
    placement: str = "least-finish"
    limited: str = ""  # models that only the last device may serve
    daemon_restarts: int = 9  # maximum, never reached; 0: a device whose daemon dies is given up
    asks: str = ""  # a letter per request for its model; empty: all models in turn
    callers: str = ""  # a letter per request for its caller; empty: one caller
    runs: int = 0  # tokens of each request, which is then a generation; 0: no generations
    parks: int = 0  # how often a generation has to wait for room before its next run
    batch: int = 0  # largest batch; a request waits up to DEADLINE_MS for others
    groups: int = 1
    arena_mib: int = 8  # the fences and the slice take 2 MiB each
    model_mib: int = 4
    are_variants: bool = False  # the models differ in the last of their tensors, four or more
    small_mib: int = 0  # size of all models but the first, in one group; 0: all have one size
    standby: int = 1
    max_swapped: int = 2
    slices_move: bool = True
    store_mib: int = 64
    slice_errors: int = 0  # copies of slices that fail
    commit_steps: tuple[int, ...] = (1, 2, 3, 4)  # steps after which the job commits
    holds: bool = False  # a stop holds a script's kernels in their stream
    is_coarse: bool = False
    hears_late: bool = False  # if True, signals do not arrive at once, even in a coarse scope
    max_deaths: int = 9  # maximum of workers' deaths per request, never reached

    slice_bytes = 2 * MIB
    state_bytes = IMAGE_BYTES
    fence_count = 64
    grace_ms = GRACE_MS

    def size_of(self, model: str) -> tuple[int, int]:
        """Return a model's size in bytes and its number of groups."""
        if self.small_mib and model != "A":
            return self.small_mib * MIB, 1
        return self.model_mib * MIB, self.groups

    @property
    def store_bytes(self) -> int:
        return self.store_mib * MIB

    @property
    def arena_bytes(self) -> int:
        return self.arena_mib * MIB

    def describe(self) -> str:
        """Return the scope as one line of text."""
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
            f"{self.slice_errors} failed copies of slices",
            f"{devices} devices",
            f"arena {self.arena_mib} MiB",
        ]
        return f"{self.name}: " + ", ".join(part for part in parts if not part.startswith("0 "))
