"""Registration of a folder's models, in Triton's layout ``NAME/VERSION/FILE``.

A process with the owner's rights scans it every ``LOOK_S`` seconds (Python has no inotify). It
registers a version once two scans see equal files, sizes and times, so never during a copy. Of each
name it serves the highest version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import select
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...base.config import Config
from ...base.errors import AlreadyExists, InvalidInput, ModelNotFound, ServerUnavailable
from ...base.plain_files import write_whole
from ...base.settings import NAME_PATTERN
from ...ipc.channel import Channel
from ...ipc.messages.base import Message, ModelName, OpId
from ...ipc.messages.helper import HelperFailed, HelperSettings
from ...programs.graphs.bundle import METADATA_KEY, read_safetensors_header
from ...scheduler.state.events import Address, Tick
from ...wire.private import check_trusted

if TYPE_CHECKING:
    from ...controller.device_effects import ServerContext

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
MAX_DEATHS: Final = 5
SETTING: Final = "[server] models"
STATE_FILE: Final = "folder.json"  # in the state directory: what was registered from the folder
SOURCES: Final = ("*.bundle", "*.pt2", "*.gguf", "*.safetensors")
READ: Final = (*SOURCES, "*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")
VERSION: Final = re.compile("[1-9][0-9]*")
TRIAL: Final = "folder-trial"  # model that a program is first registered as, if it replaces another
MOVING: Final = frozenset({"building", "storing", "leaving"})

Place = tuple[int, tuple[tuple[str, int, int], ...]]
"""Version (0: there is none), and path, size and time of each of its files that are read."""
Places = Mapping[str, Place]


class Record(msgspec.Struct, frozen=True):
    """A version that was registered."""

    place: Place
    program: str  # digest of its program; empty: unknown
    is_ours: bool  # the model is from this folder, and is removed with it
    digest: str  # of the version; if the model has it no more, a user has registered another


class FolderEffects:
    """Starts the process that watches, and marks the models that it could not register."""

    def __init__(self, context: ServerContext, config: Config) -> None:
        self._context, self._deaths = context, 0
        paths = [config.server.models, str(Path(config.server.state_dir, STATE_FILE))]
        self._settings = HelperSettings(kind="folder", values=json.dumps(paths).encode())
        if config.server.models:
            self._fork()

    def _fork(self) -> None:
        address = Address("folder", incarnation=self._deaths)
        fork = self._context.children.fork
        fork(address, "pipeswitch-fld", self._settings, [], self._reported, self._ended)

    def _reported(self, message: Message, __: list[int]) -> None:
        text = message.reason if isinstance(message, HelperFailed) else ""
        name, _, reason = text.partition(": ")
        if reason:
            log.error("%s: %s", SETTING, text.removeprefix(": "))
        if NAME_PATTERN.fullmatch(name):
            self._context.refused_models.append((ModelName(name), reason, "version in the folder"))
            self._context.take(Tick())

    def _ended(self, status: int) -> None:
        self._deaths += 1
        if not self._context.children.processes.is_stopping:
            log.error("%s: the watcher ended with status %d", SETTING, status)
            if self._deaths < MAX_DEATHS:
                self._fork()

    def close(self) -> None:
        """Do nothing: the controller ends the process."""


def run(values: bytes, channel: Channel, _: Sequence[int]) -> int:
    """Watch until the controller closes the channel; return the exit status."""
    from ...client.client import Client

    def report(name: str, text: str) -> None:
        reason = f"{name}: {text}".encode(errors="replace").decode()  # it may have a file's name
        channel.send(HelperFailed(op_id=OpId(0), reason=reason))

    with Client() as client:
        root, state = map(Path, json.loads(values))
        folder = Folder(root, state, client, report)
        while not select.select([channel], [], [], LOOK_S)[0]:
            folder.look()
    return 0


def decide(before: Places | None, now: Places, *done: Places) -> list[str]:
    """Return the names to remove or to register, after two looks at the folder. ``before``: the
    look before, if there is one. ``done``: places that were registered, and that were refused."""
    if before is None:
        return []
    gone = dict.fromkeys(name for places in done for name in places if name not in {*before, *now})
    new = [name for name, place in now.items() if before.get(name) == place]
    return [*gone, *(name for name in new if all(one.get(name) != now[name] for one in done))]


class Folder:
    """The folder at the last look, and what was registered from it."""

    def __init__(
        self, root: Path, state: Path, client: Any, report: Callable[[str, str], None]
    ) -> None:
        self._root, self._state, self._client, self._report = root, state, client, report
        self._before: Places | None = None
        self._faults: set[str] = set()  # of the last look; each is reported once
        self._refused: dict[str, Place] = {}
        saved = state.read_bytes() if state.exists() else b"{}"
        self._records = msgspec.json.decode(saved, type=dict[str, Record])

    def look(self) -> None:
        """Register new models and versions, and unregister those whose folder has gone."""
        before, self._before = self._before, None
        faults, names = set[str](), list[str]()
        done = self._refused, {name: one.place for name, one in self._records.items()}
        try:
            now = places(self._root, {**done[0], **done[1]}, faults)
            if self._records and not now:
                raise OSError(0, "empty, perhaps not mounted: no model is removed", self._root)
            names, self._before = decide(before, now, *done), now
        except OSError as error:  # unmounted or changing: remove no model
            faults = {f"{error.filename}: {error.strerror}"}
        for name in names:
            try:
                self._register(name, now[name]) if name in now else self._remove(name)
            except ServerUnavailable:  # the server or the model starts or ends: retried
                continue
            except Exception as error:  # of one model; the others go on
                if name in now:
                    self._refused[name] = now[name]
                    self._report(name, f"version {now[name][0]}: {error}".replace(TRIAL, name))
                else:
                    faults.add(f"{name}: not removed: {error}")
        for fault in sorted(faults - self._faults):
            self._report("", fault)
        self._faults = faults

    def _versions(self, name: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows of a served model, and whether it is from this folder or absent; raise
        ServerUnavailable while a version comes or goes."""
        rows = [row for row in self._client.models(versions=True) if row["name"] == name]
        rows = [row for row in rows if row.get("state") != "failed"]
        if any(row.get("state") in MOVING for row in rows):
            raise ServerUnavailable(f"{name} is being registered or unregistered")
        record = self._records.get(name)
        digest = record.digest if record is not None and record.is_ours else ""
        return rows, not rows or any(row.get("digest") == digest for row in rows)

    def _register(self, name: str, place: Place) -> None:
        """Register a version: weights alone if they suffice or the program is unchanged.
        Another program must register before the model leaves for it."""
        from ...cli.models import converted

        register = self._client.register
        before = self._records.get(name, Record(place, "", is_ours=False, digest=""))
        rows, is_ours = self._versions(name)
        source = weights = source_in(self._root / name / str(place[0]))
        program = ""
        with contextlib.ExitStack() as stack:
            if source.suffix == ".pt2":
                check_trusted(source, SETTING)  # torch unpickles parts of it
                source = Path(converted(str(source), {}, stack))
            if source.suffix == ".bundle":
                text = read_safetensors_header(source)[1].get(METADATA_KEY, "")
                program = hashlib.sha256(text.encode()).hexdigest()
                weights = Path(stack.enter_context(tempfile.TemporaryDirectory()), "w.safetensors")
                weights.symlink_to(source)
            if source.suffix == ".safetensors" or (rows and program == before.program != ""):
                reply = register(name, weights=weights, as_version=True)
                self._save(name, Record(place, before.program, is_ours, reply["digest"]))
                return
            options: dict[str, Any] = {"source": source}
            if not program:
                options["source"] = f"hf:{source}"
                options["generate"] = source.suffix == ".gguf" or _generates(source)
                options |= {} if source.suffix == ".gguf" else {"weights": "pretrained"}
            if rows and is_ours:
                options["priority"] = rows[0]["priority"]
                options["pin"] = any(row["pinned"] for row in rows)
                self._unregister(TRIAL)  # of a watcher that ended
                register(TRIAL, **options)
                stack.callback(self._unregister, TRIAL)
                self._unregister(name)
                options["aliases"] = rows[0]["aliases"]
            reply = register(name, **options)
            self._save(name, Record(place, program, is_ours, reply["digest"]))

    def _unregister(self, name: str) -> None:
        try:
            self._client.unregister(name)
        except ModelNotFound:  # a user has unregistered it
            pass
        except AlreadyExists as error:
            raise ServerUnavailable(str(error)) from error  # still being registered: retried

    def _remove(self, name: str) -> None:
        if self._versions(name)[1] and name in self._records and self._records[name].is_ours:
            self._unregister(name)
        self._save(name, None)

    def _save(self, name: str, record: Record | None) -> None:
        if self._refused.pop(name, None):
            self._report(name, "")  # remove its mark
        self._records.pop(name, None)
        self._records |= {name: record} if record else {}
        write_whole(self._state, msgspec.json.encode(self._records))


def places(root: Path, former: Places, faults: set[str]) -> dict[str, Place]:
    """Return the highest version of each name in a folder; raise OSError if it is unreadable.

    A name without a version is there too: its files may be in the wrong place. One that cannot be
    read keeps its ``former`` place. What cannot be read or be a name is added to ``faults``.
    """
    listing: dict[str, Place] = {}
    for folder in root.iterdir():
        name = folder.name
        try:
            if name[0] == "." or not folder.is_dir():
                continue
            if not NAME_PATTERN.fullmatch(name):
                raise OSError(0, f"not a model's name ({NAME_PATTERN.pattern})", ascii(name))
            numbers = [int(one.name) for one in folder.iterdir() if VERSION.fullmatch(one.name)]
            version = max(numbers, default=0)
            paths = sorted((folder / str(version)).iterdir()) if version else []
            paths = [path for path in paths if any(map(path.match, READ)) and path.is_file()]
            facts = [(ascii(path.name), path.stat()) for path in paths]
            listing[name] = version, tuple((p, s.st_size, s.st_mtime_ns) for p, s in facts)
        except OSError as error:
            faults.add(f"{error.filename}: {error.strerror}")
            listing |= {name: former[name]} if name in former else {}
    return listing


def source_in(place: Path) -> Path:
    """Return the source in a version's folder: a file, or the folder for ``hf:``.

    Raises:
        InvalidInput: the folder has no source, or several.
    """
    if (place / "config.json").is_file():
        return place
    paths = [path for pattern in SOURCES for path in sorted(place.glob(pattern))]
    if len(paths) == 1:
        return paths[0]
    what = (
        f"several files: {', '.join(path.name for path in paths)}"
        if paths
        else "no NAME/VERSION/FILE"
    )
    raise InvalidInput(what, hint=f"one of {', '.join(SOURCES)}, or config.json with its weights")


def _generates(place: Path) -> bool:
    names = json.loads((place / "config.json").read_bytes()).get("architectures") or [""]
    return str(names[0]).endswith(("ForCausalLM", "LMHeadModel"))
