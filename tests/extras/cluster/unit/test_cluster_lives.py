"""A job's life on nodes that fail and return, in a model of a cluster that executes its orders."""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.commits.progress import HANDED_ON, SUFFIX, Life, read_life
from pipeswitch.extras.cluster import node_jobs as jobs_module
from pipeswitch.extras.cluster.job_reconciler import (
    JobAction,
    JobReplica,
    homes_of,
    jobs_without_home,
    last_incarnation,
    plan_actions,
    superseded_jobs,
)
from pipeswitch.extras.cluster.node_jobs import NodeJobs

NODES = ("a", "b", "c")


class World:
    """Three nodes and one job. A node in ``away`` has failed: it keeps files, but runs no job."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, JobReplica]] = {node: {} for node in NODES}
        self.away: set[str] = set()
        self.step = 0  # the job's current step
        self.kept["a"]["j"] = JobReplica(1, "home")

    @property
    def copies(self) -> dict[str, dict[str, JobReplica]]:
        return {node: dict(records) for node, records in self.kept.items() if node not in self.away}

    def ordered(self, given_up: bool = True) -> list[JobAction]:
        copies = self.copies
        gone = jobs_without_home(copies, {}) if given_up else set()
        return list(plan_actions(copies, {}, sorted(copies), gone))

    def carry_out(self, order: JobAction) -> None:
        """Execute an order like a node, which first checks the order's number."""
        mine = self.kept[order.node]
        copy = mine.get(order.job)
        if order.node in self.away or copy is None:
            return
        if order.verb == "take_over" and copy.state == "replica":
            incarnation = last_incarnation(order.job, self.copies, {}) + 1
            mine[order.job] = copy._replace(incarnation=incarnation, state="home")
        elif order.verb == "drop" and copy.incarnation <= order.incarnation:
            del mine[order.job]
        elif order.verb == "send" and copy.state == "home" and order.to not in self.away:
            there = self.kept[order.to].get(order.job)
            copy = mine[order.job] = copy._replace(sent=copy.sent | {order.node, order.to})
            if there is None or (there.state != "home" and there.incarnation <= copy.incarnation):
                self.kept[order.to][order.job] = copy._replace(state="replica")

    def comes_back(self, *nodes: str) -> None:
        """Start nodes again at the same time; each node first reports the jobs that it has."""
        claims = {
            node: {
                job: copy.incarnation
                for job, copy in self.kept[node].items()
                if copy.state == "home"
            }
            for node in nodes
        }
        for node in nodes:
            for job in superseded_jobs(node, self.copies, claims):
                del self.kept[node][job]
        self.away -= set(nodes)

    def train(self) -> None:
        for node in homes_of("j", self.copies):
            copy = self.kept[node]["j"]
            self.kept[node]["j"] = copy._replace(step=copy.step + 1)

    def settle(self) -> None:
        for _ in range(5):
            for order in self.ordered():
                self.carry_out(order)
        assert not self.ordered()


@pytest.mark.parametrize("seed", range(40))
def test_a_job_has_one_life_whichever_nodes_come_and_go(seed: int) -> None:
    """Deliver orders late, twice or never: no state that was committed and replicated is lost."""
    rng = random.Random(seed)
    world, late = World(), []
    world.settle()
    for _ in range(60):
        late += world.ordered(given_up=False)  # the home may come back, so no other node starts
        rng.shuffle(late)
        for order in late[: rng.randrange(4)]:
            world.carry_out(order)
        late = late[-8:]
        match rng.randrange(4):
            case 0 if len(world.away) < 2:
                world.settle()
                best = max(
                    copy.step for records in world.copies.values() for copy in records.values()
                )
                world.away.add(rng.choice(sorted(set(NODES) - world.away)))
                world.settle()
                (home,) = homes_of("j", world.copies)
                assert world.kept[home]["j"].step == best
            case 1 if world.away:
                world.comes_back(*rng.sample(sorted(world.away), rng.randint(1, len(world.away))))
            case _:
                world.train()
        assert len(homes_of("j", world.copies)) == 1
    world.comes_back(*world.away)
    world.settle()
    assert sorted(records["j"].state for records in world.kept.values() if records) == [
        "home",
        "replica",
    ]
    (home,) = homes_of("j", world.copies)
    world.away = {node for node, records in world.kept.items() if records} - {home}
    for state in ("over", "gone"):  # the job ends and is removed while its replica is away
        world.kept[home]["j"] = world.kept[home]["j"]._replace(state=state)
        world.settle()
        assert world.kept[home]["j"].state == state
    world.comes_back(*world.away)
    assert all(order.verb == "drop" and order.node != home for order in world.ordered())
    world.settle()
    assert not any(world.kept.values())


def test_a_job_that_was_paused_or_held_is_told_apart() -> None:
    world = World()
    world.settle()
    copy = world.kept["a"]["j"]
    world.kept["a"]["j"] = copy._replace(is_paused=True)
    assert [order.verb for order in world.ordered()] == ["send"]
    world.kept["a"]["j"] = copy._replace(is_held=True)
    assert [(order.node, order.verb) for order in world.ordered()] == [("a", "resume_if_paused")]


def test_the_one_that_starts_with_the_later_life_goes_on_with_it() -> None:
    claims = {"a": {"j": 1, "k": 2}, "b": {"j": 2}}
    assert (superseded_jobs("a", {}, claims), superseded_jobs("b", {}, claims)) == ({"j"}, set())
    assert superseded_jobs("a", {"c": {"k": JobReplica(1, "home")}}, claims) == {"j", "k"}
    assert not jobs_without_home({"c": {"j": JobReplica(1, "replica")}}, claims)


def test_what_is_of_an_older_job_of_its_name_is_not_gone_on_with() -> None:
    records = {
        "a": {"j": JobReplica(1, "replica", step=9)},
        "b": {"j": JobReplica(7, "replica", step=2)},
    }
    assert list(plan_actions(records, {}, "ab", {"j"})) == [JobAction("b", "take_over", "j")]
    records = {"a": {"j": JobReplica(1, "over")}, "b": {"j": JobReplica(7, "home")}}
    assert JobAction("a", "drop", "j", 7) in plan_actions(records, {}, "ab", ())


def test_a_name_that_is_a_path_is_refused_before_anything_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    jobs = NodeJobs("n", tmp_path)
    for name in ("..", "../jobs", "a/b", "", "A"):
        with pytest.raises(InvalidInput):
            jobs.train({"name": name, "entry": "train.py"}, b"", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"journal.db", "jobs"}


class Server:
    """Client of a node's server; it moves the file with a job's counts as a server does."""

    def __init__(self, root: Path) -> None:
        self.jobs_folder, self.asked = root / "jobs", list[dict[str, Any]]()
        (root / "logs").mkdir(parents=True)
        self.file = root / "logs" / f"job-j{SUFFIX}"

    def _ask(self, verb: str, *, body: dict[str, Any], is_safe: bool) -> None:
        self.asked.append(body)
        os.replace(self.jobs_folder / "j" / HANDED_ON, self.file)

    def jobs(self) -> list[dict[str, Any]]:
        return [{"name": "j", "state": "running", "persisted_step": 4}] if self.asked else []

    def job(self, name: str, action: str) -> None:
        self.asked.clear()  # the job is over and removed


@pytest.mark.parametrize(
    ("ran_as", "goes_on_as"),
    [
        (Life(True, 2, 30, 7), Life(False, 3, 30, 7)),  # a lost node counts as a restart
        (Life(False, 2, 30, 7), Life(False, 2, 30, 7)),  # the node handed the job over
        (Life(), Life()),  # the job had not begun
    ],
)
@pytest.mark.parametrize("keeps_replica", [True, False])
def test_a_job_counts_on_where_it_goes_on(
    ran_as: Life, goes_on_as: Life, keeps_replica: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    nodes = {name: (NodeJobs(name, tmp_path / name), Server(tmp_path / name)) for name in "ab"}
    for node, server in nodes.values():
        for attribute, value in (("_client", server), ("_tenant", server), ("_until_s", math.inf)):
            monkeypatch.setattr(node, attribute, value, raising=False)

    def node_of(ray: Any, name: str) -> Any:
        return SimpleNamespace(receive=SimpleNamespace(remote=nodes[name][0].receive))

    monkeypatch.setattr(jobs_module, "node_of", node_of)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda done: done))
    (first, before), (second, after) = nodes.values()
    first.train({"name": "j", "entry": "package:main"}, b"", 1)
    assert (before.asked[0]["resumes"], read_life(before.file)) == (False, Life())
    before.file.write_bytes(ran_as.packed())
    assert first.send("j", "b")
    first.drop("j", 2, keeps_replica=keeps_replica)
    if not keeps_replica:  # the job waits on node b, then moves back
        second.take_over("j", 2)
        assert (after.asked[0]["resumes"], read_life(after.file)) == (True, goes_on_as)
        assert second.send("j", "a")
    first.take_over("j", 3)  # with a replica: as if node b was lost before it had the job
    assert read_life(before.file) == goes_on_as
