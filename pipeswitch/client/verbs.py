"""Verbs of ``Client`` that send one request to the server, and their awaitable versions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

from ..base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ..wire.frames import UPLOAD_LOST
from .calls import MAX_TRIES, as_wait_s
from .tensors import Signature

SAFE_JOB_ACTIONS: Final = frozenset({"show", "wait", "logs", "history", "export", "state"})  # reads
PING_TIMEOUT_S: Final = 5.0  # a healthy server answers in ms, and waits 1 s for a silent process

Progress = Callable[[str, float], None]
"""Callback that gets a stage's name and the completed fraction of the whole work, 0 to 1."""


def as_texts(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the texts of an argument; a single one is not split into its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


class VerbConnection(Protocol):
    """Connection to a server or a cluster."""

    def call(self, op: str, **options: Any) -> Any: ...

    def request(self, op: str, **options: Any) -> Future[Any]: ...


class Verbs:
    """Verbs over a connection to a server or a cluster."""

    address: str
    _connection: VerbConnection

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
        """Register a chain: models that serve as one. Outputs of its steps stay on the server.

        Args:
            name: name of the chain in requests.
            steps: steps in order: a model's name, or ``{"model": "head", "inputs": {"x":
                "encoder.y"}}``. Each input comes from an input of the request (``"ids"``) or an
                output of an earlier step; by default from the request's input of the same name.
                ``"name"`` distinguishes two steps of one model.
            outputs: outputs of the chain: ``{"label": "head.label"}``; default: the last step's.

        Raises:
            InvalidInput: a model or name is unknown or does not fit; the error lists choices.
            AlreadyExists: a model or another chain has the name.
        """
        body = {
            "steps": [{"model": one} if isinstance(one, str) else dict(one) for one in steps],
            "outputs": dict(outputs or {}),
        }
        return self._ask("chain", model=name, body=body)

    def publish(self, name: str, job: str, step: int = -1, part: str = "") -> dict[str, Any]:
        """Make a job's newest commit the next version of a model; return when it is current.

        Args:
            name: a registered model. It keeps its program; parameters are matched by name.
            job: name of the job, which may be over.
            step: step that the commit must have; -1: any step.
            part: one key of ``job.steps(model={"net": net, "ema": ema})``, if several keys fit.

        Raises:
            RegistrationRefused: names, dtypes or shapes differ; the error says which.
            InvalidInput: the commit or part does not exist, or several parts fit (they are listed).
        """
        body: dict[str, Any] = {"job": job} if step < 0 else {"job": job, "step": step}
        body |= {"part": part} if part else {}
        return self._ask("publish", model=name, body=body, is_safe=False)

    def rollback(self, name: str, version: int = 0) -> dict[str, Any]:
        """Make another version current. It must still be on the server; 0: the newest older one."""
        body = {"version": version} if version else None
        return self._ask("rollback", model=name, body=body, is_safe=bool(version))

    def split(self, name: str, version: int, percent: int) -> dict[str, Any]:
        """Send ``percent`` of the requests that name no version to this version, until the current
        version changes. 0 ends the split. ``timing.version`` is the version that was used."""
        if percent not in range(101):
            raise InvalidInput(
                f"{percent} % is not a valid share", hint="0 to 100, as in split(NAME, 2, 10)"
            )
        body = {"version": version, "share": percent}
        return self._ask("rollback", model=name, body=body)

    def unregister(self, name: str) -> dict[str, Any]:
        """Unregister a model or a chain. Requests that wait for it are answered first."""
        return self._ask("unregister", model=name, is_safe=False)

    def load(self, name: str) -> dict[str, Any]:
        """Pin a model on the device; a quarantined model gets another chance."""
        return self._ask("load", model=name)

    def unload(self, name: str) -> dict[str, Any]:
        """Unpin a model, so that the server decides whether it stays on the device."""
        return self._ask("unload", model=name)

    def models(self, *, versions: bool = False) -> list[dict[str, Any]]:
        """Return a row for each registered model, or for each of their versions."""
        body = {"versions": True} if versions else None
        rows: list[dict[str, Any]] = self._ask("models", body=body)["models"]
        return rows

    def show(self, name: str, version: int = 0) -> dict[str, Any]:
        """Return all details and the signature of a model; ``version`` 0: the current one."""
        body = {"version": version} if version else None
        row: dict[str, Any] = self._ask("show", model=name, body=body)["model"]
        return row

    def plan(self) -> dict[str, Any]:
        """Return the arena and each model's profile, the input of ``pipeswitch plan``."""
        return self._ask("plan")

    def signature(self, name: str) -> Signature:
        """Return a model's inputs and batch range, from which you can make requests."""
        return Signature.from_row(self.show(name))

    # ---- jobs ----------------------------------------------------------------------------------

    def jobs(self) -> list[dict[str, Any]]:
        """Return a row for each job."""
        rows: list[dict[str, Any]] = self._ask("jobs")["jobs"]
        return rows

    def job(self, /, name: str, action: str, **fields: Any) -> dict[str, Any]:
        """Perform an action on a job (``to`` is the target of a move)."""
        is_safe = action in SAFE_JOB_ACTIONS
        return self._ask("job", body={"name": name, "action": action, **fields}, is_safe=is_safe)

    # ---- the server ----------------------------------------------------------------------------

    def ps(self) -> list[dict[str, Any]]:
        """Return a row for each model, job and process, with its current state."""
        rows: list[dict[str, Any]] = self._ask("ps")["rows"]
        return rows

    def stats(self) -> dict[str, Any]:
        """Return the server's counters and sizes."""
        return self._ask("stats")

    def trace(self, seconds: float = 10.0) -> dict[str, Any]:
        """Return the last ``seconds`` of the server's timeline, as Chrome/Perfetto trace JSON."""
        trace: dict[str, Any] = self._ask("trace", body={"seconds": seconds})["trace"]
        return trace

    def about(self) -> dict[str, Any]:
        """Return the server's pid, device, addresses and limits."""
        return self._ask("ping")

    def ping(self, *, deep: bool = False, timeout_s: float = PING_TIMEOUT_S) -> dict[str, Any]:
        """Report whether a request would be served now: ``{"ready": …, "why": …, "total_ms": …}``.

        ``deep`` also queries the scheduler, the memory daemon and every worker, without disturbing
        a task. It adds ``controller_ms`` (round trip), ``daemon_ms`` and ``workers``, each with its
        ``ms`` (None: no answer).

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
            return {"ready": answer["ready"], "why": answer["why"], "total_ms": total_ms}
        controller_ms = total_ms - answer.pop("engine_ms")
        return {**answer, "controller_ms": controller_ms, "total_ms": total_ms}

    def stop_server(self, drain_s: float = 30.0) -> list[str]:
        """Ask the server to finish accepted requests and exit; return when it agrees or is gone.

        Returns:
            One sentence for each job whose last steps could not be written to disk.
        """
        with contextlib.suppress(ServerUnavailable):
            body = {"drain_ms": drain_s * 1000}
            losses: list[str] = self._ask("stop", body=body, is_safe=False).get("lost", [])
            return losses
        return []


def progress_caller(progress: Progress | None) -> Callable[[dict[str, Any]], None] | None:
    """Return a function that passes a progress reply to ``progress``."""
    if progress is None:
        return None
    return lambda body: progress(str(body.get("stage", "")), float(body.get("fraction", 0.0)))


def repeated(work: Callable[[], R], repair: Callable[[], object] = bool) -> R:
    """Call ``work``. If a server that was restarted has lost uploads, repair that and try again."""
    for _ in range(MAX_TRIES - 1):
        try:
            return work()
        except PipeSwitchError as error:
            if error.data.get("reason") != UPLOAD_LOST:
                raise
        repair()
    return work()


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", covariant=True)
V = TypeVar("V", bound=Verbs, covariant=True)


async def in_thread(work: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
    """Call a function that may wait in a thread of its own. asyncio's default pool has few threads:
    if all wait, such as for registrations, no other call begins. If the caller is cancelled, a
    stream or subscription that the function returns is closed."""
    result: Future[R] = Future()
    result.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result.set_result(work(*args, **options))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="pipeswitch-await", daemon=True).start()
    answer = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        answer.cancel()
        result.add_done_callback(_close)
        raise


def _close(unused: Future[Any]) -> None:
    value: Any = None if unused.exception() else unused.result()
    if hasattr(value, "close"):
        value.close()


class AsyncWrapper(Generic[S]):
    """Base for awaitable versions of an SDK object's verbs."""

    def __init__(self, awaits: S) -> None:
        self._awaits = awaits


def as_async(
    verb: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[AsyncWrapper[S], P], Coroutine[Any, Any, R]]:
    """Return an awaitable verb that runs in a thread; ``progress`` is called on the event loop."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    async def call(self: AsyncWrapper[S], /, *args: P.args, **options: P.kwargs) -> R:
        if "progress" not in signature.parameters:
            return await in_thread(verb, self._awaits, *args, **options)
        bound = signature.bind(self._awaits, *args, **options)
        bound.arguments["progress"] = _on_this_loop(bound.arguments.get("progress"))
        return await in_thread(verb, *bound.args, **bound.kwargs)

    return call


class AsyncVerbs(AsyncWrapper[V]):
    """Awaitable versions of all ``Verbs``."""

    register_chain = as_async(Verbs.register_chain)
    publish = as_async(Verbs.publish)
    rollback = as_async(Verbs.rollback)
    split = as_async(Verbs.split)
    unregister = as_async(Verbs.unregister)
    load = as_async(Verbs.load)
    unload = as_async(Verbs.unload)
    models = as_async(Verbs.models)
    show = as_async(Verbs.show)
    plan = as_async(Verbs.plan)
    signature = as_async(Verbs.signature)
    jobs = as_async(Verbs.jobs)
    job = as_async(Verbs.job)
    ps = as_async(Verbs.ps)
    stats = as_async(Verbs.stats)
    trace = as_async(Verbs.trace)
    about = as_async(Verbs.about)
    ping = as_async(Verbs.ping)
    stop_server = as_async(Verbs.stop_server)


def _on_this_loop(progress: Progress | None) -> Progress | None:
    """Return a callback for any thread, which calls ``progress`` on the current event loop."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    def report(stage: str, fraction: float) -> None:
        loop.call_soon_threadsafe(progress, stage, fraction)

    return report
