"""Reconciler of jobs when nodes come and go. Pure: nodes' states go in, actions come out.

A job has one *life* at a time. Each start on another node begins a life with a higher number, the
``incarnation``. All messages about the job have this number; those of an earlier life are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple


class JobReplica(NamedTuple):
    """Record of a job on one node."""

    incarnation: int
    state: str  # home (the job runs here), replica, over (it ended here), gone (it was removed)
    step: int = -1  # step of the commit on disk; -1: no commit yet
    is_paused: bool = False  # paused by its user
    is_held: bool = False  # paused by the cluster: the lease ended, or the job moves
    sent: frozenset[str] = frozenset()  # nodes that were sent a replica, in any life


class JobAction(NamedTuple):
    """Order to a node: the name of a method of ``NodeJobs``, and its arguments."""

    node: str
    verb: str
    job: str
    incarnation: int = 0
    to: str = ""  # for ``send``: the node that gets the replica


Copies = Mapping[str, Mapping[str, JobReplica]]  # node -> job -> what the node stores about it
Claims = Mapping[str, Mapping[str, int]]  # starting node -> job that it would continue -> life


def rows_of(job: str, copies: Copies) -> dict[str, JobReplica]:
    """Return what each node stores about a job."""
    return {node: records[job] for node, records in copies.items() if job in records}


def last_incarnation(job: str, copies: Copies, claims: Claims) -> int:
    """Return the highest life number that any node knows; 0: none."""
    incarnations = [copy.incarnation for copy in rows_of(job, copies).values()]
    return max(incarnations + [one[job] for one in claims.values() if job in one], default=0)


def homes_of(job: str, copies: Copies) -> list[str]:
    """Return the nodes where a job runs, latest life first; several if a node has come back."""
    rows = rows_of(job, copies).items()
    return [
        node
        for _, node in sorted(
            ((copy.incarnation, node) for node, copy in rows if copy.state == "home"), reverse=True
        )
    ]


def jobs_without_home(copies: Copies, claims: Claims) -> set[str]:
    """Return the jobs that have only replicas left."""
    claimed = {job for one in claims.values() for job in one}
    return {
        job
        for records in copies.values()
        for job in records
        if job not in claimed
        and all(copy.state == "replica" for copy in rows_of(job, copies).values())
    }


def superseded_jobs(node: str, copies: Copies, claims: Claims) -> set[str]:
    """Return the jobs that a starting node would continue, but that run elsewhere by now."""
    others = [(incarnations, one) for one, incarnations in claims.items() if one != node]
    return {
        job
        for job, incarnation in claims[node].items()
        if {*homes_of(job, copies)} - {node}
        or any(
            (incarnations.get(job, -1), one) > (incarnation, node) for incarnations, one in others
        )
    }


def plan_actions(
    copies: Copies, claims: Claims, targets: Sequence[str], given_up: Collection[str]
) -> Iterator[JobAction]:
    """Yield the actions that are due now, job by job.

    Args:
        copies: what each node that answers stores about its jobs.
        targets: nodes that may get a new replica, the best first.
        given_up: jobs whose home node has been silent for too long.
    """
    claimed = {job for one in claims.values() for job in one}  # a starting node will continue these
    for job in sorted({job for records in copies.values() for job in records} - claimed):
        rows, homes = rows_of(job, copies), homes_of(job, copies)
        last = last_incarnation(job, copies, claims)
        over = [node for node in rows if rows[node].state in ("over", "gone")]
        if homes:
            older = [node for node in over if rows[node].incarnation < rows[homes[0]].incarnation]
            yield from (JobAction(node, "drop", job, last) for node in homes[1:] + older)
            yield from _replicate(job, homes[0], rows, targets)
        elif over:
            replicas = [node for node in rows if node not in over]
            may_have = frozenset[str]().union(*(rows[node].sent for node in over))
            is_known = not replicas and may_have <= copies.keys()  # no silent node can restart it
            gone = [node for node in over if rows[node].state == "gone" and is_known]
            yield from (JobAction(node, "drop", job, last) for node in replicas + gone)
        elif job in given_up:
            best = max(rows, key=lambda node: (rows[node].incarnation, rows[node].step))
            yield JobAction(best, "take_over", job)


def _replicate(
    job: str, home: str, rows: Mapping[str, JobReplica], targets: Sequence[str]
) -> Iterator[JobAction]:
    """Keep one replica as new as the home's commit on disk; then drop the other replicas."""
    copy = rows[home]
    if copy.is_held:
        yield JobAction(home, "resume_if_paused", job)
    there = [node for node in targets if node in rows and rows[node].state == "replica"]
    others = [node for node in targets if node != home]
    if not others:
        return  # no other node can have a replica
    target = max(there, key=lambda node: rows[node].step, default=others[0])
    if target not in there or rows[target][2:4] != (copy.step, copy.is_paused):
        yield JobAction(home, "send", job, to=target)
        return
    more = (node for node in rows if rows[node].state == "replica" and node != target)
    yield from (JobAction(node, "drop", job, copy.incarnation) for node in more)
