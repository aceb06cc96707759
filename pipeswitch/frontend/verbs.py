"""Verbs of the protocol: roles, fields, and events for the scheduler. Reads only scripts' paths.

``VERBS`` is the table of all verbs. Most are checked here and converted to one event for the
scheduler, before the request is accepted. The frontend answers the others. A new verb needs an
event (``scheduler/state/events.py``), a component that handles the event (``core.handles``), and a
row here, which may give it an HTTP route. It also needs a method of the SDK (``client/verbs.py``).
docs/protocol.md lists verbs and fields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..base.errors import InvalidInput
from ..base.extras import COMPOSITES, GROUPS, KINDS, REPLIES
from ..base.model_options import RegisterRequest
from ..base.roles import Principal, Role
from ..ipc.messages.base import JobName, ModelName
from ..job import known_offload, size_of
from ..scheduler.state import events as ev
from ..wire.frames import RequestHeader
from . import permissions
from .intake import validation
from .intake.validation import Body
from .job_files import PIECES
from .permissions import Rules as Rules
from .registration import registration

_logger = logging.getLogger(__name__)

MAX_DRAIN_MS: Final = 86_400_000.0
MAX_TRACE_S: Final = 3600.0
JOB_ACTIONS: Final = ("show", "pause", "resume", "cancel", "wait", "export", "rm", "move")


@dataclass(frozen=True, kw_only=True)
class LogPiece:
    """Request for ``job logs``, ``history`` or ``state``: read from disk, without the scheduler."""

    job: JobName
    kind: str
    offset_bytes: int


class Question:
    """Request as a verb's parser gets it."""

    def __init__(
        self, header: RequestHeader, token: ev.Token, principal: Principal, rules: Rules
    ) -> None:
        self.op = header.op
        self.model = ModelName(header.model)
        self.token = token  # the event's token
        self.body = Body(header.op, header.body)
        self.principal = principal
        self.rules = rules

    @property
    def own_tenant(self) -> str | None:
        """Tenant whose models the client may change; None: every tenant."""
        return None if self.principal.may_operate else self.principal.tenant


Event = ev.ClientRequest | ev.DrainRequest
Parser = Callable[[Question], Event | LogPiece]
"""Parser of a verb. It takes its fields from the body; ``ask`` then refuses the other fields."""


def ask(
    header: RequestHeader, token: ev.Token, principal: Principal, rules: Rules
) -> Event | LogPiece:
    """Parse a request into an event, for a client that has the verb's role.

    Raises:
        PipeSwitchError: a field is missing, unknown or out of range, or not allowed here.
    """
    question = Question(header, token, principal, rules)
    parse = VERBS[header.op].parse
    if parse is None:
        raise InvalidInput(f"{header.op} is not a request to the scheduler")
    request = parse(question)
    question.body.done()
    return request


def _register(q: Question) -> Event:
    principal = replace(q.principal, tenant=validation.tenant_of(q.body, q.principal.tenant))
    request: RegisterRequest = q.body.rest(RegisterRequest)
    if request.generate:
        KINDS.load("generation")
    return registration(q.token, q.model, request, principal, q.rules)


def _composite(q: Question) -> Event:
    event: Event = COMPOSITES.load(q.op).parse(q)
    return event


def _train(q: Question) -> Event:
    job = JobName(validation.check_name(q.body.text("name"), "job"))
    entry = permissions.check_entry(q.body.text("entry"), q.principal, q.rules)
    if share := q.body.text("share", ""):
        GROUPS.load("shared_input")  # raises ConfigError
    folder, env = permissions.check_place(
        q.body.text("folder", ""), q.body.texts("env"), q.principal
    )
    return ev.TrainRequest(
        token=q.token,
        spec=ev.JobSpec(
            name=job,
            entry=entry,
            args=q.body.texts("args"),
            priority=validation.priority_number(q.body.text("priority", ""), default=2),
            tenant=q.principal.tenant,
            share=share and validation.check_name(share, "share"),
            devices=q.body.texts("devices"),
            defaults=_defaults_of_steps(q),
            folder=folder,
            env=env,
        ),
        resumes=q.body.flag("resumes"),
        is_paused=q.body.flag("paused"),
    )


def _defaults_of_steps(q: Question) -> tuple[tuple[str, str], ...]:
    offload, memory = q.body.text("offload", ""), q.body.text("activation_memory", "")
    return (
        *((("offload", known_offload(offload, "train")),) if offload else ()),
        *((("activation_bytes", str(size_of(memory, "train"))),) if memory else ()),
    )


def _publish(q: Question) -> Event:
    name = ModelName(validation.check_name(q.model, "model"))
    job = JobName(validation.check_name(q.body.text("job"), "job"))
    step = q.body.count("step") if q.body.has("step") else -1
    return ev.PublishRequest(
        token=q.token, model=name, job=job, step=step, part=q.body.text("part", "")
    )


def _rollback(q: Question) -> Event:
    version = q.body.count("version", 0)
    share = q.body.count("share", high=100) if q.body.has("share") else -1
    return ev.RollbackRequest(
        token=q.token, model=q.model, version=version, share=share, tenant=q.own_tenant
    )


def _unregister(q: Question) -> Event:
    return ev.UnregisterRequest(token=q.token, model=q.model, tenant=q.own_tenant)


def _pin(q: Question) -> Event:
    return ev.PinRequest(token=q.token, model=q.model, pin=q.op == "load")


def _job(q: Question) -> Event | LogPiece:
    job = JobName(validation.check_name(q.body.text("name"), "job"))
    action: Any = q.body.text("action")
    if action in PIECES:
        return LogPiece(job=job, kind=action, offset_bytes=q.body.count("offset_bytes", 0))
    if action not in JOB_ACTIONS:
        raise InvalidInput(
            f"job: action {action[:40]!r} is none of {', '.join((*JOB_ACTIONS, *PIECES))}"
        )
    to = q.body.text("to") if action == "move" else ""
    return ev.JobRequest(token=q.token, job=job, action=action, to=to)


def _regroup(q: Question) -> Event:
    return ev.RegroupRequest(
        token=q.token,
        model=q.model,
        plan=q.body.of_type("plan", tuple[int, ...], ()),
        is_cold=q.body.flag("cold", True),
        trial=ev.Token(q.body.count("trial", 0)),
        planned=q.body.of_type("planned", str, "").encode(),
    )


def _ping(q: Question) -> Event:
    """Parse a deep ``ping``. The frontend answers others itself, even without a session."""
    if not q.body.flag("deep"):
        raise InvalidInput("ping: the body must be empty or have deep: true")
    return ev.PingRequest(token=q.token)


def _query(q: Question) -> Event:
    what: Any = q.op
    return ev.Query(
        token=q.token,
        what=what,
        name=q.model,
        seconds=q.body.number("seconds", 10.0, MAX_TRACE_S) if what == "trace" else 0.0,
        version=q.body.count("version", 0) if what == "show" else 0,
        all_versions=what == "models" and q.body.flag("versions"),
    )


def _stop(q: Question) -> Event:
    grace_ms = q.body.number("drain_ms", 30_000.0, MAX_DRAIN_MS)
    _logger.info("stop asked grace_ms=%.0f", grace_ms)
    return ev.DrainRequest(token=q.token, grace_ms=grace_ms)


@dataclass(frozen=True)
class Http:
    """Route of a verb below ``/api`` of the gateway."""

    method: str
    path: str  # "{model}" stands for the verb's model
    what: str  # description in /api/openapi.json
    query: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fields of the verb's body that come from the query: JSON Schema type, and meaning."""
    is_safe: bool = True  # it may be sent twice


@dataclass(frozen=True)
class Verb:
    """One verb of the wire."""

    role: Role  # role that the client needs
    parse: Parser | None = None  # None: the frontend answers it
    of_model: bool = False  # the error for an unknown model names the nearest one
    of_owner: bool = False  # another client's model needs ``operate``
    ends_with_client: bool = False  # cancelled when its client is gone
    kind: str = ""  # kind of requests that answers it (``kinds.py``)
    is_cut: bool = False  # without ``operate``, the reply has fewer facts
    http: Http | None = None  # None: no route below /api, or one with more

    @property
    def http_role(self) -> Role:
        """Role for the route. The gateway sends requests as the owner, who may do everything.
        So a verb whose reply or rights depend on the client needs ``operate`` there."""
        return Role.OPERATE if self.is_cut or self.of_owner else self.role


VERBS: Final[Mapping[str, Verb]] = {
    "hello": Verb(Role.INFER),
    "ping": Verb(Role.INFER, _ping),
    "infer": Verb(Role.INFER, ends_with_client=True),
    "generate": Verb(Role.INFER, ends_with_client=True, kind="generation"),
    "prefetch": Verb(Role.INFER),
    "cancel": Verb(Role.INFER),  # cancels requests of the same session
    "models": Verb(Role.INFER, _query, is_cut=True),  # the client's own models have all facts
    "show": Verb(Role.INFER, _query, of_model=True, is_cut=True),  # like ``models``
    "stats": Verb(  # without ``operate``, counters of the session's requests
        Role.INFER, _query, is_cut=True, http=Http("GET", "stats", "Counters and sizes")
    ),
    "sequences": Verb(Role.INFER),  # the caller's; all of them for the owner
    "generation": Verb(Role.INFER, kind="generation"),
    "put": Verb(Role.REGISTER),
    "register": Verb(Role.REGISTER, _register, of_model=True, ends_with_client=True),
    **{name: Verb(Role.REGISTER, _composite) for name in COMPOSITES.names()},
    "unregister": Verb(
        Role.REGISTER,
        _unregister,
        of_model=True,
        of_owner=True,
        http=Http("DELETE", "models/{model}", "Unregister", is_safe=False),
    ),
    "rollback": Verb(Role.REGISTER, _rollback, of_model=True, of_owner=True),
    "publish": Verb(Role.OPERATE, _publish, of_model=True, ends_with_client=True),  # any client's
    "load": Verb(
        Role.OPERATE,
        _pin,
        of_model=True,
        http=Http("POST", "models/{model}/load", "Pin it on the device"),
    ),
    "unload": Verb(
        Role.OPERATE, _pin, of_model=True, http=Http("POST", "models/{model}/unload", "Unpin it")
    ),
    "regroup": Verb(Role.OPERATE, _regroup, ends_with_client=True),
    "plan": Verb(
        Role.OPERATE, _query, http=Http("GET", "plan", "Each model's profile, and the arena")
    ),
    "ps": Verb(
        Role.OPERATE,
        _query,
        http=Http("GET", "ps", "Models, jobs and processes, what they do and hold now"),
    ),
    "jobs": Verb(Role.OPERATE, _query, http=Http("GET", "jobs", "One row for each job")),
    "job": Verb(Role.OPERATE, _job, ends_with_client=True),
    "trace": Verb(Role.OPERATE, _query),
    "events": Verb(Role.OPERATE),  # events of all clients
    "stop": Verb(Role.OPERATE, _stop),
    "caller": Verb(Role.CODE),  # only at the owner's socket
    "train": Verb(Role.CODE, _train),
    **{name: Verb(Role.CODE) for name in REPLIES.names()},
}


def require(caller: Principal, verb: str) -> None:
    """Raise PermissionDenied if the caller lacks the role that a verb needs."""
    if (role := VERBS[verb].role) not in caller.roles:
        raise caller.refusal(role, verb)
