"""Restoration of the journal's models and jobs, and registration of the configured models."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from ..base.errors import InvalidInput, PipeSwitchError
from ..base.extras import COMPOSITES
from ..base.model_options import ModelConfig, RegisterRequest
from ..commits.progress import SUFFIX, read_life
from ..frontend.registration import registration
from ..ipc.messages.base import JobName, ModelName
from ..programs.spec import BuildSpec, wrapper_of
from ..scheduler.state import events as ev
from ..scheduler.state.versions import split_name, version_name
from ..scheduler.training.jobs import RestoredJob
from .builds import Builds
from .entries import Entry
from .server import Server

log = logging.getLogger(__name__)

LOST: Final = "its entry in the journal is damaged and has no copy"


def restore(server: Server, now_s: float) -> None:
    """Restore models and jobs of the journal, then register the models of the configuration.

    Skip an unusable entry and report it. ``now_s``: seconds since 1970.
    """
    journal, reasons = server.journal, dict[tuple[str, str], str]()
    tokens = map(ev.Token, itertools.count(-1, -1))  # negative: the server's own requests
    known = [split_name(name) for name in journal.models]
    _restore_versions(server, known)
    missing = {split_name(name)[0] for kind, name in journal.lost if kind == "model"}
    for alias, entry in journal.aliases.items():  # drop aliases whose model was never journaled
        if entry["model"] not in {*missing, *(name for name, _ in known)}:
            journal.owe({"kind": "alias-gone", "name": alias})
    server.effects.sweep({*journal.jobs, *journal.ended}, now_s)
    for kind, entries, bring_back in (
        ("model", journal.models, _restore_model),
        ("chain", journal.chains, _restore_chain),
        ("job", journal.jobs, _restore_job),
        ("ended", journal.ended, _restore_ended),
    ):
        for name, entry in entries.items():
            try:
                bring_back(server, name, entry, next(tokens))
            except Exception as error:  # one bad entry must not stop the server
                log.exception("%s=%s of the journal left out", kind, name)
                journal.losses.append(f"the entry of {kind} {name} is not usable: {error!r}")
                journal.lost.append((kind, name))
                if isinstance(error, PipeSwitchError):  # an installation that lacks what it needs
                    reasons[kind, name] = error.message
    events = sorted(server.inbox, key=functools.partial(_is_slow, server.effects.builds))
    server.inbox.clear()
    server.inbox.extend(events)  # programs that must be built again, for minutes, come last
    for kind, name in journal.lost:
        _show_lost(server, kind, name, now_s, reasons.get((kind, name), LOST))
    unusable = {split_name(name)[0] for kind, name in journal.lost if kind == "model"}
    for model in sorted(server.config.models, key=lambda one: bool(one.like)):  # others first
        if model.name in unusable and model.name in {name for name, _ in known}:
            continue
        token = next(tokens)
        server.effects.first_attempts[token] = ModelName(model.name)
        try:
            event = configured(token, model)
            server.inbox.append(msgspec.structs.replace(event, is_configured=True))
        except PipeSwitchError as error:
            server.effects.perform(ev.Reply(token=token, error=error))


def _restore_versions(server: Server, known: Sequence[tuple[ModelName, int]]) -> None:
    """Restore which version each name stands for. A name has none if the journal lost that entry,
    or the version's own: no start changes which version is served."""
    journal, versions = server.journal, server.scheduler.versions
    there = defaultdict[ModelName, list[int]](list)
    for name, number in known:
        there[name].append(number)
    for served, entry in journal.serving.items():
        name = ModelName(served)
        numbers = there[name]
        facts = entry["version"], entry["last"], entry["spec_digest"]
        versions.restore(name, *facts, numbers, entry["shares"])
        model = version_name(name, entry["version"])
        if numbers and entry["version"] not in numbers and ("model", model) not in journal.lost:
            journal.losses.append(f"the entry of model {model}, which is served, is missing")
            journal.lost.append(("model", model))
    for name, numbers in there.items():
        if ("serving", name) in journal.lost and numbers and max(numbers) > 1:
            versions.restore(name, max(numbers) + 1, max(numbers) + 1, "", numbers)
            journal.lost.append(("model", version_name(name, max(numbers) + 1)))


def _is_slow(builds: Builds, event: ev.Event) -> bool:
    if not isinstance(event, ev.RegisterModelRequest):
        return False
    return not builds.is_usable(builds.built_before[event.spec], event.restored)


def _show_lost(server: Server, kind: str, name: str, now_s: float, reason: str) -> None:
    """Show a model or job that cannot be restored as failed."""
    if kind in ("model", "chain"):
        own = [
            ModelName(alias)
            for alias, entry in server.journal.aliases.items()
            if entry["model"] == split_name(name)[0]
        ]
        server.scheduler.registry.names.mark_lost(ModelName(name), reason, own)
    elif kind in ("job", "ended"):
        _show_failed(server, JobName(name), reason, now_s, {"entry": "", "args": [], "priority": 1})


def _show_failed(server: Server, name: JobName, error: str, now_s: float, spec: Entry) -> None:
    """List a job as failed; ``jobs resume`` starts it from its commit on disk."""
    step = server.effects.step_on_disk(name)
    record = {
        "tenant": "",
        **spec,
        "state": "failed",
        "step": max(step, 0),
        "error": error,
        "why": "",
        "epoch": 0,
        "log": {},
        "ended_at_ms": now_s * 1000.0,
    }
    server.scheduler.machine.jobs.restore_ended(name, record, step)


def _restore_model(server: Server, name: str, entry: Entry, token: ev.Token) -> None:
    builds, spec = server.effects.builds, entry["spec"]
    decoded = msgspec.msgpack.decode(spec, type=BuildSpec)
    aliases, base = server.journal.aliases.items(), split_name(name)[0]
    event = ev.RegisterModelRequest(
        token=token,
        model=ModelName(name),
        spec=spec,
        spec_digest=entry["spec_digest"],
        priority=entry["priority"],
        is_pinned=entry["pin"],
        tenant=entry["tenant"],
        devices=decoded.devices,
        wrapper=wrapper_of(decoded),
        aliases=tuple(ModelName(alias) for alias, one in aliases if one["model"] == base),
        is_known=True,
        restored=builds.manifest_of(entry["digest"]),
        lent=entry["lent"],
    )
    builds.built_before[spec] = entry["digest"]
    server.effects.restored[token] = ModelName(name)
    server.inbox.append(event)


def _restore_chain(server: Server, name: str, entry: Entry, token: ev.Token) -> None:
    server.inbox.append(COMPOSITES.load("chain").restored(ModelName(name), entry, token))


def _restore_job(server: Server, job: str, entry: Entry, _: ev.Token) -> None:
    name, damage = JobName(job), list[str]()
    slot_bytes, step = 0, -1
    try:
        slot_bytes, step = server.effects.restore_commits(name, damage.append) or (0, -1)
    except PipeSwitchError as error:
        damage.append(str(error))
    except OSError as error:  # no damage: too little memory, or a disk that does not answer now
        text = f"{type(error).__name__}: its commits cannot be read now: {error}"
        server.journal.losses.append(f"job {name} failed: {text}")
        _show_failed(server, name, text, time.time(), entry)
        return
    why = f"continues from step {step}" if step >= 0 else "starts over"
    why = f"{why}: {'; '.join(damage)}" if damage else ""
    if why:
        log.error("job=%s %s", name, why)
        server.journal.losses.append(f"job {name} {why}")
    life = read_life(server.places.logs / f"job-{name}{SUFFIX}").continued()
    restored = RestoredJob(
        slot_bytes,
        step,
        is_paused=name in server.journal.holds,
        placed=server.journal.placed.get(name),
        restarts=life.restarts,
        steps_recomputed=life.steps_recomputed,
        last_step=life.step,
        why=why,
    )
    server.scheduler.machine.jobs.restore(
        msgspec.convert({**entry, "name": name}, ev.JobSpec), restored
    )


def _restore_ended(server: Server, name: str, entry: Entry, _: ev.Token) -> None:
    jobs, step = server.scheduler.machine.jobs, server.effects.step_on_disk(JobName(name))
    jobs.restore_ended(JobName(name), entry["record"], step)


def configured(token: ev.Token, model: ModelConfig) -> ev.Event:
    """Return the registration of a ``[[model]]`` section.

    Raises:
        PipeSwitchError: a client's registration with these values would be refused too.
    """
    request = msgspec.convert(model, RegisterRequest, from_attributes=True)
    is_usual = model.generate and model.source.startswith("hf:")  # then they are pretrained
    if model.source.startswith(("torchvision:", "hf:")) and not (model.weights or is_usual):
        raise InvalidInput(f'{model.source} needs weights = "pretrained", "random:SEED" or a file')
    return registration(token, model.name, request)
