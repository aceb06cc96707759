"""Actor that places models and jobs; it stores nothing, because the nodes report all state."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ...base.errors import AlreadyExists, ModelNotFound, PipeSwitchError, ServerUnavailable
from . import choice, job_reconciler
from .choice import COPIES, LONG_MS, MISSED_S, ROUND_S, Scale
from .cluster_client import PLACEMENT, answer_of, connect_ray, node_of, why_of
from .node_actor import START_S, starts_again
from .ray_nodes import detached, machines, node_names, request_machines, start_node, stop_nodes

log = logging.getLogger(__name__)
ANSWER_S: Final = 3.0  # a node that takes longer to report its state gets no requests for now
ORDER_S: Final = 60.0  # limit for the start or move of a job, during which a client waits
COPY_S: Final = 600.0  # limit for copying a model to another node
STOP_S: Final = 30.0  # limit for finishing accepted requests


class Overview:
    """State of the nodes, as they last reported it, and the versioned table that clients keep."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes = choice.Nodes()
        self._facts: dict[str, dict[str, Any]] = {}  # living node -> its last report
        self._serving: dict[str, str] = {}  # model -> the node that gets its requests
        self._leaving: set[str] = set()
        self._silent_since: dict[str, float] = {}  # by node without a report
        self._claims: dict[str, tuple[float, dict[str, int]]] = {}  # by node; see ``claim``
        self._troubles: dict[str, str] = {}  # name of a piece of work -> its last logged problem
        self._version = int(time.time() * 1000)  # larger than the previous process's versions
        self._shown: Any = None
        self._shared: dict[str, Any] = {}  # the newest table that was sent to gateways
        self._shared_number = self._version

    def table(self) -> dict[str, Any]:
        """Return the table of nodes and of the models that each serves."""
        with self._lock:
            holders = {name: sorted(nodes) for name, nodes in self._nodes.holders.items()}
            names = self._names()

            def of_names(table: dict[str, Any]) -> dict[str, Any]:
                return table | {name: table[model] for name, model in names if model in table}

            return {
                "version": self._version,
                "nodes": {
                    name: {
                        "address": facts["address"],
                        "keys": [key.decode() for key in facts["keys"]],
                    }
                    for name, facts in self._facts.items()
                },
                "models": of_names(self._serving),
                "holders": of_names(holders),
                "may_come": self._may_come(self._silent_since),
            }

    def _names(self) -> list[tuple[str, str]]:
        """Return pairs of a name or alias that a node has, and the name of its model."""
        with self._lock:
            return [
                pair
                for facts in self._facts.values()
                for pair in (*facts.get("aliases", {}).items(), *((n, n) for n in facts["models"]))
            ]

    def _share(self, wait_s: float = 0.0) -> None:
        """Send the current table to nodes that have an older one; wait up to ``wait_s``."""
        ray = connect_ray()
        with self._lock:
            facts = dict(self._facts)
            table = self.table()
            for name, row in table["nodes"].items():
                row["gateway_keys"] = facts[name]["gateway_keys"]
            table["loads"] = {
                name: (one["queue_ms"], one["each_ms"]) for name, one in facts.items()
            }
            if table != self._shared:
                self._shared, self._shared_number = table, self._shared_number + 1
            table = {**table, "number": self._shared_number}
        answers = [
            node_of(ray, name).learn.remote(table)
            for name, one in facts.items()
            if one["learned"] != table["number"]
        ]
        if answers and wait_s:
            ray.wait(answers, num_returns=len(answers), timeout=wait_s)

    def report_unreachable(self, node: str, address: str) -> None:
        """Exclude a node that did not answer a client at ``address``, until the next poll. Ignore
        the report if the node has restarted since, at another address."""
        with self._lock:
            if node in self._facts and self._facts[node]["address"] == address:
                self._silent_since[node] = time.monotonic()
                self._forget(node)
                self._place()

    def _may_come(self, nodes: Iterable[str]) -> bool:
        """Return whether one of these nodes has been silent for less than ``MISSED_S``."""
        now_s = time.monotonic()
        return any(now_s - self._silent_since.get(one, now_s) < MISSED_S for one in nodes)

    def _copies(self) -> dict[str, dict[str, job_reconciler.JobReplica]]:
        return {name: facts["copies"] for name, facts in self._facts.items()}

    def _poll(self) -> None:
        """Query the state of every node; treat nodes without an answer as gone. Blocks."""
        ray, names = connect_ray(), node_names(connect_ray())
        with self._lock:
            heard = {name: facts["number"] for name, facts in self._facts.items()}
        answers = {}
        for name in names:
            with contextlib.suppress(ValueError):  # Ray has removed the actor meanwhile
                answers[name] = node_of(ray, name).summary.remote(heard.get(name, 0))
        ready, _ = (
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_S)
            if answers
            else ([], [])
        )
        summaries = {}
        for name, answer in answers.items():
            if answer in ready:
                with contextlib.suppress(Exception):  # the node or its server has died
                    summaries[name] = ray.get(answer)
        with self._lock:
            now_s = time.monotonic()
            self._silent_since = {
                name: self._silent_since.get(name, now_s) for name in names if name not in summaries
            }
            self._leaving &= set(answers)  # a node with the same name may be started later
            for name in set(self._facts) - set(summaries):
                self._forget(name)
            for name, facts in summaries.items():
                self._heard(name, facts)
            self._place()

    def _heard(self, name: str, facts: dict[str, Any]) -> None:
        if facts["number"] < self._facts.get(name, facts)["number"]:
            return  # another thread has stored a later report
        self._facts[name] = facts
        self._claims.pop(name, None)
        if name in self._leaving:
            return
        for holders in self._nodes.holders.values():
            holders.discard(name)
        for model, (digest, _) in facts["models"].items():
            others = self._nodes.holders[model]
            if all(self._facts[one]["models"][model][0] == digest for one in others):
                others.add(name)  # otherwise ``registered`` will refuse this model's name
        self._nodes.put(
            choice.NodeLoad(
                name,
                facts["free_bytes"],
                facts["queue_ms"],
                facts["waiting"],
                served_bytes=sum(
                    size_bytes
                    for model, (_, size_bytes) in facts["models"].items()
                    if self._serving.get(model) == name
                ),
            )
        )

    def _forget(self, name: str) -> None:
        self._facts.pop(name, None)
        self._nodes.remove(name)

    def _place(self) -> None:
        """Choose the holder that gets each model's requests; update the version if it changed."""
        serving = {}
        for model, holders in self._nodes.holders.items():
            if holders:
                size_bytes = self._facts[next(iter(holders))]["models"][model][1]
                at = self._serving.get(model, "")
                serving[model] = self._nodes.serving(model, size_bytes, at)
        self._serving = serving
        shown = (serving, {name: one["address"] for name, one in self._facts.items()})
        if shown != self._shown:
            self._shown, self._version = shown, self._version + 1

    def _log_once(self, what: str, work: Callable[[], Any]) -> None:
        """Call ``work``; log its error or returned problems, unless the last call had the same."""
        try:
            trouble = work()
            now = "; ".join(trouble) if isinstance(trouble, list) else ""
        except Exception as error:  # Ray's errors have no common class; the next round tries again
            now = why_of(error)
        if now and now != self._troubles.get(what):
            log.warning("%s: %s", what, now)
        self._troubles[what] = now


class JobPlacement(Overview):
    """Placement of jobs: starts, moves, and restarts on another node after a node's death."""

    def __init__(self) -> None:
        super().__init__()
        self._homeless_since: dict[str, float] = {}  # jobs that have only replicas
        self._moving: set[str] = set()  # jobs that are being started or moved for a client
        self._ordered: dict[tuple[str, str], Any] = {}  # (node, job) -> Ray's future of the answer

    def train(self, body: dict[str, Any], script: bytes) -> dict[str, Any]:
        """Start a job on the node with the fewest jobs, or where a job of that name has ended.

        Raises:
            AlreadyExists: a job with this name is not over.
        """
        job = body["name"]
        with self._lock:
            if self.is_alive(job):
                raise AlreadyExists(f'there is a job "{job}"', hint="choose another --name")
            over = [node for node, records in self._copies().items() if job in records]
            node, incarnation = over[0] if over else self._idle(), self._next_incarnation(job)
            self._moving.add(job)
        try:
            return dict(self._order(node, "train", body, script, incarnation))
        finally:
            with self._lock:
                self._moving.discard(job)

    def move(self, job: str, to: str) -> None:
        """Make a job commit its last step and continue on the node ``to``. Blocks.

        Raises:
            ModelNotFound: the job or node does not exist, or the job is being moved already."""
        with self._lock:
            homes = job_reconciler.homes_of(job, self._copies())
            if not homes:
                raise ModelNotFound(f'no job "{job}" is running', hint="pipeswitch jobs")
            if to not in self._nodes or job in self._moving:
                why = "it is already being moved" if job in self._moving else f'no node "{to}"'
                raise ModelNotFound(f'job "{job}": {why}', hint="pipeswitch cluster status")
            if to == homes[0]:
                return
            incarnation = self._next_incarnation(job)
            self._moving.add(job)
        try:
            self._order(homes[0], "hand_over", job, to, incarnation)
            self._order(to, "take_over", job, incarnation)
        finally:
            with self._lock:
                self._moving.discard(job)

    def is_alive(self, job: str) -> bool:
        """Return True if a job is not over; it may be between two lives."""
        with self._lock:
            states = {one[job].state for one in self._copies().values() if job in one}
            return job in self._moving or "home" in states or states == {"replica"}

    def claim(self, node: str, claimed: dict[str, int]) -> set[str] | None:
        """Return the jobs that a starting node may not continue, because they run elsewhere now.

        Return None if other nodes have not reported yet; the node must then call again.
        ``claimed``: job -> its last life on that node."""
        now_s, names = time.monotonic(), node_names(connect_ray())
        with self._lock:
            self._forget(node)
            self._claims[node] = (now_s, claimed)
            silent = (one for one in names if one not in self._facts and one not in self._claims)
            if self._may_come(silent) or claimed.keys() & self._busy():
                return None
            gone = job_reconciler.superseded_jobs(node, self._copies(), self._claimed())
            own = {job: incarnation for job, incarnation in claimed.items() if job not in gone}
            self._claims[node] = (now_s, own)
            return gone

    def _idle(self) -> str:
        with self._lock:
            target = min(self._targets(), key=lambda name: self._facts[name]["jobs"], default="")
            if not target:
                raise ServerUnavailable(
                    "the cluster has no node left", hint="pipeswitch cluster up"
                )
            self._facts[target]["jobs"] += 1  # the next report replaces this count
            return target

    def _targets(self) -> list[str]:
        """Return the nodes that can get a replica, ordered by their number of jobs and replicas."""
        ready = [name for name in self._facts if name in self._nodes]
        return sorted(ready, key=lambda name: (len(self._facts[name]["copies"]), name))

    def _claimed(self) -> dict[str, dict[str, int]]:
        """Return the claims of nodes that may still be starting."""
        now_s = time.monotonic()
        return {
            node: claimed
            for node, (at_s, claimed) in self._claims.items()
            if now_s - at_s < START_S
        }

    def _next_incarnation(self, job: str) -> int:
        """Return a life number above all earlier ones of this name, even on silent nodes."""
        return max(
            job_reconciler.last_incarnation(job, self._copies(), self._claimed()) + 1,
            int(time.time()),
        )

    def _busy(self) -> set[str]:
        """Return the jobs that are being started or moved, or for which a living node has an
        unanswered order. The caller holds the lock."""
        return self._moving | {job for node, job in self._ordered if node in self._facts}

    def _order(self, node: str, verb: str, *args: Any) -> Any:
        """Send an order to a node, then poll all nodes; return the order's answer. Blocks."""
        ray = connect_ray()
        answer = answer_of(ray, getattr(node_of(ray, node), verb).remote(*args), ORDER_S)
        self._poll()
        return answer

    def _reconcile(self) -> None:
        """Collect answers, and send the orders that are due for jobs without unanswered orders."""
        ray, now_s = connect_ray(), time.monotonic()
        for (node, job), answer in list(self._ordered.items()):
            if ray.wait([answer], timeout=0)[0]:
                with self._lock:
                    del self._ordered[node, job]
                self._log_once(f"job {job}", partial(ray.get, answer))
        with self._lock:
            copies, claims, busy = self._copies(), self._claimed(), self._busy()
            alone = job_reconciler.jobs_without_home(copies, claims) - busy
            self._homeless_since = {job: self._homeless_since.get(job, now_s) for job in alone}
            given_up = {job for job in alone if now_s - self._homeless_since[job] > MISSED_S}
            for node, verb, job, incarnation, to in job_reconciler.plan_actions(
                copies, claims, self._targets(), given_up
            ):
                if job in busy or (node, job) in self._ordered:
                    continue
                incarnation = self._next_incarnation(job) if verb == "take_over" else incarnation
                args = [to] if to else [incarnation] if incarnation else []
                answer = getattr(node_of(ray, node), verb).remote(job, *args)
                self._ordered[node, job] = answer


class Placement(JobPlacement):
    """Placement of models and jobs. After a restart it gets all its state from the nodes."""

    def __init__(self, folder: str, flags: tuple[str, ...], scale: tuple[int, int] | None) -> None:
        super().__init__()
        self._started_with = folder, flags  # arguments for new nodes
        self._deciding = threading.Lock()
        self._short_since: dict[str, float] = {}  # model with too few copies -> since when
        self._requested = -1  # number of machines requested from Ray's autoscaler
        self._copier = ThreadPoolExecutor(1, "pipeswitch-copies")
        self._copying: Future[None] = Future()  # the copy that the loop has started
        self._copying.set_result(None)
        with starts_again():
            self._poll()
            self._scale = Scale(*scale, len(node_names(connect_ray()))) if scale else None
            threading.Thread(target=self._reconcile_loop, daemon=True).start()

    def home(self, size_bytes: int) -> str:
        """Return the node on which a client must register a new model of this size."""
        with self._lock:
            return self._nodes.choose("", size_bytes).node

    def registered(self, model: str, node: str, body: dict[str, Any]) -> list[str]:
        """Make a second copy of a model that ``node`` has registered; return the problems. Blocks.

        Raises:
            AlreadyExists: another model has one of the names; the node then unregisters the model.
        """
        ray = connect_ray()
        with self._deciding:  # the first registration of a name wins
            self._poll()
            with self._lock:
                known = [
                    (facts["models"][model][0], name == node or model in facts["bodies"])
                    for name, facts in self._facts.items()
                    if model in facts["models"]
                ]
            if len({digest for digest, counts in known if counts}) > 1:
                answer_of(ray, node_of(ray, node).unregister.remote(model))
                raise AlreadyExists(
                    f'another client has registered a model "{model}" in the meantime',
                    hint="choose another name",
                )
            own, is_known = (model, *body.get("aliases", ())), model in self._facts[node]["bodies"]
            if clashes := dict(one for one in self._names() if one[0] in own and one[1] != model):
                for name in clashes if is_known else [model]:  # a known model keeps its name
                    answer_of(ray, node_of(ray, node).unregister.remote(name))
                words = f"{', '.join(clashes)}: already a name of {', '.join(clashes.values())}"
                raise AlreadyExists(words, hint="choose another name")
            ray.get(node_of(ray, node).remember.remote(model, body))
            self._poll()
        missed = self._copy(model)
        self._share(ANSWER_S)
        return missed

    def forgotten(self, model: str) -> None:
        ray, names = connect_ray(), list(self._facts)
        answers = [node_of(ray, name).remember.remote(model, None) for name in names]
        for answer in answers:
            answer_of(ray, answer, ORDER_S)
        self._poll()

    def drain(self, node: str) -> list[str]:
        """Place nothing new on a node, and move its jobs and models; return what could not move."""
        with self._lock:
            if node not in self._facts:
                raise ModelNotFound(f"no node {node!r}", hint="pipeswitch cluster status")
            jobs = [job for job, one in self._copies()[node].items() if one.state == "home"]
            if self._facts[node]["jobs"] > len(jobs):
                return ["the node has jobs that were not started through the cluster"]
            names_held = [name for name, one in self._nodes.holders.items() if node in one]
            self._leaving.add(node)
            self._nodes.remove(node)
        is_empty = False
        try:
            missed = [note for job in jobs for note in self._move_away(job)]
            missed += [note for name in names_held for note in self._copy(name, leaving=node)]
            is_empty = not missed
        finally:
            with self._lock:
                if not is_empty:
                    self._leaving.discard(node)  # the next poll makes it serve again
                else:
                    self._forget(node)
                    if self._scale:  # otherwise the autoscaler would start another node
                        self._scale.wanted = min(self._scale.wanted, len(self._facts))
        self._poll()
        return missed

    def _move_away(self, job: str) -> list[str]:
        try:
            self.move(job, self._idle())
        except PipeSwitchError as error:
            return [f"job {job}: {error.message}"]
        return []

    def status(self) -> dict[str, Any]:
        self._poll()
        with self._lock:
            hidden, copies = (
                ("keys", "gateway_keys", "learned", "bodies", "copies", "number"),
                self._copies(),
            )
            jobs = {
                job: {node: one[job].state for node, one in copies.items() if job in one}
                for job in {job for one in copies.values() for job in one}
            }
            return {
                "version": self._version,
                "nodes": [
                    {key: value for key, value in one.items() if key not in hidden}
                    for one in self._facts.values()
                ],
                "models": {
                    name: {"serving": self._serving.get(name, ""), "nodes": sorted(nodes)}
                    for name, nodes in self._nodes.holders.items()
                    if nodes
                },
                "jobs": jobs,
            }

    def _reconcile_loop(self) -> None:
        while True:
            time.sleep(ROUND_S)
            self._log_once("look", self._poll)
            self._log_once("share", self._share)
            self._log_once("jobs", self._reconcile)
            if self._scale:
                self._log_once("scale", partial(self._follow, self._scale))
            self._log_once("copies", self._copy_short)

    def _follow(self, scale: Scale) -> None:
        """Adapt to the load: request machines from Ray, and start or drain a node on a machine."""
        ray = connect_ray()
        names, (free, hosts) = node_names(ray), machines(ray, only_ours=True)
        with self._lock:
            facts = {one: of for one, of in self._facts.items() if one not in self._leaving}
            jobs = sum(of["jobs"] for of in facts.values())
            queues_ms = [  # each node's queue, without the request that computes
                of["queue_ms"] * max(0, of["waiting"] - 1) / max(1, of["waiting"])
                for of in facts.values()
            ]
            target = scale.look(queues_ms, jobs)
            spare = min(
                facts, key=lambda one: (facts[one]["jobs"], len(facts[one]["models"])), default=""
            )
            is_over = len(facts) > target and not self._leaving
        if target != self._requested:
            request_machines(target)
            self._requested = target
        come = sorted(free.keys() - names)
        if len(names) < target and come:
            start_node(ray, come[0], free[come[0]], hosts[come[0]], *self._started_with, holds=True)
        if is_over:  # on another thread, because nodes must be polled meanwhile
            leave = partial(self._log_once, f"leave {spare}", partial(self._leave, scale, spare))
            thread = threading.Thread(target=leave, daemon=True)
            with self._lock:
                thread.start()
                self._leaving.add(spare)

    def _leave(self, scale: Scale, node: str) -> list[str]:
        """Drain and stop a node; Ray may then remove its machine. Return what could not move."""
        is_left = False
        try:
            missed = self.drain(node)
            if not missed:
                stop_nodes(connect_ray(), [node], STOP_S)
                is_left = True
        finally:
            with self._lock:
                if not is_left:  # a later round tries again
                    scale.wanted += 1
                    self._leaving.discard(node)
        return missed

    def _short(self) -> list[str]:
        """Return the models that have had too few copies for longer than ``MISSED_S``. With
        autoscaling, a model whose nodes are all overloaded has too few copies, too."""
        now_s = time.monotonic()
        with self._lock:
            copy_count = min(COPIES, len(self._facts) - len(self._leaving))
            behind = {name for name, facts in self._facts.items() if facts["queue_ms"] > LONG_MS}
            if not self._scale or len(behind) == len(self._facts):
                behind = set()
            short = {
                name
                for name, nodes in self._nodes.holders.items()
                if 0 < len(nodes) < copy_count or (nodes and nodes <= behind)
            }
            since = {name: self._short_since.get(name, now_s) for name in short}
            self._short_since = since
        return [name for name, began_s in since.items() if now_s - began_s > MISSED_S]

    def _copy_short(self) -> None:
        """Copy a model with too few copies, on another thread; one copy at a time."""
        short = self._short()
        if short and self._copying.done():
            copy = partial(self._copy, short[0], is_short=True)
            self._copying = self._copier.submit(self._log_once, short[0], copy)

    def _copy(self, model: str, leaving: str = "", *, is_short: bool = False) -> list[str]:
        """Copy a model to another node if it has too few copies; return the problems. Blocks.

        ``leaving``: source if no other node has the model. ``is_short``: ``COPIES`` are too few."""
        with self._lock:
            holders = self._nodes.holders.get(model, set()) - self._leaving
            others = [name for name in self._facts if name not in holders | self._leaving]
            source = min(holders) if holders else leaving
            if (len(holders) >= COPIES and not is_short) or not others or not source:
                return [] if holders else [f"{model}: no other node"]
            facts = self._facts.get(source, {"models": {}})
            if model not in facts["models"]:
                return [f"{model} was lost with {source}"]
            digest, size_bytes = facts["models"][model]
            body, without = facts["bodies"].get(model), holders | self._leaving
            try:
                target = self._nodes.choose(model, size_bytes, without=without).node
            except ServerUnavailable:
                return [f"{model}: no other node"]
        if body is None:
            return [f"{model} was not registered through the cluster: it stays on {source}"]
        ray = connect_ray()
        try:  # Ray sends the bundle from node to node, not through this process
            bundle = node_of(ray, source).bundle.remote(digest)
            answer = node_of(ray, target).adopt.remote(model, body, digest, bundle)
            ray.get(answer, timeout=COPY_S)
        except Exception as error:
            return [f"{model} has no copy on {target}: {why_of(error)}"]
        self._poll()
        return []


def start_nodes(
    ray: Any,
    names: dict[str, str],
    folder: str,
    hosts: dict[str, str],
    flags: tuple[str, ...],
    scale: tuple[int, int] | None = None,
) -> int:
    """Start placement and nodes, unless they run; wait until one serves; return how many do.

    Args:
        names: name of each node -> id of Ray's node for it.
        hosts: name of each node -> host on which its server listens.
        scale: minimum and maximum of nodes, if placement may start and stop some; None: it may not.
    """
    here = ray.get_runtime_context().get_node_id()  # Ray does not remove this machine
    actor = detached(ray, Placement, PLACEMENT, here, soft=True).remote(folder, flags, scale)
    handles = [  # placement must exist first, because nodes send it their claims
        start_node(ray, name, where, hosts[name], folder, flags, holds=scale is not None)
        for name, where in names.items()
    ]
    answer_of(ray, [handle.summary.remote() for handle in handles])
    ends_s = time.monotonic() + START_S
    while not (serving := answer_of(ray, actor.status.remote())["nodes"]):
        if time.monotonic() > ends_s:
            break
        time.sleep(ROUND_S)  # a server that is ready sends its claims
    return len(serving)
