"""Entry of a builder: a forked process that builds one model and exits (ADR 3).

A faulty model can end only this process, not the server.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...base.errors import HostStoreFull, PipeSwitchError, RegistrationRefused, to_wire
from ...base.failpoints import are_enabled, reach
from ...base.machine import processor_features
from ...base.units import format_bytes
from ...ipc.channel import Channel
from ...ipc.messages.base import ResourceLimits
from ...ipc.messages.builder import BuildDone, BuildFailed, BuildProgress, BuildSettings
from ...sandbox.confine import confine_builder
from ..interface.dims import largest, values_text
from ..interface.layout import Manifest
from ..spec import BUNDLE_FILE, MANIFEST_FILE, BuildSpec, files_of, needs_more
from . import hub


def exports(settings: BuildSettings) -> bool:
    """Return True if the source is not a bundle, so that this build exports it. Never raises."""
    try:
        spec = msgspec.msgpack.decode(settings.spec, type=BuildSpec)
    except Exception:  # the build refuses this spec
        return False
    return not spec.source.endswith(".bundle")


def run(settings: BuildSettings, channel: Channel) -> int:
    """Build into a temporary folder, which the controller then renames to the program's digest."""
    # Programs are built on the CPU only. With a visible GPU, torch's export would create a context
    # of half a gigabyte, but the arena has taken the device's memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from ...devices.cpu.packed import missing_half
    from .program import build

    limits = settings.limits
    torch.set_num_threads(limits.threads)
    _limit(limits)

    def progress(stage: str, fraction: float) -> None:
        channel.send(
            BuildProgress(
                model=settings.model, op_id=settings.op_id, stage=stage, fraction=fraction
            )
        )

    root = Path(settings.directory)
    try:
        work = Path(tempfile.mkdtemp(prefix=work_prefix(settings.op_id), dir=root))
    except OSError as error:
        reason = f"{os.strerror(error.errno or 0)}: {root}"
        _fail(channel, settings, RegistrationRefused("build", reason))
        return 0
    try:
        spec = msgspec.msgpack.decode(settings.spec, type=BuildSpec)
        reach("build.begin")
        if "hf:" in (spec.source[:3], spec.origin[:3]) and not settings.is_owners:
            os.chdir(work)  # else ``hf:a/b`` could mean a folder of the server
        processor_features()  # cached
        missing_half()  # requests the processor's matrix registers, which the sandbox forbids
        if limits.is_sandboxed and not needs_more(settings.spec) and not are_enabled():
            _confine(settings.spec, spec.source, work)
        with _metered(settings, spec, work, channel):
            manifest = build(
                spec, work, progress, settings.disk_bytes, packs_weights=limits.packs_weights
            )
        _check_memory(manifest, limits.task_memory_bytes)
        reach("build.write")
    except (Exception, SystemExit) as error:  # a model's own code may raise anything
        shutil.rmtree(work, ignore_errors=True)  # a confined process cannot remove ``work`` itself
        if not isinstance(error, PipeSwitchError):
            reason = f"{type(error).__name__}: {error}"
            error = RegistrationRefused("build", reason[:2000])
        _fail(channel, settings, error)
        return 0
    channel.send(
        BuildDone(
            model=settings.model, op_id=settings.op_id, digest=manifest.digest, folder=work.name
        )
    )
    return 0


def _confine(packed: bytes, source: str, work: Path) -> None:
    """Confine this process to a sandbox in which only ``work`` is writable."""
    tempfile.tempdir = str(work)
    # torch 2.11 reads the user's name, but the sandbox hides /etc/passwd.
    os.environ.setdefault("LOGNAME", str(os.getuid()))
    hub.without_token(work)
    files = files_of(packed)
    # A program that is built again: its manifest has the choices that times led to.
    beside = [one.with_name(MANIFEST_FILE) for one in files if one.name == BUNDLE_FILE]
    files += [one for one in beside if one.exists()]
    confine_builder([*files, *hub.readable(source)], work)


@contextlib.contextmanager
def _metered(
    settings: BuildSettings, spec: BuildSpec, work: Path, channel: Channel
) -> Iterator[None]:
    """Limit a client's hub downloads to its share of the disk; delete them after the block."""
    if settings.is_owners or spec.weights != "pretrained":
        yield
        return
    folder = hub.of_its_own(work)
    limit_bytes = settings.disk_bytes

    def over(held_bytes: int) -> None:
        what = f"{spec.source} does not fit: {format_bytes(held_bytes)} were downloaded"
        text = f"{what}, {format_bytes(limit_bytes)} are left on the server's disk for this client"
        hint = "upload the weights alone: --weights FILE.safetensors"
        _fail(channel, settings, HostStoreFull(text, hint=hint, largest_free_bytes=limit_bytes))
        os._exit(0)  # in the middle of a download; the controller removes the folder

    meter = hub.Meter(folder, limit_bytes, over)
    try:
        yield
    finally:
        meter.close()
        shutil.rmtree(folder, ignore_errors=True)


def _limit(limits: ResourceLimits) -> None:
    """Set limits of time and memory. If a build exceeds the time limit, the kernel ends it."""
    if limits.build_timeout_s:
        signal.setitimer(signal.ITIMER_REAL, limits.build_timeout_s)  # SIGALRM ends the process
        cpu_s = math.ceil(limits.build_timeout_s * (limits.threads + 1))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if limits.build_memory_bytes:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_bytes = pages * resource.getpagesize() + limits.build_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _check_memory(manifest: Manifest, limit_bytes: int) -> None:
    """Refuse a program that needs more than ``limit_bytes`` for intermediate values."""
    taken_bytes = manifest.extra.get("intermediate_bytes", 0)
    if limit_bytes and taken_bytes > limit_bytes:
        raise RegistrationRefused(
            "program",
            f"its intermediate values take {format_bytes(taken_bytes)} at "
            f"{values_text(largest(manifest.dims))}, the limit is {format_bytes(limit_bytes)}",
            hint="register it with a smaller max_batch or a smaller range, or raise [workers] "
            "task_memory",
        )


def work_prefix(op_id: int) -> str:
    """Return the name prefix of an unfinished build's folder, which a killed builder leaves."""
    return f".build-{op_id}-"


def _fail(channel: Channel, settings: BuildSettings, error: PipeSwitchError) -> None:
    wire = to_wire(error)
    channel.send(
        BuildFailed(
            model=settings.model,
            op_id=settings.op_id,
            error=wire["type"],
            message=wire["message"],
            hint=wire["hint"],
            data=msgspec.to_builtins(wire["data"], enc_hook=str),
        )
    )
