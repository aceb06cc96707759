"""Search for the successors of states, in this process or in several processes."""

from __future__ import annotations

import gc
import marshal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.pool import Pool
from queue import SimpleQueue

from pipeswitch.extras.lab.device import Violation

from .choices import Action, actions, jumps
from .scope import Scope
from .world import World

# Actions that may never happen. A state of rest must be reachable without them.
FAULTS = frozenset(
    {
        "kill",
        "kill_early",
        "struck_early",
        "kill_daemon",
        "suspect",
        "tells_twice",
        "hears_twice",
        "daemon_hears_again",
        "daemon_tells_twice",
        "cancel",
        "drain",
        "hint",
        "passes",
        "cycle",
        "daemon_fails_slice",
    }
)

CHUNK = 64  # states that are sent to a process together
GARBAGE_EVERY = 100_000  # allocations between garbage collections, which find almost nothing
DIGEST_BYTES = 12  # the probability that two of 10^6 states have one digest is below 10^-16

# How many states of the scheduler a process caches, at about 3 KiB each. With a cache for a quarter
# of a scope's states, the search takes 1.5 times as long.
MAX_MOMENTS = 150_000

State = tuple[int, bytes]  # ``Moment.home`` of the scheduler's state, and the frozen state
Edge = tuple[Action, bytes, State | None]  # action, successor's digest, and successor if it is new
Frontier = list[tuple[int, State]]  # numbered states
Expand = Callable[[list[Frontier]], Iterator[tuple[Frontier, list["Expanded"]]]]


@dataclass
class Expanded:
    """Successors of a state, or the violation that an action leads to."""

    edges: list[Edge] = field(default_factory=list)
    is_rest: bool = False  # True if only faults can follow, and the checks of rest have passed
    broken: tuple[Action | None, str] | None = None


def digest_of(frozen: bytes) -> bytes:
    """Return a short hash of a state, by which states are compared."""
    return blake2b(frozen, digest_size=DIGEST_BYTES).digest()


class Expander:
    """Finder of a state's successors. Each process has one."""

    def __init__(self, scope: Scope) -> None:
        self.world = World(scope)
        self._told: set[bytes] = set()  # digests of the states that were already returned

    def expand(self, frozen: bytes) -> Expanded:
        """Return every successor of a state."""
        world, expanded = self.world, Expanded()
        world.recall.forget(MAX_MOMENTS)
        state = marshal.loads(frozen)
        world.thaw(state)
        possible, later = actions(world), jumps(world)
        if world.suspicions:
            possible += [("suspect", *jump[1:]) for jump in later]
        if world.cycles and later:
            possible.append(("cycle", later[0][1]))
        goes_on = is_suspected = False
        for action in possible:
            if action[0] == "suspect" and is_suspected and world.scope.is_coarse:
                break  # one instant at which a worker counts as hung is enough
            if not self._follow(state, action, expanded):
                if expanded.broken:
                    return expanded
                continue
            goes_on |= action[0] not in FAULTS
            is_suspected |= action[0] == "suspect"
        if not goes_on:
            self._at_rest(state, later[:1], expanded)
        return expanded

    def _follow(self, state: object, action: Action, expanded: Expanded) -> bool:
        world = self.world
        world.thaw(state)
        try:
            if not world.apply(action):
                return False
        except Violation as violation:
            expanded.broken = (action, str(violation))
            return False
        frozen = world.freeze()
        digest = digest_of(frozen)
        is_news = digest not in self._told
        self._told.add(digest)
        home = world.recall.moment.home
        expanded.edges.append((action, digest, (home, frozen) if is_news else None))
        return True

    def _at_rest(self, state: object, later: list[Action], expanded: Expanded) -> None:
        """Handle a state in which only faults are possible: advance the clock, or check rest."""
        for jump in later:
            self._follow(state, jump, expanded)
            return
        self.world.thaw(state)
        try:
            self.world.check_rest()
            expanded.is_rest = True
        except Violation as violation:
            expanded.broken = (None, str(violation))


_expander: Expander | None = None


def begin(scope: Scope) -> None:
    global _expander
    _expander = Expander(scope)


def begin_process(scope: Scope) -> None:
    gc.set_threshold(GARBAGE_EVERY)
    begin(scope)


def _expand(chunk: list[bytes]) -> list[Expanded]:
    assert _expander is not None
    return [_expander.expand(frozen) for frozen in chunk]


def here(chunks: list[Frontier]) -> Iterator[tuple[Frontier, list[Expanded]]]:
    """Yield each chunk with the successors of its states, found in this process."""
    for chunk in chunks:
        yield chunk, _expand([frozen for _, (_, frozen) in chunk])


class Elsewhere:
    """Search for successors in several processes.

    All states with one scheduler state go to one process, which then has the results in its cache.
    At the end of a level of the search, a process without work takes chunks from other processes.
    """

    def __init__(self, pools: list[Pool]) -> None:
        self._pools = pools

    def __call__(self, chunks: list[Frontier]) -> Iterator[tuple[Frontier, list[Expanded]]]:
        count = len(self._pools)
        waiting: list[list[Frontier]] = [[] for _ in range(count)]
        for chunk in chunks:
            waiting[chunk[0][1][0] % count].append(chunk)
        answers: SimpleQueue[tuple[int, Frontier, list[Expanded] | BaseException]] = SimpleQueue()

        def give(which: int) -> bool:
            source = waiting[which] or max(waiting, key=len)
            if not source:
                return False
            chunk = source.pop()
            self._pools[which].apply_async(
                _expand,
                ([frozen for _, (_, frozen) in chunk],),
                callback=lambda result: answers.put((which, chunk, result)),
                error_callback=lambda error: answers.put((which, chunk, error)),
            )
            return True

        under_way = sum(give(which) for which in range(count) for _ in range(2))
        while under_way:
            which, chunk, result = answers.get()
            under_way -= 1
            if isinstance(result, BaseException):
                raise result
            under_way += give(which)
            yield chunk, result
