"""Connection to a cluster as if it were one server: a cached table, and a connection to each node.

Placement, a Ray actor, decides which nodes hold a model, and the client caches its table. A request
goes directly to a node's port, like one to a single server. If the node does not answer or no
longer has the model, the request goes to the other holders in the table, and then to those in
placement's newest table. Each address is tried once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ...base import errors
from ...client.calls import FinalReply
from ...client.connection import Connection
from ...wire.frames import UPLOAD_LOST
from ..curve.curve_bridge import CurveConnection
from ..curve.curve_keys import ClientKeys
from .holders import (
    ELSEWHERE,
    REACHES,
    Balance,
    Failover,
    NodeAddress,
    Reach,
    Retry,
    Table,
    models_of,
    no_sequence,
)

NAMESPACE: Final = "pipeswitch"
PLACEMENT: Final = "placement"
NODE: Final = "node:"  # prefix of a node actor's name
LOOK_S: Final = 1.0  # interval between two searches for the node of a job or a model
ASK_S: Final = 20.0  # time limit of a call to placement
FRESH_S: Final = 5.0  # age at which the table is fetched again, as nodes may have joined
_RAY: Final = threading.RLock()  # guards the one Ray connection; registering takes it for minutes


def need_ray() -> None:
    """Raise ConfigError if Ray is not installed, or if its authentication is turned off."""
    if importlib.util.find_spec("ray") is None:
        raise errors.ConfigError("a cluster needs Ray", hint="pip install 'pipeswitch[ray]'")
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        raise errors.ConfigError(
            "RAY_AUTH_MODE lets everybody who reaches Ray's ports run code", hint="unset it"
        )


def connect_ray(address: str = "auto") -> Any:
    """Return the ``ray`` module, connected to ``address`` (``auto``: this machine's Ray).

    Raises:
        ConfigError: Ray is not installed, or its authentication is turned off.
        ServerUnavailable: no Ray runs there.
    """
    need_ray()
    if "ray" not in sys.modules:  # Ray reads this on import; without it, Ray sends no token
        os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray's errors have no common class
            raise errors.ServerUnavailable(
                f"no Ray answers at {address}: {why_of(error)}",
                hint="pipeswitch cluster up --local 2",
            ) from None
    return ray


@contextlib.contextmanager
def connected_ray(address: str) -> Iterator[Any]:
    """Connect to Ray within the block only, because Ray ends the processes of connected clients
    when its head dies. If the program already uses Ray itself, keep its connection."""
    with _RAY:
        loaded = sys.modules.get("ray")
        was_there = loaded is not None and loaded.is_initialized()
        ray = connect_ray(address)
        try:
            yield ray
        finally:
            if not was_there:
                ray.shutdown()


def placement_of(ray: Any) -> Any:
    """Return the handle of the placement actor.

    Raises:
        ServerUnavailable: no PipeSwitch cluster runs on this Ray.
    """
    try:
        return ray.get_actor(PLACEMENT, namespace=NAMESPACE)
    except ValueError:
        raise errors.ServerUnavailable(
            "this Ray has no cluster of PipeSwitch", hint="pipeswitch cluster up"
        ) from None


def node_of(ray: Any, name: str) -> Any:
    """Return the handle of a node's actor."""
    return ray.get_actor(NODE + name, namespace=NAMESPACE)


def answer_of(ray: Any, answer: Any, timeout_s: float | None = None) -> Any:
    """Wait for an actor's answer and return it; raise the actor's own error.

    Raises:
        PipeSwitchError: the actor raised it, or does not answer.
    """
    try:
        return ray.get(answer, timeout=timeout_s)
    except errors.PipeSwitchError as error:
        raise getattr(error, "cause", error) from None
    except Exception as error:
        raise errors.ServerUnavailable(f"the cluster does not answer: {why_of(error)}") from None


def why_of(error: Exception) -> str:
    """Return the last line of an error's text, because Ray's texts are tracebacks."""
    return str(error).strip().rpartition("\n")[2]


class Members:
    """Nodes of a cluster: placement's table and connections to the nodes. Any thread may use it."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address.partition("://")[2]
        if self._address != "auto":
            self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # guards the table and the connections
        # The key is not the node's name, because another server may get the node's port later.
        self._connections: dict[NodeAddress, Connection] = {}
        self._table = Table()
        self._asked_at_s = self._learnt_at_s = 0.0
        self._balance = Balance()
        self._ask()

    def close(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()

    def _ask(self, verb: str = "", *args: Any) -> Any:
        """Call a verb of placement if one is given, store its table, and return the answer."""
        with connected_ray(self._address) as ray:
            placement = placement_of(ray)
            limit_s = ASK_S if verb in ("report_unreachable", "home", "is_alive") else None
            answer = (
                answer_of(ray, getattr(placement, verb).remote(*args), limit_s) if verb else None
            )
            table = answer_of(ray, placement.table.options(max_task_retries=-1).remote(), ASK_S)
        self._take(table)
        return answer

    def _take(self, facts: dict[str, Any]) -> None:
        """Store a table unless a newer one is stored."""
        # ``here`` is the sender's own node; a client runs on no node.
        table = msgspec.convert({**facts, "here": ""}, Table)
        with self._lock:
            self._asked_at_s = self._learnt_at_s = time.monotonic()
            if table.version >= self._table.version:
                self._table = table
                self._balance.learn(table.loads, self._asked_at_s)

    def _learn(self) -> None:
        """Request placement's newest table from a node, which has a copy; do not wait for it."""
        with self._lock:
            self._learnt_at_s = time.monotonic()  # set first, so that only one thread asks
            known = self._connections.copy()
            living = {one.address for one in self._table.nodes.values()}
        links = [link for node, link in known.items() if node.address in living]
        if links:
            answer = links[int(self._learnt_at_s) % len(links)].request("nodes", is_safe=True)
            answer.add_done_callback(self._learnt)

    def _learnt(self, answer: Future[Any]) -> None:
        with contextlib.suppress(errors.PipeSwitchError, CancelledError):  # another node may answer
            self._take(answer.result().body)

    def _node_of(self, model: str, deadline_ms: float | None = None) -> str:
        """Return the node for a model's request; query placement if the table has none.
        Raises ModelNotFound: no node has the model."""
        table = self._table
        if serving := table.models.get(model):
            return self._balance.choose(table.untried(model) or [serving], time.monotonic())
        failover = Failover(model, {"deadline_ms": deadline_ms}, time.monotonic(), LOOK_S)
        failover.failed(errors.ModelNotFound(f'no model "{model}"', hint="pipeswitch models"), "")
        return self._again(failover, "", model)

    def _to(self, node: str) -> Connection:
        """Return the connection to a node.
        Raises ServerUnavailable: the table no longer has the node; PipeSwitchError: this process
        has no descriptor, thread or memory for a connection."""
        with self._lock:
            facts = self._table.nodes.get(node)
            if facts is None:
                raise errors.ServerUnavailable(f"{node} is no longer part of the cluster")
            connection = self._connections.get(facts)
            if connection is None:
                keys = ClientKeys(*(key.encode() for key in facts.keys))
                try:
                    connection = CurveConnection(facts.address, self._timeout_s, keys)
                except (OSError, RuntimeError, MemoryError) as error:
                    raise errors.PipeSwitchError(
                        f"cannot connect to {node}: {error}",
                        hint="close files and clients that this process no longer needs",
                    ) from error
                self._connections[facts] = connection
            return connection

    def _again(self, failover: Failover, node: str, model: str) -> str:
        """Return another node that serves a model, and use it for this client's next requests.
        Raises PipeSwitchError: the last node's error, because no other node is left."""
        address = self._table.address(node)
        while isinstance(step := failover.next(self._table, time.monotonic()), Retry):
            if step is Retry.WAIT:
                time.sleep(LOOK_S)
            elif _RAY.acquire(timeout=max(0.0, failover.until_s - time.monotonic())):
                what = ("report_unreachable", node, address) if failover.is_dead else ()
                try:
                    with contextlib.suppress(errors.ServerUnavailable):  # placement is gone, too
                        self._ask(*what)
                finally:
                    _RAY.release()
        with self._lock:
            table = self._table
            if step[0] != table.models.get(model):
                models = {**table.models, model: step[0]}
                holders = {**table.holders, model: step}
                self._table = msgspec.structs.replace(table, models=models, holders=holders)
        return step[0]


class ClusterVerbs(Members):
    """Verbs that go to several nodes, or to a node that is not in the table yet."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._home = ""  # node for new uploads while ``_waiting`` is not empty
        self._files: dict[str, str] = {}  # ``put:DIGEST`` of a file -> node that has the file
        self._waiting: set[str] = set()  # uploaded files that belong to no registered model yet
        self._choosing = threading.Lock()  # guards the three fields above
        self._began: dict[str, str] = {}  # sequence id -> node on which the sequence began
        super().__init__(address, timeout_s)

    def _verb(self, op: str) -> Callable[..., Any]:
        method = getattr(self, f"_do_{op}", None)
        if method is None:
            raise _one_nodes(op)
        verb: Callable[..., Any] = method
        return verb

    def _do_put(self, op: str, **options: Any) -> Any:
        name = f"put:{options['body']['digest']}"
        with self._choosing:  # several threads may register at once
            if self._home not in self._table.nodes:
                known = self._files.get(name, "")
                is_there = known in self._table.nodes
                self._home = known if is_there else self._ask("home", options["body"]["size_bytes"])
            node = self._files[name] = self._home
            self._waiting.add(name)
        return self._send(node, {name}, op, **options)

    def _send(self, node: str, files: set[str], op: str, **options: Any) -> Any:
        """Send a verb about uploaded files. If it fails, later uploads may go to another node, also
        those of the same files."""
        try:
            return self._to(node).call(op, **options)
        except errors.PipeSwitchError as error:
            self._release(files)
            if isinstance(error, errors.ServerUnavailable):
                if files:
                    error.data["reason"] = UPLOAD_LOST
                    with self._choosing:
                        self._files = {k: one for k, one in self._files.items() if k not in files}
                with contextlib.suppress(errors.ServerUnavailable):  # nor does placement answer
                    self._ask("report_unreachable", node, self._table.address(node))
            raise

    def _release(self, files: set[str]) -> None:
        with self._choosing:
            self._waiting -= files
            self._home = self._home if self._waiting else ""

    def _do_register(self, op: str, *, model: str, body: dict[str, Any], **options: Any) -> Any:
        if body.get("as_version") or body.get("like"):
            raise errors.InvalidInput(
                "a cluster has only one version of each model, and no model like another",
                hint="register it by its source"
                if body.get("like")
                else f"pipeswitch unregister {model}, then register it with the new weights",
            )
        with self._choosing:
            files = {text for text in body.values() if isinstance(text, str)} & self._files.keys()
            home = self._files[min(files)] if files else self._table.models.get(model)
        home = home or self._ask("home", 0)
        reply = self._send(home, files, op, model=model, body=body, **options)
        self._release(files)
        missed = self._ask("registered", model, home, body)
        return _reply({**reply.body, "notes": [*reply.body.get("notes", ()), *missed]})

    def _of_holders(self, op: str, model: str, options: dict[str, Any]) -> Any:
        """Send the verb to all nodes that hold the model, as its requests may go to any of them."""
        node, reply = self._node_of(model), None
        for one in self._table.holders.get(model, (node,)):
            with contextlib.suppress(*ELSEWHERE):
                reply = self._to(one).call(op, model=model, **options)
        return reply or self._to(node).call(op, model=model, **options)

    def _do_unregister(self, op: str, *, model: str, **options: Any) -> Any:
        self._ask()
        holders = [self._node_of(model), *self._table.holders.get(model, ())]
        for node in dict.fromkeys(holders):
            reply = self._to(node).call(op, model=model, **options)
        self._ask("forgotten", model)
        return reply

    def _all(self, op: str, **options: Any) -> dict[str, dict[str, Any]]:
        """Return answers by node name; if a node does not answer, try a newer table once."""
        options["is_safe"] = True
        if time.monotonic() > self._asked_at_s + FRESH_S:
            self._ask()
        for is_last in (False, True):
            table = self._table.nodes
            futures, bodies = {}, {}
            for node in table:
                with contextlib.suppress(errors.ServerUnavailable):  # the table has changed
                    futures[node] = self._to(node).request(op, **options)
            for node, future in futures.items():
                with contextlib.suppress(errors.ServerUnavailable):
                    bodies[node] = future.result().body
            if (len(bodies) == len(table) and table) or is_last:
                break
            self._ask()
        if not bodies:
            hint = "ask again in a moment; pipeswitch cluster status shows nodes that start"
            raise errors.ServerUnavailable("no node of the cluster answers yet", hint=hint)
        return bodies

    def _do_ping(self, op: str, **options: Any) -> Any:
        answers = self._all(op, **options)
        ready = [one for one in answers.values() if one.get("ready")]
        return _reply({**(ready or list(answers.values()))[0], "nodes": sorted(answers)})

    def _do_stats(self, op: str, **options: Any) -> Any:
        answers = self._all(op, **options)
        keys = list(next(iter(answers.values())))
        sums = {
            key: sum(one.get(key, 0) for one in answers.values())
            for key in keys
            if all(
                isinstance(one.get(key), int | float) and not isinstance(one.get(key), bool)
                for one in answers.values()
            )
        }
        return _reply({**sums, "nodes": answers})

    def _do_models(self, op: str, **options: Any) -> Any:
        return _reply({"models": models_of(self._all(op, **options))})

    def _rows(self, op: str, key: str, **options: Any) -> list[dict[str, Any]]:
        answers = self._all(op, **options).items()
        return [{**row, "node": node} for node, one in answers for row in one[key]]

    def _do_ps(self, op: str, **options: Any) -> Any:
        rows = self._rows(op, "rows", **options)
        return _reply(
            {"rows": [{**row, "name": f"{row.pop('node')}/{row['name']}"} for row in rows]}
        )

    def _do_jobs(self, op: str, **options: Any) -> Any:
        return _reply({"jobs": self._rows(op, "jobs", **options)})

    def _do_sequences(self, op: str, *, body: Any = None, **options: Any) -> Any:
        if body and (node := self._began.pop(body["end"], "")) in self._table.nodes:
            return self._to(node).call(op, body=body, **options)
        rows = self._rows(op, "sequences")
        if body is None:
            return _reply({"sequences": rows})
        node = next((row["node"] for row in rows if row["id"] == body["end"]), "")
        if not node:
            raise no_sequence(body["end"])
        return self._to(node).call(op, body=body, **options)

    def _do_train(self, op: str, *, body: dict[str, Any], **options: Any) -> Any:
        script = b""
        with contextlib.suppress(OSError):  # the file may exist only on the nodes' machines
            if body["entry"].endswith(".py"):
                script = Path(body["entry"]).read_bytes()
        return _reply(self._ask("train", body, script))

    def _do_job(self, op: str, *, body: dict[str, Any], **options: Any) -> Any:
        if body["action"] == "move" and body["to"] in self._table.nodes:
            self._ask("move", body["name"], body["to"])
            body = {**body, "action": "show"}
            del body["to"]
        if body["action"] == "wait":
            return self._wait(body, options)
        node = self._job_node(body["name"])
        if not node:
            raise _no_job(body["name"])
        return self._to(node).call(op, body=body, **options)

    def _wait(self, body: dict[str, Any], options: dict[str, Any]) -> Any:
        """Wait until the job is over, on whichever node it runs. A job that moves is cancelled on
        its old node, and a job whose node dies begins again on another node."""
        while True:
            is_alive, node = self._ask("is_alive", body["name"]), self._job_node(body["name"])
            if not node and not is_alive:
                raise _no_job(body["name"])
            with contextlib.suppress(errors.ServerUnavailable):
                reply = self._to(node).call("job", body=body, **options) if node else None
                if reply and (reply.body["job"]["state"] != "cancelled" or not is_alive):
                    return reply
            time.sleep(LOOK_S)

    def _job_node(self, name: str) -> str:
        return next((row["node"] for row in self._rows("jobs", "jobs") if row["name"] == name), "")


class ClusterConnection(ClusterVerbs):
    """Connection to a cluster instead of a server; for use from any thread."""

    keys = None

    def __init__(self, address: str, timeout_s: float) -> None:
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="pipeswitch-cluster")
        super().__init__(address, timeout_s)

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def another(self) -> Connection:
        raise _one_nodes("events")

    def notify(self, op: str, *, model: str = "") -> None:
        node = self._table.models.get(model)
        with contextlib.suppress(errors.ServerUnavailable):  # nobody waits for an answer
            if node is not None:
                self._to(node).notify(op, model=model)

    def call(self, op: str, *, model: str = "", **options: Any) -> Any:
        """Send a call and return its result, like ``Connection.call``."""
        if REACHES.get(op) is Reach.HOLDERS:
            return self._of_holders(op, model, options)
        if REACHES.get(op) is not Reach.HOLDER:
            return self._verb(op)(op, model=model, **options)
        began_s = time.monotonic()
        node = self._node_for(model, options)
        self._balance.count(node, 1)
        try:
            return self._to(node).call(op, model=model, **options)
        except ELSEWHERE as error:
            rest = Failover(model, options, began_s, LOOK_S).options(options, time.monotonic())
            return self._elsewhere(error, node, op, model, rest)
        finally:
            self._balance.count(node, -1)

    def request(self, op: str, *, model: str = "", **options: Any) -> Future[Any]:
        """Send a request and return a future, like ``Connection.request``."""
        if op != "generate" and (op != "infer" or model not in self._table.models):  # it may block
            return self._pool.submit(self.call, op, model=model, **options)
        began_s = time.monotonic()
        node, outer = self._node_for(model, options), Future[Any]()

        def again(error: errors.PipeSwitchError) -> None:
            rest = Failover(model, options, began_s, LOOK_S).options(options, time.monotonic())
            another = self._pool.submit(self._elsewhere, error, node, op, model, rest)
            another.add_done_callback(partial(_copy_result, outer))

        def answered(inner: Future[Any]) -> None:
            self._balance.count(node, -1)
            error = None if inner.cancelled() else inner.exception()
            if isinstance(error, ELSEWHERE) and not outer.cancelled():
                with contextlib.suppress(RuntimeError):  # this client is closed
                    again(error)
                    return
            _copy_result(outer, inner)

        try:
            inner = self._to(node).request(op, model=model, **options)
        except errors.ServerUnavailable as error:
            again(error)
            return outer
        self._balance.count(node, 1)
        outer.add_done_callback(lambda done: done.cancelled() and inner.cancel())
        inner.add_done_callback(answered)
        return outer

    def _node_for(self, model: str, options: dict[str, Any]) -> str:
        """Return the node for a model's request; for a sequence, the node on which it began.
        Raises SequenceNotFound: this client did not begin the sequence, or its node is gone."""
        body = options.get("body") or {}
        if time.monotonic() > self._learnt_at_s + FRESH_S:
            self._learn()
        if "sequence" not in body:
            return self._node_of(model, options.get("deadline_ms"))
        if body.get("start"):
            self._began[body["sequence"]] = self._node_of(model, options.get("deadline_ms"))
        if (node := self._began.get(body["sequence"], "")) not in self._table.nodes:
            self._began.pop(body["sequence"], None)
            raise no_sequence(body["sequence"])
        return node

    def _elsewhere(
        self, error: errors.PipeSwitchError, node: str, op: str, model: str, options: dict[str, Any]
    ) -> Any:
        """Send a failed request to other nodes until one answers; return that answer.
        Raises PipeSwitchError: the last node's error, because no other node is left."""
        body = options.get("body") or {}
        failover = Failover(model, options, time.monotonic(), LOOK_S)
        while True:
            if "sequence" in body:
                self._began.pop(body["sequence"], None)
            failover.failed(error, self._table.address(node))
            node = self._again(failover, node, model)
            if "sequence" in body:
                self._began[body["sequence"]] = node
            try:
                rest_options = failover.options(options, time.monotonic())
                return self._to(node).call(op, model=model, **rest_options)
            except ELSEWHERE as failed:
                error = failed


def _no_job(name: str) -> errors.ModelNotFound:
    return errors.ModelNotFound(f'no job "{name}"', hint="pipeswitch jobs")


def _reply(body: dict[str, Any]) -> FinalReply:
    return FinalReply(request_id="", body=body, outputs=(), frames=())


def _copy_result(future: Future[Any], done: Future[Any]) -> None:
    """Copy the outcome of ``done`` to ``future``, unless ``future`` was cancelled."""
    error = errors.Cancelled("this client is closed") if done.cancelled() else done.exception()
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)


def _one_nodes(op: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"{op} is for one node, not for the cluster",
        hint="pipeswitch cluster status; on its machine: pipeswitch --host ipc://…",
    )
