"""Requests that are one question to the scheduler: checked, then typed events. Pure but for paths.

A verb is parsed before it is accepted: ``Verbs.parse`` raises, or returns what makes the event
once the request has its token. The verbs and their fields: docs/protocol.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import InvalidInput
from ..ipc.messages import JobName, ModelName
from ..programs.spec import stage_of
from ..roles import URGENT_PRIORITY, Role, Standing
from ..scheduler.events import (
    DrainAsked,
    Event,
    JobAsked,
    PinAsked,
    PingAsked,
    ProfileAsked,
    PublishAsked,
    Query,
    RegisterAsked,
    RollbackAsked,
    Token,
    TrainAsked,
    UnregisterAsked,
)
from ..wire.frames import RequestHeader
from . import admission, permissions
from .admission import Body
from .job_files import PIECES

_logger = logging.getLogger(__name__)

MAX_BATCH_DELAY_MS: Final = 60_000.0
MAX_DRAIN_MS: Final = 86_400_000.0
MAX_TRACE_S: Final = 3600.0
JOB_ACTIONS: Final = ("show", "pause", "resume", "cancel", "wait", "export", "rm", "move")

Asked = Callable[[Token], Event]


@dataclass(frozen=True, kw_only=True)
class LogPiece:
    """``job logs``, ``history``, ``state``: read from disk, answered without the scheduler."""

    job: JobName
    kind: str
    offset_bytes: int


Parser = Callable[[RequestHeader, Body, Standing], Asked | LogPiece]
"""Takes the fields that it knows; others are refused after it."""


class Verbs:
    """Parses the control verbs of one server."""

    def __init__(self, *, allow_code: Sequence[str], uploads_dir: str) -> None:
        self._allow_code = tuple(allow_code)
        self._uploads_dir = uploads_dir
        self._parsers: dict[str, Parser] = {
            "register": self._register,
            "publish": _publish,
            "rollback": _rollback,
            "unregister": _unregister,
            "load": _pin,
            "unload": _pin,
            "train": self._train,
            "job": _job,
            "models": _query,
            "show": _query,
            "ps": _query,
            "ping": _ping,
            "jobs": _query,
            "stats": _query,
            "plan": _query,
            "profile": _profile,
            "trace": _query,
            "stop": _stop,
        }

    def parse(self, header: RequestHeader, standing: Standing) -> Asked | LogPiece:
        """The event this request stands for, of a client that has the verb's role.

        Raises:
            PipeSwitchError: a field is missing, unknown or out of range, or not allowed here.
        """
        body = Body(header.op, header.body)
        asked = self._parsers[header.op](header, body, standing)
        body.done()
        return asked

    def _register(self, header: RequestHeader, body: Body, standing: Standing) -> Asked:
        name = admission.check_name(header.model, "model")
        standing = replace(standing, tenant=admission.tenant_of(body, standing.tenant))
        source = permissions.check_source(
            body.text("source"),
            body.text("weights", ""),
            body.text("example", ""),
            is_owner=standing.is_owner,
            allow_code=self._allow_code,
            uploads_dir=self._uploads_dir,
        )
        if source.is_code:
            standing.require(Role.CODE, "a factory")
        inputs = body.signature("inputs")
        takes = body.tree("takes", inputs)
        urgency = body.text("priority", "")
        if urgency == URGENT_PRIORITY:
            standing.require(Role.URGENT, "a model of priority high")
        priority = admission.priority_number(urgency, default=1)
        is_pinned = body.flag("pin")
        if is_pinned:
            standing.require(Role.OPERATE, "to pin a model")
        devices = body.texts("devices")
        preprocess, raw = body.text("preprocess", ""), body.signature("raw")
        if preprocess:
            permissions.check_function(
                preprocess, raw, is_owner=standing.is_owner, allow_code=self._allow_code
            )
            standing.require(Role.CODE, "to preprocess")
        elif raw:
            raise InvalidInput(
                "register: raw inputs without preprocess",
                hint="--preprocess package.module:function makes the model's inputs of them",
            )
        spec, digest = permissions.encode_spec(
            name, source, inputs, takes, body.count("max_batch", 0), body.count("batch", 0),
            body.number("batch_delay_ms", 0.0, MAX_BATCH_DELAY_MS), devices,
            preprocess, raw,
        )  # fmt: skip
        return lambda token: RegisterAsked(
            token=token,
            model=ModelName(name),
            spec=spec,
            spec_digest=digest,
            priority=priority,
            is_pinned=is_pinned,
            tenant=standing.tenant,
            devices=devices,
            stage=stage_of(spec),
        )

    def _train(self, _: RequestHeader, body: Body, standing: Standing) -> Asked:
        job = JobName(admission.check_name(body.text("name"), "job"))
        entry = permissions.check_entry(
            body.text("entry"), is_owner=standing.is_owner, allow_code=self._allow_code
        )
        args = body.texts("args")
        priority = admission.priority_number(body.text("priority", ""), default=2)
        share = body.text("share", "")
        if share:
            admission.check_name(share, "share")
        devices = body.texts("devices")
        return lambda token: TrainAsked(
            token=token, job=job, entry=entry, args=args, priority=priority,
            tenant=standing.tenant, share=share, devices=devices,
        )  # fmt: skip


def _publish(header: RequestHeader, body: Body, _: Standing) -> Asked:
    name = ModelName(admission.check_name(header.model, "model"))
    job = JobName(admission.check_name(body.text("job"), "job"))
    step = body.count("step", -1) if "step" in header.body else -1
    part = body.text("part", "")
    return lambda token: PublishAsked(token=token, model=name, job=job, step=step, part=part)


def _rollback(header: RequestHeader, body: Body, standing: Standing) -> Asked:
    version = body.count("version", 0)
    share = body.count("share", high=100) if "share" in header.body else -1
    tenant = None if standing.may_operate else standing.tenant
    return lambda token: RollbackAsked(
        token=token, model=ModelName(header.model), version=version, share=share, tenant=tenant
    )


def _unregister(header: RequestHeader, _: Body, standing: Standing) -> Asked:
    tenant = None if standing.may_operate else standing.tenant
    return lambda token: UnregisterAsked(token=token, model=ModelName(header.model), tenant=tenant)


def _pin(header: RequestHeader, _: Body, __: Standing) -> Asked:
    pin = header.op == "load"
    return lambda token: PinAsked(token=token, model=ModelName(header.model), pin=pin)


def _job(_: RequestHeader, body: Body, __: Standing) -> Asked | LogPiece:
    job = JobName(admission.check_name(body.text("name"), "job"))
    action: Any = body.text("action")
    if action in PIECES:
        offset = body.count("offset_bytes", 0)
        return LogPiece(job=job, kind=action, offset_bytes=offset)
    if action not in JOB_ACTIONS:
        raise InvalidInput(
            f"job: action {action[:40]!r} is none of {', '.join((*JOB_ACTIONS, *PIECES))}"
        )
    to = body.text("to") if action == "move" else ""
    return lambda token: JobAsked(token=token, job=job, action=action, to=to)


def _profile(header: RequestHeader, body: Body, _: Standing) -> Asked:
    batches = body.counts("batches")
    return lambda token: ProfileAsked(token=token, model=ModelName(header.model), batches=batches)


def _ping(_: RequestHeader, body: Body, __: Standing) -> Asked:
    """``ping`` without a body asks the loop alone and is answered by it, without a session."""
    is_deep = body.flag("deep")
    if not is_deep:
        raise InvalidInput("ping: deep is true, or there is no body")
    return lambda token: PingAsked(token=token)


def _query(header: RequestHeader, body: Body, _: Standing) -> Asked:
    seconds = body.number("seconds", 10.0, MAX_TRACE_S) if header.op == "trace" else 0.0
    version = body.count("version", 0) if header.op == "show" else 0
    all_versions = header.op == "models" and body.flag("versions")
    what: Any = header.op
    return lambda token: Query(
        token=token, what=what, name=header.model, seconds=seconds, version=version,
        all_versions=all_versions,
    )  # fmt: skip


def _stop(_: RequestHeader, body: Body, __: Standing) -> Asked:
    grace_ms = body.number("drain_ms", 30_000.0, MAX_DRAIN_MS)

    def asked(token: Token) -> Event:
        _logger.info("stop asked grace_ms=%.0f", grace_ms)
        return DrainAsked(token=token, grace_ms=grace_ms)

    return asked
