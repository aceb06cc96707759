"""Verbs of the Open Inference Protocol that HTTP and gRPC share, for a caller with roles.

Each verb first checks the caller's roles: it needs the role of the corresponding wire verb.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

from ...base.errors import (
    DRAINING,
    Cancelled,
    InvalidInput,
    ModelNotFound,
    PipeSwitchError,
    ServerUnavailable,
    draining,
    model_failed,
)
from ...base.roles import URGENT_PRIORITY, Principal, Role
from ...base.version import own_version
from ...frontend.verbs import require
from ...wire.frames import TRACEPARENT
from ...wire.tracing import Traced
from ..http.http_errors import NotFound
from . import oip
from .metrics import Metrics
from .model_stats import PHASES, ModelStats
from .oip import InferRequest, Output, RegionPlace
from .shared_memory import SharedMemoryRegions
from .upstream import Upstream

R = TypeVar("R")
READY: Final = "ready"  # a model's state
FAILED: Final = "failed"
EXTENSIONS: Final = (
    oip.BINARY_EXTENSION,
    "model_configuration",
    "model_repository",
    "schedule_policy",
    "statistics",
)
REGIONS_EXTENSION: Final = "system_shared_memory"
BILLED: Final = tuple(f"{phase}_ms" for phase in PHASES)
LOGGED: Final[Mapping[str, Any]] = {
    "log_file": "server.log",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
THREAD_BYTES: Final = 1 << 20  # a larger copy of shared memory runs on another thread
_STATES: Final[Mapping[str, str]] = {READY: "READY", "building": "LOADING", "storing": "LOADING"}


class Service:
    """Verbs, without the encoding of either protocol."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        has_nv_metrics: bool = False,
        regions: SharedMemoryRegions | None = None,
        tracer: Any = None,
    ) -> None:
        """Create the verbs; ``regions`` is None unless all callers are on this machine."""
        self.text_processes = 8  # maximum number of running text processes
        self.aliases: dict[str, str] = {}  # alias for OpenAI's clients -> model
        self.queue_full_count: Callable[[], int] = int  # returns ``Shared.queue_full_count``
        self.errors: Mapping[str, int] = {}  # ``Shared.errors``
        self._upstream = upstream
        self._tracer = tracer
        self._regions = regions
        self._tally = ModelStats()
        self._metrics = Metrics(self._tally, has_nv_names=has_nv_metrics)
        self.version = own_version()  # once: it reads a file

    def about(self) -> dict[str, Any]:
        """Return the body of ``/v2``, without a request to the server."""
        shared = () if self._regions is None else (REGIONS_EXTENSION,)
        return {"name": "pipeswitch", "version": self.version, "extensions": [*EXTENSIONS, *shared]}

    @property
    def regions(self) -> SharedMemoryRegions:
        """Regions of shared memory. InvalidInput: this gateway has none."""
        if self._regions is None:
            raise InvalidInput(
                "shared memory is not supported here",
                hint="use a gateway on loopback, without a proxy",
            )
        return self._regions

    async def is_live(self) -> bool:
        """Return True if the server answers."""
        try:
            await self._upstream.ask("ping")
        except ServerUnavailable:
            return False
        return True

    async def is_ready(self) -> bool:
        """Return True if the server would serve a request now."""
        return not await self.why_unready(None)

    async def why_unready(self, caller: Principal | None) -> str:
        """Return why the server would serve no request now; empty if it would.

        Only a caller who may list models reads which model is prepared.
        """
        try:
            answer = await self._upstream.ask("ping")
        except ServerUnavailable:
            return "it does not answer"
        why = "" if answer["ready"] else str(answer.get("why") or "no node is ready")
        is_told = caller is not None and Role.INFER in caller.roles
        return why if is_told else why.partition(":")[0]

    async def is_model_ready(self, caller: Principal, model: str, version: str) -> bool:
        return not await self.why_not_ready(caller, model, version)

    async def why_not_ready(
        self, caller: Principal, model: str, version: str
    ) -> ServerUnavailable | None:
        """Return a refusal if the model is not ready, with the reason if the caller may see it."""
        row = await self._row(caller, model, version)
        if row["state"] != READY:
            return _unready(row)
        return draining() if (await self._upstream.ask("ping")).get("why") == DRAINING else None

    async def metadata(self, caller: Principal, model: str, version: str) -> dict[str, Any]:
        return oip.metadata(_built(await self._row(caller, model, version)))

    async def config(self, caller: Principal, model: str, version: str) -> dict[str, Any]:
        return oip.config(_built(await self._row(caller, model, version)))

    async def statistics(
        self, caller: Principal, model: str = "", version: str = ""
    ) -> dict[str, Any]:
        """Return the statistics of one model, or of all."""
        if model:
            rows = [await self._row(caller, model, version)]
        else:
            rows = await self.rows(caller)
            self._tally.forget_others({name for name, _ in _named(rows)})
        return {"model_stats": [self._tally.row(*one) for one in _named(rows)]}

    async def index(self, caller: Principal, *, ready_only: bool = False) -> list[dict[str, Any]]:
        """Return Triton's index of the model repository: each model's name, version and state."""
        rows = [
            {
                "name": row["name"],
                "version": str(row["version"]),
                "state": _STATES.get(row["state"], "UNAVAILABLE"),
                "reason": row.get("reason", ""),
            }
            for row in await self.rows(caller)
        ]
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    async def load(self, caller: Principal, model: str, parameters: Mapping[str, Any]) -> None:
        """Pin a registered model on the device.

        Raises:
            InvalidInput: the parameters have model files or a configuration.
        """
        require(caller, "load")
        if any(name.startswith("file:") for name in parameters):
            raise InvalidInput(
                "load accepts no model files",
                hint="pipeswitch register NAME FILE.bundle; load pins what is registered",
            )
        if parameters:
            raise InvalidInput(
                f"load takes no {', '.join(sorted(parameters))[:80]}: it would have no effect",
                hint="pipeswitch register NAME SOURCE --max-batch 8 --batch 8; load pins it",
            )
        await self._upstream.ask("load", model)

    async def unload(self, caller: Principal, model: str) -> None:
        """Unpin a model; it stays registered."""
        require(caller, "unload")
        await self._upstream.ask("unload", model)

    async def infer(
        self,
        caller: Principal,
        model: str,
        version: str,
        request: InferRequest,
        carrier: Mapping[str, str] = MappingProxyType({}),
        address: str = "",
    ) -> tuple[list[Output], dict[str, Any]]:
        """Return the outputs, and the timing with the gateway's own time.

        ``carrier`` has headers, which may name the caller's trace. ``address`` is the caller's;
        addresses take turns.
        """
        require(caller, "infer")
        if request.priority == URGENT_PRIORITY:
            caller.require(Role.URGENT, "priority high")
        number = number_of(model, version) if version else 0
        if request.sequence and request.outputs:  # a refusal after the step would change the state
            named = [Output(name=one.name, dtype="", shape=(), data=b"") for one in request.outputs]
            oip.requested_outputs(request, named)  # the server checks the names
        began = time.perf_counter()
        places = (
            _places(request) if request.outputs or RegionPlace in map(type, request.frames) else []
        )
        if places:
            request = await _copied(places, self.regions.filled, caller, request)
        traced, traceparent = None, carrier.get("traceparent", "")
        if self._tracer is not None:
            traced = Traced(self._tracer, model, carrier)
            traceparent = traced.traceparent
        elif traceparent and not TRACEPARENT.fullmatch(traceparent):
            traceparent = ""  # W3C: ignore an invalid one
        try:
            tenant = caller.tenant
            answer = self._upstream.infer(model, number, request, tenant, address, traceparent)
            outputs, timing = await answer
        except BaseException as error:
            self._failed(model, traced, began, error)
            raise
        took_ms = (time.perf_counter() - began) * 1000.0
        timing["gateway_ms"] = max(0.0, took_ms - timing.get("total_ms", 0.0))
        self._tally.answered(model, took_ms, timing)
        if traced is not None:
            traced.answered(timing)
        if places:
            outputs = await _copied(outputs, self.regions.placed, caller, request, outputs)
        for key in BILLED:
            if key in timing:
                timing[key] = round(timing[key], 3)
        for step, part in timing.pop("steps", {}).items():  # a parameter cannot be an object
            timing[f"{step}.total_ms"] = round(part["total_ms"], 3)
        return outputs, timing

    async def request(
        self,
        caller: Principal,
        verb: str,
        model: str,
        version: str,
        options: dict[str, Any],
        carrier: Mapping[str, str] = MappingProxyType({}),
        address: str = "",
    ) -> dict[str, Any]:
        """Return the final reply to a verb of a kind of requests; it counts like ``infer``.

        ``options`` are those of ``LoopConnection.ask``, with a ``body`` that gets more fields.
        """
        require(caller, verb)
        number, began = number_of(model, version), time.perf_counter()
        traced, traceparent = None, carrier.get("traceparent", "")
        if self._tracer is not None:
            traced = Traced(self._tracer, model, carrier)
            traceparent = traced.traceparent
        asker = {
            "tenant": caller.tenant,
            "address": address,
            "version": number,
            "traceparent": traceparent if TRACEPARENT.fullmatch(traceparent) else "",
        }
        options["body"].update({name: value for name, value in asker.items() if value})
        try:
            body, timing = await self._upstream.request(verb, model, **options)
        except BaseException as error:
            self._failed(model, traced, began, error)
            raise
        took_ms = (time.perf_counter() - began) * 1000.0
        timing["gateway_ms"] = max(0.0, took_ms - timing.get("total_ms", 0.0))
        self._tally.answered(model, took_ms, timing)
        if traced is not None:
            traced.answered(timing)
        return body

    def _failed(
        self, model: str, traced: Traced | None, began: float, error: BaseException
    ) -> None:
        """Trace and count a request that failed. Raises NotFound: the model has no such version."""
        if traced is not None:
            traced.failed(error)
        if not isinstance(error, PipeSwitchError):
            return
        if "version" in error.data:
            raise NotFound(error.message, hint=error.hint) from None
        if not isinstance(error, ModelNotFound):  # do not store names that clients invent
            is_models = not isinstance(error, ServerUnavailable | Cancelled)
            took_ms = (time.perf_counter() - began) * 1000.0
            self._tally.failed(model, type(error).__name__, took_ms if is_models else None)

    async def ask(
        self, caller: Principal, verb: str, model: str, version: str, **fields: Any
    ) -> dict[str, Any]:
        """Return the reply to a verb about a model; fields without a value are not sent."""
        require(caller, verb)
        fields |= {"version": number_of(model, version), "tenant": caller.tenant}
        body = {name: value for name, value in fields.items() if value}
        return await self._upstream.ask(verb, model, body=body)

    async def owner(self, model: str, version: str) -> str:
        """Return the tenant that registered a model; callers do not see it."""
        return str((await self._upstream.show(model, number_of(model, version)))["tenant"])

    async def metrics(self, caller: Principal, accept: str) -> tuple[bytes, str]:
        """Return the Prometheus text and its type; only operators see the server's own numbers."""
        require(caller, "stats")
        facts: dict[str, Any] | None = None
        if caller.may_operate:
            replies = [self._upstream.ask(what) for what in ("stats", "jobs", "ps")]
            versions = self._upstream.ask("models", body={"versions": True})
            stats, jobs, ps, models = await asyncio.gather(*replies, versions)
            rows, stats["gateway_queue_full"] = models["models"], self.queue_full_count()
            stats["gateway_errors"] = self.errors
            current = _named([row for row in rows if row["current"]])
            self._tally.forget_others({name for name, _ in current})
            facts = {
                "stats": stats,
                "jobs": jobs["jobs"],
                "ps": ps["rows"],
                "models": rows,
                "model_stats": [self._tally.row(*one) for one in current],
            }
        return self._metrics.text(accept, facts)

    async def settings(
        self, caller: Principal, changes: Mapping[str, Any], model: str | None = None
    ) -> dict[str, Any]:
        """Return Triton's settings of the server's log, or of the traces of ``model`` ("": of all).
        They are fixed: InvalidInput is raised if ``changes`` has another value."""
        require(caller, "models")
        current, hint = LOGGED, "set [log] max and [log] requests before the server starts"
        if model is not None:
            level = "OFF" if self._tracer is None else "TIMESTAMPS"
            current = {"trace_level": level, "trace_mode": "opentelemetry"}
            hint = "set OTEL_TRACES_EXPORTER=otlp and OTEL_EXPORTER_OTLP_ENDPOINT for the server"
        if model:
            await self._row(caller, model, "")
        for name, value in changes.items():
            known = current.get(name)  # some clients send one value as a list
            if value is not None and (known is None or value not in (known, [known])):
                stays = "" if known is None else f" and is {known!r}"
                raise InvalidInput(f"{name[:80]!r} cannot be changed here{stays}", hint=hint)
        return dict(current)

    async def row(self, caller: Principal, model: str) -> dict[str, Any]:
        """Return the row of a built model, as far as the caller may see it."""
        return _built(await self._row(caller, model, ""))

    async def _row(self, caller: Principal, model: str, version: str) -> dict[str, Any]:
        require(caller, "show")
        try:
            return caller.visible(await self._upstream.show(model, number_of(model, version)))
        except InvalidInput as error:
            if "version" not in error.data:
                raise
            raise NotFound(error.message, hint=error.hint) from None

    async def rows(self, caller: Principal) -> list[dict[str, Any]]:
        require(caller, "models")
        return [caller.visible(row) for row in (await self._upstream.ask("models"))["models"]]


def _named(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [
        (name, row["version"]) for row in rows for name in (row["name"], *row.get("aliases", ()))
    ]


def _places(request: InferRequest) -> list[RegionPlace]:
    places = [one for one in request.frames if isinstance(one, RegionPlace)]
    return places + [one.place for one in request.outputs or () if one.place is not None]


async def _copied(tensors: Sequence[RegionPlace | Output], copy: Callable[..., R], *args: Any) -> R:
    """Return the result of ``copy``, which runs on another thread if it takes long."""
    total = sum(
        one.size_bytes if isinstance(one, RegionPlace) else len(one.data) for one in tensors
    )
    return copy(*args) if total <= THREAD_BYTES else await asyncio.to_thread(copy, *args)


def number_of(model: str, version: str) -> int:
    """Return the version's number from the wire; 0: the current one."""
    if version and not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise NotFound(
            f'"{model}" has no version {version[:40]!r}', hint="versions are numbers from 1 on"
        )
    return int(version or 0)


def _built(row: dict[str, Any]) -> dict[str, Any]:
    if not row["inputs"] and row["state"] != READY:
        raise _unready(row)
    return row


def _unready(row: dict[str, Any]) -> ServerUnavailable:
    if row["state"] == FAILED:
        return model_failed(row["name"], row.get("reason", ""))
    reason = f": {row['reason']}" if row.get("reason") else ""
    return ServerUnavailable(f'"{row["name"]}" is {row["state"]}{reason}', hint="ask again soon")
