"""Builder processes, the check of their results, and the publication of their programs.

``Builds`` runs in the scheduler's thread, sends results as events, and removes unused programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..base.errors import PipeSwitchError, RegistrationRefused, to_wire
from ..base.failpoints import reach
from ..ipc.messages.base import Message, ModelName
from ..ipc.messages.builder import BuildDone, BuildFailed, BuildProgress, BuildSettings
from ..programs import spec as specs
from ..programs.compiler.build_process import work_prefix
from ..programs.graphs.manifest_check import check_claims
from ..programs.interface.layout import Manifest
from ..programs.interface.packing import Layout
from ..scheduler.state.events import Address, Exited, Received, StartBuild, SweepPrograms
from .device_effects import HelperEffects, ServerContext
from .folders import DIGEST, find_planned

log = logging.getLogger(__name__)


def _copied_bytes(spec: bytes) -> int:
    """Return the size of the files that a build copies before it checks them; at least 1."""
    total_bytes = 1
    for path in specs.files_of(spec):
        with contextlib.suppress(OSError):  # the builder reports a missing file with a better text
            total_bytes += path.stat().st_size
    return total_bytes


_FOLDERS = re.compile(r"(?<![\w./])(?:/[^\s/'\"]+)+/(?=[^\s/'\"])")


def without_folders(failed: BuildFailed) -> BuildFailed:
    """Cut absolute paths to their last names, to hide the server's folders from clients."""

    def cut(value: Any) -> Any:
        return _FOLDERS.sub("", value) if isinstance(value, str) else value

    return msgspec.structs.replace(
        failed,
        message=cut(failed.message),
        hint=cut(failed.hint),
        data={key: cut(value) for key, value in failed.data.items()},
    )


def _builder(command: StartBuild | BuildDone) -> Address:
    return Address("builder", incarnation=command.op_id)


class Builds:
    """Builder processes, one for each registration, and the programs that they leave on disk."""

    def __init__(
        self,
        context: ServerContext,
        helpers: Mapping[str, HelperEffects],
        planned_folders: Sequence[Path],
    ) -> None:
        self._helpers = helpers
        self._sizes, self._places, self._children = context.sizes, context.places, context.children
        self._take = context.take  # adds an event, which is handled after the current one
        self._memory = context.memory
        self._disk, self._remove_files = context.frontend.disk, context.frontend.uploads.remove
        self._planned_folders = planned_folders
        self.built_before: dict[bytes, str] = {}  # spec in the journal -> program's digest
        self._under_way: dict[ModelName, tuple[str, float]] = {}  # build's stage, and its start

    def start(self, command: StartBuild) -> None:
        """Fork a builder, unless the journal names a program for this spec that is still on disk.

        If it was checked or packed for another server, or a file other than its bundle is damaged,
        rebuild it from its bundle.
        """
        spec = command.spec
        digest = command.rebuilds or self.built_before.pop(spec, "")
        if digest and not command.rebuilds and self.is_usable(digest, self.manifest_of(digest)):
            self._built(BuildDone(model=command.model, op_id=command.op_id, digest=digest))
            # Report an exit although no builder was forked: the next build waits for it.
            self._take(Exited(_builder(command), 0))
            return
        if digest and (self._places.models / digest / specs.BUNDLE_FILE).exists():
            spec = specs.rebuild_spec(spec, self._places.models / digest)
        elif refusal := self._disk.refusal(command.tenant, _copied_bytes(spec), "a program"):
            self._refuse(command, refusal)
            self._take(Exited(_builder(command), 0))
            return
        # The wrapper of a program in the journal was checked when it was registered.
        wrapper = None if digest else command.wrapper
        if wrapper is None:
            self._build(command, spec, digest)
            return

        def checked(option: str, reason: str, status: int) -> None:
            if not option:
                self._build(command, spec)
                return
            self._refuse(command, RegistrationRefused(option, reason))
            self._take(Exited(_builder(command), status))

        self._helpers[wrapper.kind].check(_builder(command), wrapper, checked)

    def preparation(self, names: Sequence[ModelName], total: int) -> str:
        """Return what a start waits for, such as ``building 2 of 5: resnet50 (pack, 12 s)``, while
        the models ``names`` of ``total`` are not ready."""
        name = next((one for one in names if one in self._under_way), names[0])
        count = f"{total - len(names) + 1} of {total}: {name}"
        if name not in self._under_way:
            return f"preparing {count}"
        stage, began_s = self._under_way[name]
        return f"building {count} ({stage}, {time.monotonic() - began_s:.0f} s)"

    def _build(self, command: StartBuild, spec: bytes, digest: str = "") -> None:
        """Fork a builder; ``digest``: of the program that the journal names."""
        done: list[BuildDone] = []
        builder, began_s = _builder(command), time.monotonic()
        self._under_way[command.model] = "start", began_s

        def on_message(message: Message, _: list[int]) -> None:
            # The model's code may control the builder, so a message counts for its own build only.
            if isinstance(message, BuildDone):
                done.append(message)  # checked after the builder's exit: it cannot write then
                self._children.kill(builder)
            elif isinstance(message, BuildProgress | BuildFailed):
                own = {"model": command.model, "op_id": command.op_id}
                if isinstance(message, BuildProgress):
                    self._under_way[command.model] = message.stage, began_s
                if command.tenant and isinstance(message, BuildFailed):
                    message = without_folders(message)
                self._take(Received(builder, msgspec.structs.replace(message, **own)))
            else:
                log.error("builder of %s sent a %s", command.model, type(message).__name__)
                self._children.kill(builder)

        def on_exit(status: int) -> None:
            self._under_way.pop(command.model, None)
            if done:
                self._publish(command, done[0], spec, digest)
            for path in self._places.models.glob(work_prefix(command.op_id) + "*"):
                shutil.rmtree(path, ignore_errors=True)  # left by a builder that was killed
            self._take(Exited(_builder(command), status))

        settings = BuildSettings(
            model=command.model,
            op_id=command.op_id,
            spec=spec,
            directory=str(self._places.models),
            limits=self._sizes,
            disk_bytes=max(1, self._disk.left_bytes(command.tenant)),
            is_owners=not command.tenant,
        )
        environment = [self._memory.environment] if specs.needs_more(spec) else []
        self._children.fork(builder, "pipeswitch-bld", settings, environment, on_message, on_exit)

    def manifest_of(self, digest: str) -> Manifest | None:
        """Return the manifest of a program on the disk; None if it is unreadable."""
        try:
            return specs.load_manifest(self._places.models / digest)
        except RegistrationRefused:
            return None

    def _refuse(self, command: StartBuild, error: PipeSwitchError) -> None:
        wire = to_wire(error)
        failed = BuildFailed(
            model=command.model,
            op_id=command.op_id,
            error=wire["type"],
            message=wire["message"],
            hint=wire["hint"],
            data=wire["data"],
        )
        self._take(Received(_builder(command), failed))

    def _kept_of(self, spec: bytes) -> Manifest | None:
        """Return the manifest of the program on disk that the build started from, else None."""
        decoded = msgspec.msgpack.decode(spec, type=specs.BuildSpec)
        folder = Path(decoded.source).parent
        is_kept = folder.parent == self._places.models and not (decoded.weights or decoded.adapter)
        return self.manifest_of(folder.name) if is_kept else None

    def is_usable(self, digest: str, manifest: Manifest | None) -> bool:
        """Return False if a program must be built again: it was checked or packed for another
        server, or its manifest is missing, or is damaged and its bundle is there."""
        folder = self._places.models / digest
        if manifest is None:  # ``_built`` reports a damaged manifest if there is no bundle
            has_bundle = (folder / specs.BUNDLE_FILE).exists()
            return (folder / specs.MANIFEST_FILE).exists() and not has_bundle
        layout: Layout = "onednn" if self._sizes.packs_weights else "torch"
        return specs.is_checked(manifest) and specs.is_packed_for(
            manifest, layout, self._sizes.threads
        )

    def _publish(
        self, command: StartBuild, message: BuildDone, spec: bytes, known_digest: str = ""
    ) -> None:
        """Check a builder's result like an untrusted message, and publish it. Without its manifest,
        a program that was built again must have the digest that the journal names.

        The builder's digest identifies the program only within its tenant (``StateDir.name_for``).
        """
        is_a_place = bool(re.fullmatch(DIGEST, message.digest)) and "/" not in message.folder
        if not is_a_place or not message.folder.startswith(work_prefix(command.op_id)):
            nonsense = RegistrationRefused("build", "its builder sent an invalid message")
            self._refuse(command, nonsense)
            return
        try:
            built = specs.load_manifest(self._places.models / message.folder)
            if built.mode == "module" and not specs.needs_more(spec):
                raise RegistrationRefused(
                    "build", "its builder returned code that was not requested"
                )
            if built.mode == "graph":
                check_claims(built)
                if not specs.is_checked(built):
                    raise RegistrationRefused(
                        "build", "its builder cannot read torch's version", hint="pipeswitch doctor"
                    )
            before = self._kept_of(spec)
            if before is not None and not specs.is_same_content(before, built):
                raise RegistrationRefused("bundle", "its file on disk is damaged")
            if not specs.is_batched_as_requested(built, spec):
                raise RegistrationRefused("build", "requests are batched as its owner asked")
            digest = self._places.name_for(command.tenant, message.digest)
            if before is None and known_digest not in ("", digest):
                raise RegistrationRefused("bundle", "its files on disk are damaged")
            message = msgspec.structs.replace(message, digest=digest)
            if built.digest != digest:
                built = msgspec.structs.replace(built, digest=digest)
                specs.save_manifest(self._places.models / message.folder, built)
            if self._disk.digest_of(command.model) == digest:  # the files on disk were damaged
                self._remove_files(self._places.take_away_program(digest))
            self._places.publish(message.folder, digest)
        except RegistrationRefused as error:
            self._refuse(command, error)
            return
        except OSError as error:
            reason = f"{os.strerror(error.errno or 0)}: {self._places.models}"
            self._refuse(command, RegistrationRefused("build", reason))
            return
        over_bytes = -self._disk.left_bytes(command.tenant, message.digest)
        refusal = self._disk.refusal(command.tenant, over_bytes, "a program")
        if over_bytes > 0 and refusal is not None:  # another program was built meanwhile
            self._refuse(command, refusal)
        else:
            self._built(message)

    def _built(self, message: BuildDone) -> None:
        builder = _builder(message)
        reach("build.done")
        try:
            manifest = specs.load_manifest(self._places.models / message.digest)
        except RegistrationRefused as error:
            failed = BuildFailed(
                model=message.model,
                op_id=message.op_id,
                error="RegistrationRefused",
                message=error.message,
                data=error.data,
            )
            self._take(Received(builder, failed))
            return
        planned = tuple(find_planned(self._planned_folders, manifest.digest))
        self._take(Received(builder, message, manifest, planned))

    def sweep(self, command: SweepPrograms) -> None:
        """Remove the programs that neither a model nor the journal names.

        The loop renames them. Another thread removes them, because removal of large files is slow.
        """
        self._remove_files(self._places.take_away(command.digests | self._disk.digests()))
