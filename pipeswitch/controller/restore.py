"""What was there before: models and jobs that the journal knows, and those of the configuration."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

import msgspec

from ..commits.progress import SUFFIX, read_life
from ..config import PRIORITIES, ModelConfig
from ..errors import PipeSwitchError
from ..frontend import permissions
from ..ipc.messages import JobName, ModelName
from ..programs.chains import Chain
from ..programs.signature import parse_input
from ..programs.spec import devices_of, stage_of
from ..scheduler.events import ChainAsked, RegisterAsked, SweepPrograms, Token
from ..scheduler.models.versions import split_name
from .server import Server

log = logging.getLogger(__name__)


def restore(server: Server) -> None:
    """Models and jobs of the journal, then the models of the configuration: each an event."""
    journal, builds = server.journal, server.effects.builds
    tokens = map(Token, itertools.count(-1, -1))  # negative: the server itself asks
    known = [split_name(name) for name in journal.models]
    for name, entry in journal.serving.items():
        numbers = entry["version"], entry["last"], entry["spec_digest"]
        there = [version for base, version in known if base == name]
        server.scheduler.versions.restore(ModelName(name), *numbers, there, entry["shares"])
    for name, entry in journal.models.items():
        builds.built_before[entry["spec"]] = entry["digest"]
        server.inbox.append(
            RegisterAsked(
                token=next(tokens),
                model=ModelName(name),
                spec=entry["spec"],
                spec_digest=entry["spec_digest"],
                priority=entry["priority"],
                is_pinned=entry["pin"],
                tenant=entry["tenant"],
                devices=devices_of(entry["spec"]),
                stage=stage_of(entry["spec"]),
                is_known=True,
                restored=builds.manifest_of(entry["digest"]),
            )
        )
    for name, entry in journal.chains.items():
        try:
            chain = msgspec.msgpack.decode(entry["spec"], type=Chain)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("chain=%s of the journal ignored: %s", name, error)
            continue
        server.inbox.append(
            ChainAsked(
                token=next(tokens), model=ModelName(name), tenant=entry["tenant"], restored=chain
            )
        )
    # Nothing is registered yet; the journal's models stay.
    builds.sweep(SweepPrograms(digests=frozenset()))
    server.effects.sweep_commits({*journal.jobs, *journal.ended})
    for name, entry in journal.jobs.items():
        _restore_job(server, JobName(name), entry)
    for name, entry in journal.ended.items():
        _restore_ended(server, JobName(name), entry["record"])
    for model in server.config.models:
        if model.name not in {name for name, _ in known}:
            server.inbox.append(_configured(next(tokens), model))


def _restore_job(server: Server, name: JobName, entry: dict[str, object]) -> None:
    slot_bytes, step = 0, -1
    try:
        slot_bytes, step = server.effects.restore_commits(name) or (0, -1)
    except (PipeSwitchError, OSError) as error:
        log.error("job=%s commit on disk is unusable, starting over: %s", name, error)
    life = read_life(server.places.logs / f"job-{name}{SUFFIX}")
    server.scheduler.machine.jobs.restore(
        name,
        str(entry["entry"]),
        tuple(entry["args"]),  # type: ignore[arg-type]
        int(entry["priority"]),  # type: ignore[call-overload]
        slot_bytes,
        step,
        is_paused=name in server.journal.holds,
        tenant=str(entry["tenant"]),
        share=str(entry["share"]),
        devices=tuple(entry["devices"]),  # type: ignore[arg-type]
        placed=server.journal.placed.get(name),
        restarts=life.restarts + life.is_running,
        steps_recomputed=life.steps_recomputed,
        last_step=life.step,
        defaults=tuple((key, value) for key, value in entry["defaults"]),  # type: ignore[attr-defined]
    )


def _restore_ended(server: Server, name: JobName, record: dict[str, Any]) -> None:
    jobs = server.scheduler.machine.jobs
    try:
        jobs.restore_ended(name, record, server.effects.step_on_disk(name))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("job=%s record of an ended job ignored: %r", name, error)


def _configured(token: Token, model: ModelConfig) -> RegisterAsked:
    source = permissions.check_source(
        model.source, model.weights, is_owner=True, allow_code=("*",), uploads_dir=""
    )
    inputs = dict(map(parse_input, model.inputs, range(len(model.inputs))))
    raw, returns = (
        dict(map(functools.partial(parse_input, texts=True), declared, range(len(declared))))
        for declared in (model.raw, model.returns)
    )
    permissions.check_function("preprocess", model.preprocess, raw, is_owner=True, allow_code=())
    permissions.check_function(
        "postprocess", model.postprocess, returns, is_owner=True, allow_code=()
    )
    spec, digest = permissions.encode_spec(
        model.name, source, inputs, None, model.max_batch, model.batch, model.batch_delay_ms,
        model.devices, model.preprocess, raw, model.postprocess, returns,
    )  # fmt: skip
    return RegisterAsked(
        token=token,
        model=ModelName(model.name),
        spec=spec,
        spec_digest=digest,
        priority=PRIORITIES[model.priority],
        is_pinned=model.pin,
        devices=model.devices,
        stage=stage_of(spec),
    )
