"""Verbs that are one question to the server, of ``Client``; and the same awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

from ..base.errors import InvalidInput, ServerUnavailable
from .calls import as_wait_s
from .tensors import Signature


class Reach(Enum):
    """Nodes of a cluster that answer a verb."""

    HOLDER = auto()  # one that holds the model; another one if it does not answer
    HOLDERS = auto()  # all that hold the model
    CLUSTER = auto()  # placement has a part in it, so no node does it alone


REACHES: Final[Mapping[str, Reach]] = {
    "infer": Reach.HOLDER,
    "generate": Reach.HOLDER,
    "show": Reach.HOLDER,
    "generation": Reach.HOLDER,
    "load": Reach.HOLDERS,
    "unload": Reach.HOLDERS,
    "put": Reach.CLUSTER,
    "register": Reach.CLUSTER,
    "unregister": Reach.CLUSTER,
}
"""Any other verb is for one node, or a ``_do_`` method of ``ClusterVerbs`` joins the answers."""

PING_TIMEOUT_S: Final = 5.0  # a whole server answers in milliseconds, a silent part costs 1 s

Progress = Callable[[str, float], None]
"""Called with a stage's name and the fraction of the whole, 0 to 1."""


class Link(Protocol):
    """Connection to a server or a cluster."""

    def call(self, op: str, **options: Any) -> Any: ...

    def request(self, op: str, **options: Any) -> Future[Any]: ...


class Verbs:
    """Over a connection."""

    address: str
    _connection: Link

    def _ask(
        self, op: str, *, model: str = "", body: dict[str, Any] | None = None, is_safe: bool = True
    ) -> dict[str, Any]:
        reply = self._connection.call(op, model=model, body=body, is_safe=is_safe)
        answer: dict[str, Any] = reply.body
        return answer

    # ---- models --------------------------------------------------------------------------------

    def register_chain(
        self,
        name: str,
        steps: Sequence[str | Mapping[str, Any]],
        outputs: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make several registered models servable as one: each step's outputs stay on the server.

        Args:
            name: what requests will call it.
            steps: in order: a model's name, or ``{"model": "head", "inputs": {"x": "encoder.y"}}``:
                each of its inputs is an input of the request (``"ids"``) or an output of an earlier
                step; one that is not named is that of its own name. ``"name"`` tells two steps of
                one model apart.
            outputs: of the answer, as ``{"label": "head.label"}``; default: the last step's.

        Raises:
            InvalidInput: no such model, name or fit; and what there is.
            AlreadyExists: a model or another chain has the name.
        """
        body = {
            "steps": [{"model": one} if isinstance(one, str) else dict(one) for one in steps],
            "outputs": dict(outputs or {}),
        }
        return self._ask("chain", model=name, body=body)

    def publish(self, name: str, job: str, step: int = -1, part: str = "") -> dict[str, Any]:
        """Make a job's newest commit the next version of a model; returns when it is current.

        Args:
            name: a registered model; its program stays, parameters are matched by name.
            job: it may be over.
            step: the commit must be of this step; -1: any.
            part: one of ``job.steps(model={"net": net, "ema": ema})``, if several fit.

        Raises:
            RegistrationRefused: names, dtypes or shapes differ, and which.
            InvalidInput: there is no such commit or part, or several parts fit, and which.
        """
        body: dict[str, Any] = {"job": job} if step < 0 else {"job": job, "step": step}
        body |= {"part": part} if part else {}
        return self._ask("publish", model=name, body=body, is_safe=False)

    def rollback(self, name: str, version: int = 0) -> dict[str, Any]:
        """Make a version that is still there the current one; 0: the newest before it."""
        body = {"version": version} if version else None
        return self._ask("rollback", model=name, body=body, is_safe=bool(version))

    def split(self, name: str, version: int, percent: int) -> dict[str, Any]:
        """Give a version this share of the requests that name none, until another becomes current;
        0 ends it. ``timing.version`` says which one answered."""
        if percent not in range(101):
            raise InvalidInput(f"a share of {percent} %", hint="0 to 100, as in split(NAME, 2, 10)")
        body = {"version": version, "share": percent}
        return self._ask("rollback", model=name, body=body)

    def unregister(self, name: str) -> dict[str, Any]:
        """Drop a model or a chain; requests that wait for it are answered first."""
        return self._ask("unregister", model=name, is_safe=False)

    def load(self, name: str) -> dict[str, Any]:
        """Pin a model on the device (and give a quarantined one another chance)."""
        return self._ask("load", model=name)

    def unload(self, name: str) -> dict[str, Any]:
        """Unpin a model: the server decides again whether it is resident."""
        return self._ask("unload", model=name)

    def models(self, *, versions: bool = False) -> list[dict[str, Any]]:
        """One row for each registered model, or for each of their versions."""
        body = {"versions": True} if versions else None
        rows: list[dict[str, Any]] = self._ask("models", body=body)["models"]
        return rows

    def show(self, name: str, version: int = 0) -> dict[str, Any]:
        """One model in full, its signature included; the current version, or another."""
        body = {"version": version} if version else None
        row: dict[str, Any] = self._ask("show", model=name, body=body)["model"]
        return row

    def plan(self) -> dict[str, Any]:
        """Each model's profile and the arena: what ``pipeswitch plan`` reckons with."""
        return self._ask("plan")

    def signature(self, name: str) -> Signature:
        """A model's inputs and batch range, to make requests from."""
        return Signature.from_row(self.show(name))

    # ---- jobs ----------------------------------------------------------------------------------

    def jobs(self) -> list[dict[str, Any]]:
        """One row for each job."""
        rows: list[dict[str, Any]] = self._ask("jobs")["jobs"]
        return rows

    def job(self, /, name: str, action: str, **fields: Any) -> dict[str, Any]:
        """One action on a job: show, pause, resume, cancel, wait, logs, history, export, rm,
        move (``to`` a device)."""
        is_safe = action in ("show", "wait", "logs", "history", "export", "state")
        return self._ask("job", body={"name": name, "action": action, **fields}, is_safe=is_safe)

    # ---- the server ----------------------------------------------------------------------------

    def ps(self) -> list[dict[str, Any]]:
        """Models, jobs and processes, with what they do now."""
        rows: list[dict[str, Any]] = self._ask("ps")["rows"]
        return rows

    def stats(self) -> dict[str, Any]:
        """Counters and sizes."""
        return self._ask("stats")

    def trace(self, seconds: float = 10.0) -> dict[str, Any]:
        """The last ``seconds`` of the server's timeline, as Chrome/Perfetto trace JSON."""
        trace: dict[str, Any] = self._ask("trace", body={"seconds": seconds})["trace"]
        return trace

    def about(self) -> dict[str, Any]:
        """The server's pid, device, addresses and limits."""
        return self._ask("ping")

    def ping(self, *, deep: bool = False, timeout_s: float = PING_TIMEOUT_S) -> dict[str, Any]:
        """Ask whether a request would be served now: ``{"ready": …, "why": …, "total_ms": …}``.

        Deep asks scheduler, memory daemon and every worker, and disturbs no task: also
        ``controller_ms`` (there and back), ``daemon_ms`` and ``workers``, each with its ``ms``
        (None: silent).

        Raises:
            ServerUnavailable: no server answers within ``timeout_s``.
        """
        began_s, wait_s = time.monotonic(), as_wait_s(timeout_s)
        future = self._connection.request(
            "ping", body={"deep": True} if deep else None, is_safe=True
        )
        try:
            answer: dict[str, Any] = future.result(wait_s).body
        except TimeoutError:
            future.cancel()
            raise ServerUnavailable(
                f"no answer from {self.address} within {timeout_s:g} s", hint="see the server's log"
            ) from None
        total_ms = (time.monotonic() - began_s) * 1000.0
        if not deep:
            why = "" if answer["ready"] else "its engine is not up"
            return {"ready": answer["ready"], "why": why, "total_ms": total_ms}
        controller_ms = total_ms - answer.pop("engine_ms")
        return {**answer, "controller_ms": controller_ms, "total_ms": total_ms}

    def stop_server(self, drain_s: float = 30.0) -> list[str]:
        """Ask the server to finish what it accepted and leave; returns when it agrees or left.

        Returns:
            One sentence for each job whose last steps could not be written to disk.
        """
        with contextlib.suppress(ServerUnavailable):
            body = {"drain_ms": drain_s * 1000}
            lost: list[str] = self._ask("stop", body=body, is_safe=False).get("lost", [])
            return lost
        return []


def progress_caller(progress: Progress | None) -> Callable[[dict[str, Any]], None] | None:
    if progress is None:
        return None
    return lambda body: progress(str(body.get("stage", "")), float(body.get("fraction", 0.0)))


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", covariant=True)
V = TypeVar("V", bound=Verbs, covariant=True)


class AwaitableVerbs(Generic[S]):
    """Awaitable verbs of an object of the SDK."""

    def __init__(self, awaits: S) -> None:
        self._awaits = awaits


def awaited(
    verb: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[AwaitableVerbs[S], P], Coroutine[Any, Any, R]]:
    """The verb on a thread of its own; ``progress`` is called on the event loop."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    async def call(self: AwaitableVerbs[S], /, *args: P.args, **options: P.kwargs) -> R:
        if "progress" not in signature.parameters:
            return await asyncio.to_thread(verb, self._awaits, *args, **options)
        given = signature.bind(self._awaits, *args, **options)
        given.arguments["progress"] = _on_this_loop(given.arguments.get("progress"))
        return await asyncio.to_thread(verb, *given.args, **given.kwargs)

    return call


class AwaitedVerbs(AwaitableVerbs[V]):
    """All of ``Verbs``."""

    register_chain = awaited(Verbs.register_chain)
    publish = awaited(Verbs.publish)
    rollback = awaited(Verbs.rollback)
    split = awaited(Verbs.split)
    unregister = awaited(Verbs.unregister)
    load = awaited(Verbs.load)
    unload = awaited(Verbs.unload)
    models = awaited(Verbs.models)
    show = awaited(Verbs.show)
    plan = awaited(Verbs.plan)
    signature = awaited(Verbs.signature)
    jobs = awaited(Verbs.jobs)
    job = awaited(Verbs.job)
    ps = awaited(Verbs.ps)
    stats = awaited(Verbs.stats)
    trace = awaited(Verbs.trace)
    about = awaited(Verbs.about)
    ping = awaited(Verbs.ping)
    stop_server = awaited(Verbs.stop_server)


def _on_this_loop(progress: Progress | None) -> Progress | None:
    """Called from any thread, it calls ``progress`` on the loop that runs now."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    def report(stage: str, fraction: float) -> None:
        loop.call_soon_threadsafe(progress, stage, fraction)

    return report
