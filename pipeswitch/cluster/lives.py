"""What becomes of jobs when nodes come and go. Pure: what each node keeps goes in, orders come out.

A job has one life at a time. Each start of it, on whichever node, is a life with a number higher
than those before, and that number goes with everything that is said of it: what speaks of a lower
one is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """What one node keeps of a job."""

    life: int
    state: str  # home: it lives there; replica; over: it has ended there
    step: int = -1  # of the commit on disk; -1: none yet
    is_paused: bool = False  # by its user
    is_held: bool = False  # by us: its node heard nothing for a while, or it was to be moved
    at: tuple[str, ...] = ()  # nodes that may have a replica; a home and an end know them all


class Order(NamedTuple):
    """For a node: one of its verbs."""

    node: str
    verb: str
    job: str
    args: tuple[int | tuple[str, ...], ...] = ()
    to: str = ""  # of ``send``: another node


Copies = Mapping[str, Mapping[str, Copy]]  # by node, by job
Claims = Mapping[str, Mapping[str, int]]  # by node that starts: the lives that it would go on with


def last_life(job: str, copies: Copies, claims: Claims) -> int:
    """The highest number that anybody knows; 0: none."""
    lives = [kept[job].life for kept in copies.values() if job in kept]
    return max(lives + [one[job] for one in claims.values() if job in one], default=0)


def homes_of(job: str, copies: Copies) -> list[str]:
    """The nodes where it lives, the latest life first: one, or a node has come back."""
    held = [
        (kept[job].life, node) for node, kept in copies.items()
        if job in kept and kept[job].state == "home"
    ]  # fmt: skip
    return [node for _, node in sorted(held, reverse=True)]


def homeless(copies: Copies, claims: Claims) -> set[str]:
    """Jobs of which there are replicas alone."""
    known = {job for kept in copies.values() for job in kept}
    claimed = {job for one in claims.values() for job in one}
    return {
        job for job in known - claimed
        if all(kept[job].state == "replica" for kept in copies.values() if job in kept)
    }  # fmt: skip


def lost(node: str, copies: Copies, claims: Claims) -> set[str]:
    """Of what a node that starts would go on with, the jobs that live elsewhere by now."""
    others = [(claims[one], one) for one in claims if one != node]
    return {
        job for job, life in claims[node].items()
        if any(one != node for one in homes_of(job, copies))
        or any((lives.get(job, -1), one) > (life, node) for lives, one in others)
    }  # fmt: skip


def orders(
    copies: Copies, claims: Claims, targets: Sequence[str], given_up: Collection[str],
    tried: Mapping[str, str],
) -> Iterator[Order]:  # fmt: skip
    """What is to be done now, for each job.

    Args:
        copies: of the nodes that answer.
        targets: where a new replica may lie, the best first.
        given_up: jobs that have had no home for so long that theirs does not come back.
        tried: the node on which a job's last start failed.
    """
    claimed = {job for one in claims.values() for job in one}  # its node is about to go on with it
    for job in sorted({job for kept in copies.values() for job in kept} - claimed):
        rows = {node: kept[job] for node, kept in copies.items() if job in kept}
        last = last_life(job, copies, claims)
        homes = homes_of(job, copies)
        over = [node for node, copy in rows.items() if copy.state == "over"]
        replicas = [node for node, copy in rows.items() if copy.state == "replica"]
        if homes:
            stale = [node for node in over if rows[node].life < rows[homes[0]].life]
            yield from (Order(node, "drop", job, (last,)) for node in homes[1:] + stale)
            yield from _replicate(job, homes[0], rows, replicas, targets)
        elif over:
            yield from (Order(node, "drop", job, (last,)) for node in replicas)
            for node in over:
                gone = tuple(one for one in rows[node].at if one in copies and one not in rows)
                if gone or not rows[node].at:
                    yield Order(node, "settle", job, (gone,))
        elif job in given_up:
            best = max(replicas, key=lambda node: (rows[node].step, node != tried.get(job), node))
            yield Order(best, "take_over", job, (last + 1,))


def _replicate(
    job: str, home: str, rows: Mapping[str, Copy], replicas: list[str], targets: Sequence[str]
) -> Iterator[Order]:
    """One replica, as new as what the home has on disk; older ones go when it is."""
    copy = rows[home]
    if copy.is_held:
        yield Order(home, "go_on", job)
    there = [node for node in replicas if node in targets]
    kept = max(there, key=lambda node: (rows[node].step, node), default="")
    others = [node for node in targets if node not in (home, kept)]
    if not kept and not others:
        return  # there is one node alone
    target = kept or others[0]
    if target not in rows or rows[target][2:4] != (copy.step, copy.is_paused):
        yield Order(home, "send", job, to=target)
    else:
        yield from (Order(node, "drop", job, (copy.life,)) for node in replicas if node != target)
