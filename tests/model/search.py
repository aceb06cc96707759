"""Breadth-first search of every state, which reports a shortest path to a violation."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from .choices import Action
from .expand import (
    CHUNK,
    FAULTS,
    GARBAGE_EVERY,
    Elsewhere,
    Expand,
    Expanded,
    Frontier,
    begin,
    begin_process,
    digest_of,
    here,
)
from .scope import Scope
from .world import World


@dataclass
class Report:
    """Result of an exploration."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # CPU time of all processes, which other programs change little
    peak_mib: int = 0
    is_exhausted: bool = False
    violation: str = ""
    path: list[Action] = field(default_factory=list)  # from the start to the violation

    def line(self) -> str:
        """Return the result as one line of text."""
        end = "exhausted" if self.is_exhausted else "NOT exhausted"
        outcome = f"VIOLATION: {self.violation}" if self.violation else "no violation"
        return (
            f"{self.scope.describe()}: {self.states} states, {self.transitions} transitions, "
            f"depth {self.depth}, {self.wall_s:.1f} s ({self.cpu_s:.1f} s of CPU), "
            f"{self.peak_mib} MiB; {end}, {outcome}"
        )


class Exploration:
    """Search of all states of a scope.

    Args:
        processes: number of processes that search; 1 means only this process, so patches apply.
        most_states: number of states at which the search stops, with ``is_exhausted`` False.
    """

    def __init__(self, scope: Scope, *, processes: int = 1, most_states: int = 10**8) -> None:
        self.scope = scope
        self._processes = processes
        self._most_states = most_states
        self._index: dict[bytes, int] = {}
        self._parents = array("I")
        self._actions: list[Action] = []
        self._numbers: dict[Action, int] = {}
        self._by = array("H")  # state -> number of the action that led to it
        self._sources, self._targets = array("I"), array("I")  # edges without faults
        self._rests: list[int] = []
        self.report = Report(scope)

    def run(self, progress: Callable[[Report], None] | None = None) -> Report:
        """Explore until no state is left, or until the first violation."""
        began_s = time.monotonic()
        times = os.times()
        began_cpu_s = times.user + times.system + times.children_user + times.children_system
        report = self.report
        root = World(self.scope).freeze()
        self._add(digest_of(root), 0, ("start",))
        frontier: Frontier = [(0, (0, root))]
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
        mine, theirs = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        report.cpu_s = (
            sum(part for usage in (mine, theirs) for part in (usage.ru_utime, usage.ru_stime))
            - began_cpu_s
        )
        children_kib = self._processes * theirs.ru_maxrss * (self._processes > 1)
        report.peak_mib = (mine.ru_maxrss + children_kib) // 1024
        return report

    def _expanders(self) -> Iterator[Expand]:
        if self._processes == 1:
            begin(self.scope)
            threshold = gc.get_threshold()
            gc.set_threshold(GARBAGE_EVERY)
            try:
                yield here
            finally:
                gc.set_threshold(*threshold)
            return
        context = multiprocessing.get_context("fork")
        with ExitStack() as stack:
            pools = [
                stack.enter_context(context.Pool(1, begin_process, (self.scope,)))
                for _ in range(self._processes)
            ]
            yield Elsewhere(pools)
            for pool in pools:
                pool.close()
            for pool in pools:
                pool.join()

    def _level(self, frontier: Frontier, expand: Expand) -> Frontier:
        by_home: dict[int, Frontier] = {}
        for member in frontier:
            by_home.setdefault(member[1][0] % self._processes, []).append(member)
        chunks = [
            states[at : at + CHUNK]
            for states in by_home.values()
            for at in range(0, len(states), CHUNK)
        ]
        following: Frontier = []
        for chunk, answers in expand(chunks):
            for (source, _), expanded in zip(chunk, answers, strict=True):
                if not self.report.violation:
                    self._take(source, expanded, following)
        return [] if self.report.violation else following

    def _take(self, source: int, expanded: Expanded, following: Frontier) -> None:
        if expanded.broken is not None:
            action, self.report.violation = expanded.broken
            self.report.path = self._path(source) + ([action] if action is not None else [])
            return
        if expanded.is_rest:
            self._rests.append(source)
        self.report.transitions += len(expanded.edges)
        for action, digest, state in expanded.edges:
            target = self._index.get(digest)
            if target is None:
                assert state is not None
                target = self._add(digest, source, action)
                following.append((target, state))
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
        """Report a violation if some state cannot reach a state of rest without further faults."""
        count = len(self._index)
        first, following = [-1] * count, array("i", [-1]) * len(self._sources)
        for edge, target in enumerate(self._targets):  # builds a linked list of edges per target
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
