"""Visits every state, breadth first, so the first violation found has a shortest story."""

from __future__ import annotations

import gc
import marshal
import multiprocessing
import os
import resource
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from .scope import Scope
from .world import Action, Violation, World

FAULTS = frozenset({"kill", "kill_early", "struck_early", "kill_daemon", "suspect", "tells_twice"})
CHUNK = 64  # states that go to a process at once
GARBAGE_EVERY = 100_000  # objects: nearly all that is made here is no garbage, or falls at once
DIGEST_BYTES = 12  # two of 10^6 states share one with a chance below 10^-16

Edge = tuple[Action, bytes, bytes | None]  # the state's digest; its bytes when they are news


@dataclass
class Expanded:
    """What follows a state: its successors, or why it must not be."""

    edges: list[Edge] = field(default_factory=list)
    is_rest: bool = False  # nothing more happens by itself, and all is in order
    broken: tuple[Action | None, str] | None = None


@dataclass
class Report:
    """What an exploration found."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of all processes; what counts on a busy machine
    peak_mib: int = 0
    is_exhausted: bool = False
    violation: str = ""
    path: list[Action] = field(default_factory=list)  # from the start to the violation

    def line(self) -> str:
        """For people."""
        end = "exhausted" if self.is_exhausted else "NOT exhausted"
        found = f"VIOLATION: {self.violation}" if self.violation else "no violation"
        return (
            f"{self.scope.describe()}: {self.states} states, {self.transitions} transitions, "
            f"depth {self.depth}, {self.wall_s:.1f} s ({self.cpu_s:.1f} s of CPU), "
            f"{self.peak_mib} MiB; {end}, {found}"
        )


class Expander:
    """Finds what follows a state. One in each process."""

    def __init__(self, scope: Scope) -> None:
        self.world = World(scope)
        self._told: set[bytes] = set()  # whose bytes were handed out
        self._is_fresh = False  # thawed, and nothing done since

    def expand(self, frozen: bytes) -> Expanded:
        """Every successor of one state."""
        world, found = self.world, Expanded()
        state = marshal.loads(frozen)
        world.thaw(state)
        self._is_fresh = True
        actions = world.actions()
        jumps = world.jumps()
        if world.suspicions:
            actions += [("suspect", *jump[1:]) for jump in jumps]
        goes_on = is_suspected = False
        for action in actions:
            if action[0] == "suspect" and is_suspected and world.scope.is_coarse:
                break  # the first instant at which somebody is taken for hung is enough
            if not self._follow(state, action, found):
                if found.broken:
                    return found
                continue
            goes_on |= action[0] not in FAULTS
            is_suspected |= action[0] == "suspect"
        if not goes_on:
            self._at_rest(state, jumps[:1], found)
        return found

    def _follow(self, state: object, action: Action, found: Expanded) -> bool:
        world = self.world
        if not self._is_fresh:
            world.thaw(state)
        self._is_fresh = False
        try:
            if not world.apply(action):
                return False
        except Violation as violation:
            found.broken = (action, str(violation))
            return False
        frozen = world.freeze()
        digest = blake2b(frozen, digest_size=DIGEST_BYTES).digest()
        is_news = digest not in self._told
        self._told.add(digest)
        found.edges.append((action, digest, frozen if is_news else None))
        return True

    def _at_rest(self, state: object, jumps: list[Action], found: Expanded) -> None:
        """Nothing happens by itself any more: time passes, or all must be in order."""
        for jump in jumps:
            self._follow(state, jump, found)
            return
        self.world.thaw(state)
        try:
            self.world.check_rest()
            found.is_rest = True
        except Violation as violation:
            found.broken = (None, str(violation))


_expander: Expander | None = None


def _begin(scope: Scope) -> None:
    global _expander
    _expander = Expander(scope)


def _begin_process(scope: Scope) -> None:
    gc.set_threshold(GARBAGE_EVERY)
    _begin(scope)


def _expand(chunk: list[bytes]) -> list[Expanded]:
    assert _expander is not None
    return [_expander.expand(frozen) for frozen in chunk]


class Exploration:
    """All states of a scope, and the ways between them.

    Args:
        processes: that expand states; 1 does it in this one (so that a patch is seen).
        most_states: give up beyond it; the report says so.
    """

    def __init__(self, scope: Scope, *, processes: int = 1, most_states: int = 10**8) -> None:
        self.scope = scope
        self._processes = processes
        self._most_states = most_states
        self._index: dict[bytes, int] = {}
        self._parents = array("I")
        self._actions: list[Action] = []
        self._numbers: dict[Action, int] = {}
        self._by = array("H")  # the action that led to a state
        self._sources, self._targets = array("I"), array("I")  # edges that are no faults
        self._rests: list[int] = []
        self.report = Report(scope)

    def run(self, progress: Callable[[Report], None] | None = None) -> Report:
        """Explore until nothing is left, or the first violation."""
        began_s = time.monotonic()
        times = os.times()
        began_cpu_s = times.user + times.system + times.children_user + times.children_system
        report = self.report
        root = World(self.scope).freeze()
        self._add(blake2b(root, digest_size=DIGEST_BYTES).digest(), 0, ("start",))
        frontier = [(0, root)]
        for expand in self._expanders():
            while frontier and not report.violation and len(self._index) < self._most_states:
                frontier = self._level(frontier, expand)
                report.depth += 1
                report.states, report.wall_s = len(self._index), time.monotonic() - began_s
                if progress is not None:
                    progress(report)
        report.is_exhausted = not frontier and not report.violation
        if report.is_exhausted:
            self._require_ways_out()
        report.wall_s = time.monotonic() - began_s
        mine, theirs = (resource.getrusage(who) for who in
                        (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))  # fmt: skip
        report.cpu_s = sum(part for usage in (mine, theirs)
                           for part in (usage.ru_utime, usage.ru_stime)) - began_cpu_s  # fmt: skip
        children_kib = self._processes * theirs.ru_maxrss * (self._processes > 1)
        report.peak_mib = (mine.ru_maxrss + children_kib) // 1024
        return report

    def _expanders(self) -> Iterator[Callable[[Iterable[list[bytes]]], Iterator[list[Expanded]]]]:
        if self._processes == 1:
            _begin(self.scope)
            yield lambda chunks: map(_expand, chunks)
            return
        context = multiprocessing.get_context("fork")
        with context.Pool(self._processes, _begin_process, (self.scope,)) as pool:
            yield lambda chunks: pool.imap(_expand, chunks)
            pool.close()
            pool.join()

    def _level(
        self,
        frontier: list[tuple[int, bytes]],
        expand: Callable[[Iterable[list[bytes]]], Iterator[list[Expanded]]],
    ) -> list[tuple[int, bytes]]:
        starts = range(0, len(frontier), CHUNK)
        chunks = ([frozen for _, frozen in frontier[at : at + CHUNK]] for at in starts)
        following: list[tuple[int, bytes]] = []
        for at, answers in zip(starts, expand(chunks), strict=True):
            for (source, _), expanded in zip(frontier[at : at + CHUNK], answers, strict=True):
                self._take(source, expanded, following)
                if self.report.violation:
                    return []
        return following

    def _take(self, source: int, expanded: Expanded, following: list[tuple[int, bytes]]) -> None:
        if expanded.broken is not None:
            action, self.report.violation = expanded.broken
            self.report.path = self._path(source) + ([action] if action is not None else [])
            return
        if expanded.is_rest:
            self._rests.append(source)
        self.report.transitions += len(expanded.edges)
        for action, digest, frozen in expanded.edges:
            target = self._index.get(digest)
            if target is None:
                assert frozen is not None
                target = self._add(digest, source, action)
                following.append((target, frozen))
            if action[0] not in FAULTS:
                self._sources.append(source)
                self._targets.append(target)

    def _add(self, digest: bytes, source: int, action: Action) -> int:
        number = self._index[digest] = len(self._index)
        if action not in self._numbers:
            self._numbers[action] = len(self._actions)
            self._actions.append(action)
        self._parents.append(source)
        self._by.append(self._numbers[action])
        return number

    def _path(self, state: int) -> list[Action]:
        path: list[Action] = []
        while state:
            path.append(self._actions[self._by[state]])
            state = self._parents[state]
        return path[::-1]

    def _require_ways_out(self) -> None:
        """From each state, a state of rest is reached without any further fault."""
        count = len(self._index)
        first, following = [-1] * count, array("i", [-1]) * len(self._sources)
        for edge, target in enumerate(self._targets):  # edges by target, chained
            following[edge], first[target] = first[target], edge
        has_way = bytearray(count)
        waiting = list(self._rests)
        for state in waiting:
            has_way[state] = 1
        while waiting:
            edge = first[waiting.pop()]
            while edge >= 0:
                source = self._sources[edge]
                if not has_way[source]:
                    has_way[source] = 1
                    waiting.append(source)
                edge = following[edge]
        stuck = has_way.find(0)
        if stuck >= 0:
            self.report.violation = "from here nothing ever leads to rest"
            self.report.path = self._path(stuck)
