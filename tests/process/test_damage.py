"""Damage to one file of the state directory: undamaged entries survive, and no answer is wrong.

Most rounds run the code that restores a server in this process, without children. Other rounds
start a server and send requests. All rounds damage copies of one directory, which has two models
(one with two names), a chain, a paused job with two commits on disk, and a completed job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import stat
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from process_tools import (
    LOOP,
    checked_server,
    eager,
    finish,
    is_bit_equal,
    mlp,
    until,
    write_script,
)
from safetensors.torch import save_file

from pipeswitch.base.config import load
from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.base.extras import Seam
from pipeswitch.commits.area import CommitArea
from pipeswitch.commits.commit_files import load_commit
from pipeswitch.controller import main
from pipeswitch.controller.folders import StateDir
from pipeswitch.controller.journal import FILE_NAME, JournalFile
from pipeswitch.controller.restore import restore
from pipeswitch.controller.server import Server
from pipeswitch.devices.registry import choose_devices
from pipeswitch.extras.curve.curve_keys import KeyFolder, make_pair
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.ipc.messages.daemon import ModelStored, StoreFailed
from pipeswitch.memory_daemon.store import UnusableModel, load_model
from pipeswitch.programs.interface.packing import DERIVED_FILE
from pipeswitch.programs.spec import BUNDLE_FILE, MANIFEST_FILE, load_manifest, save_manifest
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.states import ModelState
from pipeswitch.scheduler.state.versions import version_name
from tests.process.figures import publishing

X = torch.linspace(-1, 1, 32).reshape(1, 32)
MODULES = {"a": mlp(32, 1, 1), "again": mlp(32, 1, 1), "b": mlp(32, 2, 2), "int8": mlp(32, 3, 4)}
NAMES = {*MODULES, "chained"}
EXPECTED = {name: eager(module, X) for name, module in MODULES.items()}
EXPECTED["b"] = eager(mlp(32, 2, 3), X)  # its second version
EXPECTED["chained"] = eager(mlp(32, 2, 3), EXPECTED["a"])
JOBS = {"held": "paused", "over": "done"}
SHORT = LOOP.replace("job.epochs(100_000)", "job.epochs(1)").replace("1_000_000 // 1000", "20")
SEED = 20
IN_PROCESS, SERVED = 1000, 40
PERFORMED = (
    ev.Reply,
    ev.ModelAvailable,
    ev.ModelRemoved,
    ev.Journal,
    ev.CreateCommits,
    ev.DropCommits,
    ev.SweepPrograms,
)
"""Commands of the scheduler that need no child process."""


@dataclass
class Sound:
    """An undamaged state directory, and the digests of its contents."""

    folder: Path
    digests: dict[tuple[str, int], str]  # served name and version -> digest of its program
    stored: dict[str, str]  # digest of a program -> sha256 of its bytes in the host store
    images: dict[int, str]  # step -> sha256 of the job's state

    def files(self) -> list[Path]:
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.folder) for path in paths)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("sound")
    loop, short = write_script(folder, "loop.py", LOOP), write_script(folder, "short.py", SHORT)
    environment = {"PIPESWITCH_SCHEDULER__COMMIT_EVERY": "20ms"}
    with checked_server(
        state_dir=folder / "state", environment=environment, settles=False, http=True
    ) as checked:
        client = checked.client
        for name, module in MODULES.items():
            options = {"precision": "int8", "max_error": 0.5} if name == "int8" else {}
            client.register(name, module, example_inputs=(X,), **options)
        assert client.show("int8")["precision"]["name"] == "int8"
        client.register("a", MODULES["a"], example_inputs=(X,), aliases=["alias"])
        save_file(mlp(32, 2, 3).state_dict(), folder / "weights.safetensors")
        client.register("b", weights=folder / "weights.safetensors", as_version=True)
        [name] = client.show("b")["inputs"]
        steps = [{"model": "a"}, {"model": "b", "inputs": {name: "a.y"}}]
        client.register_chain("chained", steps)
        finish(client.train(short, name="over"))
        job = client.train(loop, name="held")
        commits = folder / "state" / "commits" / "held"
        until(lambda: len(list(commits.glob("*.safetensors"))) == 2, "two commits are on disk")
        job.pause()
        until(lambda: job.status()["persisted_step"] == job.status()["committed_step"], "it is")
        rows = [client.show(name) for name in MODULES]
    state = Sound(
        folder / "state", {(row["name"], row["version"]): row["digest"] for row in rows}, {}, {}
    )
    for digest in state.digests.values():
        manifest = load_manifest(state.folder / "models" / digest)
        image = bytearray(manifest.total_bytes)
        load_model(state.folder / "models" / digest, memoryview(image))
        state.stored[digest] = hashlib.sha256(image).hexdigest()
    KeyFolder(state.folder / "keys").open().make_server()
    KeyFolder(state.folder / "keys").admit("ada", make_pair("ada", folder)[1])
    for image in sorted(commits.glob("*.safetensors")):
        (folder / "one").mkdir()
        shutil.copy(image, folder / "one")
        step, digest = step_and_digest(folder / "one")
        state.images[step] = digest
        shutil.rmtree(folder / "one")
    assert len(state.images) == 2
    return state


def step_and_digest(folder: Path) -> tuple[int, str]:
    """Return the step and digest from which a job would resume; (0, "") if it would start over."""
    damages: list[str] = []
    try:
        loaded = load_commit(folder, damages.append)
    except PipeSwitchError:
        return 0, ""
    if loaded is None:
        return 0, ""
    descriptor, slot_bytes, record = loaded
    area = CommitArea(descriptor, slot_bytes)
    newest = area.newest()
    assert newest is not None
    digest = hashlib.sha256(bytes(area.image(newest))).hexdigest()
    area.close()
    os.close(descriptor)
    return record.step, digest


HOLE_BYTES = 1 << 40
PLACES = (
    *(f"journal.sqlite{suffix}" for suffix in ("-wal", "-shm", "-journal")),
    "journal.new.sqlite lock gateway.lock cluster.json published trash",
    "orphans jobs uploads uploads/x logs/server.log.1 logs/requests.jsonl logs/job-held.log",
    "models/a~model.tmp models/stray~model models/.build-1 commits/.gone-1 profiles/x.json",
    "commits/held/commit.json.tmp keys/clients/x.key",
)
"""Names that the server opens, lists or creates, and that the sound directory may lack."""


def special(target: Path, kind: str) -> None:
    """Put something else than a regular file in a file's or a folder's place."""
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "folder":
            target.mkdir()
            (target / "inside").write_bytes(b"x")
        case "fifo":
            os.mkfifo(target)
        case "socket":
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
                here = os.getcwd()
                os.chdir(target.parent)  # the path may be too long for a socket
                listener.bind(target.name)
                os.chdir(here)
        case "device":
            os.mknod(target, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        case "hole":
            with target.open("wb") as file:
                file.truncate(HOLE_BYTES)
        case "dangling" | "loop" | "zero":
            target.symlink_to({"dangling": "nowhere", "loop": target, "zero": "/dev/zero"}[kind])


SPECIAL = ("folder", "fifo", "socket", "device", "hole", "dangling", "loop", "zero")
CONTENTS = ("byte", "high byte", "bytes", "cut", "empty", "other", "swapped", "gone", "grown")
ACCESS = ("no access", "foreign", "open to all")


def damage(folder: Path, path: Path, files: list[Path], generator: random.Random, kind: str) -> str:
    """Damage a file in one random way; return a description of the damage."""
    target, other = folder / path, folder / generator.choice(files)
    if not all(one.is_file() and one.stat().st_size < HOLE_BYTES for one in (target, other)):
        kind = kind if kind in SPECIAL else "empty"  # it was damaged already, or is missing
    if kind in SPECIAL:
        special(target, kind)
        return f"{kind} at {path}"
    if kind == "empty":
        special(target, "")
        target.write_bytes(b"")
        return f"empty {path}"
    data = target.read_bytes()
    if kind in ("byte", "high byte", "bytes") and data:
        changed = bytearray(data)
        for _ in range(40 if kind == "bytes" else 1):
            at = generator.randrange(min(len(data), generator.choice((100, 5000, 1 << 40))))
            changed[at] = changed[at] ^ 0x80 if kind == "high byte" else generator.randrange(256)
        target.write_bytes(changed)
    elif kind == "cut":
        target.write_bytes(data[: generator.randrange(len(data) + 1)])
    elif kind == "grown":
        target.write_bytes(data + generator.randbytes(1000))
    elif kind in ("other", "swapped"):
        target.write_bytes(other.read_bytes())
        if kind == "swapped":
            other.write_bytes(data)
            return f"{path} swapped with {other.relative_to(folder)}"
    elif kind == "gone":
        target.unlink()
    elif kind == "no access":
        target.chmod(0)
    elif kind == "foreign":
        os.chown(target, 4321, 4321)
    elif kind == "open to all":
        target.chmod(0o777)
    return f"{kind} of {path}"


def is_about(path: Path, digest: str) -> bool:
    return path.parts[:2] == ("models", digest)


class Restored:
    """A restored server without child processes, made of the controller's objects."""

    def __init__(self, folder: Path) -> None:
        config = load(
            None,
            flags={
                "server": {"state_dir": str(folder), "pool": "1MiB"},
                "device": {"name": "cpu", "arena": "4MiB"},
                "host": {"store": "16MiB"},
                "gateway": {"http": "off", "grpc": "off"},
            },
        )
        places = StateDir(root=folder)
        places.create()
        places.sweep("1")
        self.server = Server(
            config, choose_devices(config.device, workers=2, available_bytes=1 << 30), places
        )
        restore(self.server, 1e9)
        while self.server.inbox:
            for command in self.server.scheduler.handle(self.server.inbox.popleft(), 0.0):
                if isinstance(command, PERFORMED) or self._is_built(command):
                    self.server.effects.perform(command)

    def _is_built(self, command: ev.Command) -> bool:
        """Return True if the command is a build that needs no child: its program has a manifest."""
        if not isinstance(command, ev.StartBuild):
            return False
        digest = self.server.effects.builds.built_before[command.spec]
        return (self.server.places.models / digest / MANIFEST_FILE).is_file()

    def models(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.server.scheduler.listing.models()}

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.server.scheduler.listing.jobs()}

    def close(self) -> None:
        for number in self.server.memory.commits.values():
            os.close(number)
        self.server.memory.commits.clear()
        self.server.close()


HANGS_AFTER_S = 60
USER = 4322  # permissions do not stop root


def started(folder: Path, *, as_root: bool = True) -> dict[str, Any]:
    """Start a server in a forked process, without children of its own; return what it shows.

    The process runs ``serve`` up to the ready line. It does the memory daemon's work itself.
    """
    result, errors = folder.parent / f"{folder.name}.json", folder.parent / f"{folder.name}.txt"
    if not as_root:
        for path in folder.parents:
            if path.stat().st_uid == os.getuid() and path.is_relative_to(tempfile.gettempdir()):
                path.chmod(path.stat().st_mode | 0o055)
        for path in (folder, *folder.rglob("*")):
            if path.lstat().st_uid == 0:
                os.chown(path, USER, USER, follow_symlinks=False)
    pid = os.fork()
    if not pid:
        status = 70
        try:
            signal.alarm(HANGS_AFTER_S)
            descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - pytest has replaced it
            with result.open("w") as file, tempfile.TemporaryDirectory(dir="/tmp") as runtime:
                if not as_root:
                    os.chown(runtime, USER, USER)
                    os.setresuid(USER, USER, USER)
                try:
                    json.dump(_shown_at_start(folder, runtime), file)
                except PipeSwitchError as error:
                    json.dump({"refused": error.message}, file)
                status = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    text = errors.read_text(errors="replace")
    assert os.WIFEXITED(status), f"it hung for {HANGS_AFTER_S} s"
    assert status == 0, text
    assert "Traceback" not in text
    return {**json.loads(result.read_text()), "stderr": text}


def _shown_at_start(folder: Path, runtime: str) -> dict[str, Any]:
    config = load(
        None,
        flags={
            "server": {
                "state_dir": str(folder),
                "pool": "1MiB",
                "runtime_dir": f"{runtime}/r",
                "listen": "tcp://127.0.0.1:0",
                "auth": "keys",
            },
            "device": {"name": "cpu", "arena": "4MiB"},
            "host": {"store": "16MiB"},
            "gateway": {"http": "127.0.0.1:0", "grpc": "off"},
        },
    )
    shown: dict[str, Any] = {}

    def run(server: Server) -> int:
        main._open_doors(server)
        restore(server, 1e9)
        server.tell_losses()
        _handle_inbox(server)
        images, registry = {}, server.scheduler.registry
        # A model that shares damaged bytes is stored again, without them.
        for one in 2 * list(registry.registrations.values()):
            model = server.scheduler.machine.models.get(one.model)
            if model is None or model.state.state is not ModelState.STORING:
                continue
            image, fields = bytearray(model.built.total_bytes), {"model": one.model}
            message: Any = StoreFailed(**fields, op_id=one.build_id, reason="")
            try:
                load_model(folder / "models" / model.built.digest, memoryview(image))
                message = ModelStored(**fields, op_id=one.build_id, load_ms=0.0)
                images[one.model] = hashlib.sha256(image).hexdigest()
            except UnusableModel as error:
                message = msgspec.structs.replace(message, reason=str(error))
            is_stored = isinstance(message, ModelStored)
            (registry.stored if is_stored else registry.store_failed)(message)
            server.inbox.append(ev.Tick())
        _handle_inbox(server)
        shown.update(
            models=[*server.scheduler.listing.models()],
            jobs=[*server.scheduler.listing.jobs()],
            losses=server.journal.losses,
            ready_line=server.ready_line(["x"]),
            images=images,
        )
        for number in server.memory.commits.values():
            os.close(number)
        server.memory.commits.clear()
        return 0

    main._run = run
    main.serve(config)
    return shown


def _handle_inbox(server: Server) -> None:
    while server.inbox:
        for command in server.scheduler.handle(server.inbox.popleft(), 0.0):
            is_build = isinstance(command, ev.StartBuild)
            if is_build and not command.rebuilds:
                digest = server.effects.builds.built_before[command.spec]
                manifest = server.effects.builds.manifest_of(digest)
                is_build = server.effects.builds.is_usable(digest, manifest)
                if not is_build:  # it needs a builder; the next one may begin
                    server.inbox.append(
                        ev.Exited(ev.Address("builder", incarnation=command.op_id), 0)
                    )
            if isinstance(command, PERFORMED) or (is_build and not command.rebuilds):
                server.effects.perform(command)


def check_started(folder: Path, sound: Sound, hurt: set[Path], *, as_root: bool) -> str:
    """Check that no undamaged entry is lost and none is wrong; return how the start has ended."""
    shown = started(folder, as_root=as_root)
    if "refused" in shown:
        return "refused"
    models = {(row["name"], row["version"]): row for row in shown["models"]}
    jobs = {row["name"]: row for row in shown["jobs"]}
    ready_line, stderr, is_one = shown["ready_line"], shown["stderr"], len(hurt) == 1
    for text in shown["losses"]:
        assert text in stderr
        assert text[:100].replace("\n", " ") in ready_line or "more; see" in ready_line
    for (name, version), digest in sound.digests.items():
        row, stored = models.get((name, version)), version_name(ModelName(name), version)
        if row is None or row["state"] == "failed":
            assert name in ready_line
            assert name in stderr
            if is_one:
                assert any(is_about(path, digest) for path in hurt), (name, row)
                assert row is not None
                assert row["reason"]
        elif row["state"] == "building":  # it is built again; a test with real servers does that
            assert not is_one or any(is_about(path, digest) for path in hurt)
        else:
            assert shown["images"][stored] == sound.stored[digest]
            assert row["digest"] == digest
            assert row["current"]
    for name, state in JOBS.items():
        row = jobs.get(name)
        if row is None or row["state"] != state:
            assert name in stderr
            assert not is_one or row is not None
        assert not is_one or row["state"] == state or "failed" in row["state"], row
    step, digest = step_and_digest(folder / "commits" / "held") if as_root else (0, "")
    if is_one and as_root and jobs["held"]["state"] == JOBS["held"]:
        newest = max(sound.images)
        assert jobs["held"]["committed_step"] == (step or -1)
        assert step == newest or any(path.parts[:2] == ("commits", "held") for path in hurt)
        assert step == newest or "held" in stderr
        assert not step or sound.images[step] == digest
    return "said" if shown["losses"] else "started"


def hurt_at_random(
    sound: Sound, folder: Path, generator: random.Random, kinds: Sequence[str], count: int = 1
) -> set[Path]:
    files = sound.files()
    shutil.copytree(sound.folder, folder)
    hurt = set()
    for _ in range(count):
        place = generator.choice(sorted({path.parent for path in files}))  # each one as often
        near = [one for one in files if one.parent == place]
        names = Path(generator.choice(" ".join(PLACES).split()))
        path = generator.choice(near) if generator.random() < 0.75 else names
        text = damage(folder, path, files, generator, generator.choice(kinds))
        print(text)  # noqa: T201
        hurt |= {path, *(map(Path, text.split(" swapped with ")[1:]))}
    return hurt


def damage_in_process(sound: Sound, tmp_path: Path, rounds: int, seed: int) -> Counter[str]:
    """Damage copies of the directory; each fifth has two damages, each tenth is another user's."""
    outcomes: Counter[str] = Counter()
    for number in range(rounds):
        folder, as_root = tmp_path / f"round-{number}", number % 10 != 9
        generator = random.Random(f"{seed}-{number}")
        kinds = (*CONTENTS, *SPECIAL, *ACCESS[1:]) if as_root else ACCESS[:1]
        hurt = hurt_at_random(sound, folder, generator, kinds, 1 + (number % 5 == 4))
        outcome = check_started(folder, sound, hurt, as_root=as_root)
        outcomes[outcome] += 1
        if "refused" not in outcome and as_root:
            check_started(folder, sound, hurt, as_root=as_root)  # the next start must work, too
        shutil.rmtree(folder)
    return outcomes


def check_served(folder: Path, sound: Sound, hurt: set[Path]) -> str:
    """Make the checks of ``check_started`` with a real server, its builders and its client."""
    try:
        with checked_server(state_dir=folder, settles=False) as checked:
            client, line = checked.client, checked.running.ready_line
            rows = settled(client.models())
            assert set(rows) >= NAMES
            for name, row in rows.items():
                uses = {"chained": {("a", 1), ("b", 2)}}.get(name, {(name, row["version"])})
                if row["state"] == "ready":
                    [answer] = client.infer(name, X).outputs.values()
                    wrong = (answer - EXPECTED[name]).abs().max() > 0.5 * (name == "int8")
                    assert not wrong, name
                elif name == "chained" or (name, row["version"]) in sound.digests:
                    assert any(is_about(path, sound.digests[one]) for one in uses for path in hurt)
                    assert row["steps"] if name == "chained" else row["reason"] and name in line
                    with pytest.raises(PipeSwitchError):
                        client.infer(name, X)
            jobs = {row["name"]: row for row in client.jobs()}
            assert {name: jobs[name]["state"] for name in JOBS} == JOBS
            is_hurt = any(path.parts[:2] == ("commits", "held") for path in hurt)
            assert jobs["held"]["committed_step"] in sorted(sound.images)[is_hurt - 1 :], jobs
    except RuntimeError as error:  # it did not become ready
        text = str(error)
    else:
        return "started"
    assert "Traceback" not in text
    return "refused"


def settled(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert all(row["state"] not in ("building", "storing") for row in rows), "ready came too early"
    return {row["name"]: row for row in rows}


def test_damage_to_one_file_loses_nothing_else(sound: Sound, tmp_path: Path) -> None:
    outcomes = damage_in_process(sound, tmp_path, 60, SEED)
    assert sum(outcomes.values()) == 60


def test_an_entry_that_cannot_be_used_is_left_out_and_named(sound: Sound, tmp_path: Path) -> None:
    """Start twice with entries that cannot be used."""
    folder = tmp_path / "state"
    shutil.copytree(sound.folder, folder)
    with contextlib.closing(JournalFile(folder / FILE_NAME)) as journal:
        model = {**journal.models["a"], "name": "spoiled", "spec": b"\x81\xa6source\xa2\x9d\x9d"}
        chain = {**journal.chains["chained"], "name": "unchained", "spec": b"\x9d"}
        ended = {"kind": "ended", "name": "odd", "record": {"state": "nonsense"}}
        for entry in (model, chain, ended):
            journal.append(entry)
    for _ in range(2):
        with contextlib.closing(Restored(folder)) as restored:
            models, jobs = restored.models(), restored.jobs()
            assert {name: models[name]["state"] for name in MODULES} == dict.fromkeys(
                MODULES, "storing"
            )
            assert (models["spoiled"]["state"], jobs["odd"]["state"]) == ("failed", "failed")
            assert models["spoiled"]["reason"]
            assert jobs["odd"]["error"]
            losses = "\n".join(restored.server.journal.losses)
            assert all(name in losses for name in ("spoiled", "unchained", "odd"))


def test_a_job_whose_commit_cannot_be_read_now_does_not_start_over(
    sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, step = tmp_path / "state", step_and_digest(sound.folder / "commits/held")[0]
    shutil.copytree(sound.folder, folder)

    def refuses(_: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr("pipeswitch.commits.commit_files.create_area", refuses)
        with contextlib.closing(Restored(folder)) as restored:
            job = restored.jobs()["held"]
            assert (job["state"], job["persisted_step"]) == ("failed", step)
            assert (bool(job["entry"]), "memory" in job["error"]) == (True, True)
            assert "held" in "".join(restored.server.journal.losses)
    with contextlib.closing(Restored(folder)) as restored:
        job = restored.jobs()["held"]
        assert (job["state"], job["committed_step"]) == ("paused", step)


def test_an_entry_without_a_copy_is_listed_as_failed(sound: Sound, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(sound.folder, folder)
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as database, database:
        database.execute("UPDATE model SET spec = x'00' WHERE name = 'int8'")
        database.execute("UPDATE job SET entry = 'x' WHERE name = 'held'")
    for path in (*folder.glob("*/int8~model"), *folder.glob("*/held~*")):
        path.unlink()
    with contextlib.closing(Restored(folder)) as restored:
        models, jobs = restored.models(), restored.jobs()
        assert (models["a"]["state"], models["int8"]["state"]) == ("storing", "failed")
        assert (jobs["over"]["state"], jobs["held"]["state"]) == ("done", "failed")
    digest = sound.digests["int8", 1]
    for place in (f"models/{digest}", "commits/held"):
        [entry] = folder.glob(f"orphans/*/{place}")
        names = [path.name for path in (sound.folder / place).iterdir()]
        assert sorted(path.name for path in entry.iterdir()) == sorted(names)


def test_a_server_serves_what_is_undamaged(sound: Sound, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(sound.folder, folder)
    (folder / FILE_NAME).unlink()
    assert check_served(folder, sound, {Path(FILE_NAME)}) == "started"


def test_the_served_version_is_back_with_its_files(sound: Sound, tmp_path: Path) -> None:
    """While they are damaged, the first version answers by its number alone."""
    folder = tmp_path / "state"
    shutil.copytree(sound.folder, folder)
    bundle = folder / "models" / sound.digests["b", 2] / BUNDLE_FILE
    data = bundle.read_bytes()
    half = len(data) // 2  # a weight: the example is at the end
    bundle.write_bytes(data[:half] + bytes([data[half] ^ 0xFF]) + data[half + 1 :])
    for _ in range(2):
        shown = started(folder)
        rows = {row["name"]: row for row in shown["models"]}
        assert (rows["b"]["version"], rows["b"]["state"]) == (2, "failed")
        assert set(shown["images"]) == {*MODULES}  # version 1 is there, and not current
        assert "failed models: b@2" in shown["ready_line"]
        assert "model b@2 failed" in shown["stderr"]
    bundle.write_bytes(data)
    shown = started(folder)
    assert "damage" not in shown["ready_line"]
    assert {row["name"]: row for row in shown["models"]}["b"]["version"] == 2


def test_what_can_be_made_again_is_ready_with_the_server(sound: Sound, tmp_path: Path) -> None:
    """A derived file is damaged, a manifest is gone, another processor's weights are there."""
    folder = tmp_path / "state"
    for what in ("derived", "manifest", "processor"):
        shutil.copytree(sound.folder, folder)
        key = ("b", 2) if what == "manifest" else ("int8", 1)
        place = folder / "models" / sound.digests[key]
        manifest = load_manifest(place)
        match what:
            case "derived":
                data = (place / DERIVED_FILE).read_bytes()
                (place / DERIVED_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 0x80]))
            case "manifest":
                (place / MANIFEST_FILE).unlink()
            case _:
                other = msgspec.structs.replace(manifest.precision, fingerprint="another")
                save_manifest(place, msgspec.structs.replace(manifest, precision=other))
        with checked_server(state_dir=folder, settles=False) as checked:
            assert "damage" not in checked.running.ready_line, what
            rows = settled(checked.client.models())
            assert {rows[name]["state"] for name in NAMES} == {"ready"}, what
            [answer] = checked.client.infer("b", X).outputs.values()
            assert is_bit_equal(answer, EXPECTED["b"])
            [answer] = checked.client.infer("int8", X).outputs.values()
            assert (answer - EXPECTED["int8"]).abs().max() < 0.5
        shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_damaged_directories_start_and_say_what_is_lost(
    sound: Sound, tmp_path: Path
) -> None:
    with publishing("damaged-state") as figures:
        outcomes = damage_in_process(sound, tmp_path, IN_PROCESS, SEED + 1)
        figures.update(started=dict(outcomes))
        served: Counter[str] = Counter()
        for number in range(SERVED):
            folder = tmp_path / f"server-{number}"
            kinds = (*CONTENTS, *SPECIAL[:5])
            hurt = hurt_at_random(sound, folder, random.Random(f"served-{number}"), kinds)
            served[check_served(folder, sound, hurt)] += 1
            shutil.rmtree(folder)
        figures.update(served=dict(served), wrong=0, lost=0)  # all checks have passed


def test_a_server_that_lacks_an_extra_says_so_and_calls_nothing_damaged(
    sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeswitch.controller.restore.COMPOSITES", Seam("NONE", "kind of names"))
    folder = shutil.copytree(sound.folder, tmp_path / "state")
    with contextlib.closing(Restored(folder)) as restored:
        assert restored.models()["chained"]["reason"].startswith("this installation has no kind")
