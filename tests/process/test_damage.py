"""Damage to one file of the state directory: undamaged entries survive, and no answer is wrong.

Most rounds run the code that restores a server in this process, without children. Other rounds
start a server and send requests. All rounds damage copies of one directory, which has two models
(one with two names), a chain, a paused job with two commits on disk, and a completed job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from pipeswitch.base.config import load
from pipeswitch.base.errors import ConfigError, PipeSwitchError, RegistrationRefused
from pipeswitch.commits.area import CommitArea
from pipeswitch.commits.commit_files import load_commit
from pipeswitch.controller.folders import StateDir
from pipeswitch.controller.journal import FILE_NAME, JournalFile
from pipeswitch.controller.restore import restore
from pipeswitch.controller.server import Server
from pipeswitch.devices.registry import choose_devices
from pipeswitch.memory_daemon.store import UnusableModel, load_model
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.spec import BUNDLE_FILE, MANIFEST_FILE, load_manifest
from pipeswitch.scheduler import events as ev
from tests.process.figures import publishing

X = torch.linspace(-1, 1, 32).reshape(1, 32)
MODULES = {"a": mlp(32, 1, 1), "again": mlp(32, 1, 1), "b": mlp(32, 2, 2)}
NAMES = {*MODULES, "chained"}
EXPECTED = {name: eager(module, X) for name, module in MODULES.items()}
EXPECTED["chained"] = eager(MODULES["b"], EXPECTED["a"])
JOBS = {"held": "paused", "over": "done"}
SHORT = LOOP.replace("job.epochs(100_000)", "job.epochs(1)").replace("1_000_000 // 1000", "20")
SEED = 20
IN_PROCESS, SERVED = 460, 40
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
    digests: dict[str, str]  # model -> digest of its program
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
        state_dir=folder / "state", environment=environment, settles=False
    ) as checked:
        client = checked.client
        for name, module in MODULES.items():
            client.register(name, module, example_inputs=(X,))
        [name] = client.show("b")["inputs"]
        steps = [{"model": "a"}, {"model": "b", "inputs": {name: "a.y"}}]
        client.register_chain("chained", steps)
        finish(client.train(short, name="over"))
        job = client.train(loop, name="held")
        commits = folder / "state" / "commits" / "held"
        until(lambda: len(list(commits.glob("*.safetensors"))) == 2, "two commits are on disk")
        job.pause()
        until(lambda: job.status()["persisted_step"] == job.status()["committed_step"], "it is")
        digests = {name: client.show(name)["digest"] for name in MODULES}
    state = Sound(folder / "state", digests, {})
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


def damage(folder: Path, path: Path, files: list[Path], generator: random.Random) -> str:
    """Damage a file in one random way; return a description of the damage."""
    target, data = folder / path, (folder / path).read_bytes()
    kind = generator.choice(["byte", "byte", "bytes", "cut", "empty", "other", "gone"])
    if kind in ("byte", "bytes") and data:
        changed = bytearray(data)
        for _ in range(1 if kind == "byte" else 40):
            changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        target.write_bytes(changed)
    elif kind == "cut":
        target.write_bytes(data[: generator.randrange(len(data) + 1)])
    elif kind == "empty":
        target.write_bytes(b"")
    elif kind == "other":
        target.write_bytes((folder / generator.choice(files)).read_bytes())
    elif kind == "gone":
        target.unlink()
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
        places.sweep()
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


def check_model(folder: Path, sound: Sound, name: str) -> bool:
    """Return True if daemon and worker accept the program, which then must be unchanged."""
    digest = sound.digests[name]
    place, before = folder / "models" / digest, sound.folder / "models" / digest
    try:
        manifest = load_manifest(place)
        image = bytearray(manifest.total_bytes)
        load_model(place, memoryview(image))
        graph = read_bundle(place / BUNDLE_FILE, manifest.head_sha256).graph
    except (UnusableModel, RegistrationRefused):
        return False
    known = load_manifest(before)
    assert manifest == known
    right = bytearray(known.total_bytes)
    load_model(before, memoryview(right))
    assert image == right
    assert graph == read_bundle(before / BUNDLE_FILE, known.head_sha256).graph
    return True


def check_restored(folder: Path, sound: Sound, hurt: Path) -> str:
    """Check that no undamaged entry is lost and none is wrong; return how the start has ended."""
    try:
        restored = Restored(folder)
    except ConfigError as error:
        return f"refused: {error.message.removeprefix(str(folder))}"
    with contextlib.closing(restored):
        models, jobs, losses = restored.models(), restored.jobs(), restored.server.journal.losses
        assert set(models) >= NAMES
        assert set(jobs) >= set(JOBS)
        for name, digest in sound.digests.items():
            # A program without a manifest is built again; the other programs wait for that build.
            is_awaited = models[name]["state"] in ("storing", "building")
            is_served = is_awaited and check_model(folder, sound, name)
            assert is_served or is_about(hurt, digest)
            if is_served:
                assert models[name]["digest"] == digest
        for name, state in JOBS.items():
            assert jobs[name]["state"] == state
        step, digest = step_and_digest(folder / "commits" / "held")
        assert jobs["held"]["committed_step"] == (step or -1)
        newest, older = max(sound.images), min(sound.images)
        if hurt.parts[:2] == ("commits", "held"):
            assert step in (newest, older)
            assert step == newest or "continues from step" in jobs["held"]["why"]
        else:
            assert step == newest
        assert sound.images[step] == digest
        if hurt.name == FILE_NAME and not (folder / FILE_NAME).exists():
            assert losses
    contents = Counter(
        hashlib.sha256(p.read_bytes()).digest() for p in folder.rglob("*") if p.is_file()
    )
    for path in sound.files():
        if path != hurt and path.parts[0] in ("models", "commits", "profiles", "keys"):
            assert contents[hashlib.sha256((sound.folder / path).read_bytes()).digest()], path
    return "told" if losses else "started"


def hurt_at_random(sound: Sound, folder: Path, generator: random.Random) -> Path:
    files = sound.files()
    folders = sorted({path.parent for path in files})  # so that each folder is damaged as often
    place = generator.choice(folders)
    path = generator.choice([one for one in files if one.parent == place])
    shutil.copytree(sound.folder, folder)
    print(damage(folder, path, files, generator))  # noqa: T201
    return path


def damage_in_process(sound: Sound, tmp_path: Path, rounds: int, seed: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(rounds):
        folder = tmp_path / f"round-{number}"
        path = hurt_at_random(sound, folder, random.Random(f"{seed}-{number}"))
        outcome = check_restored(folder, sound, path)
        outcomes[outcome] += 1
        if "refused" not in outcome:
            check_restored(folder, sound, path)  # the next start must work, too
        shutil.rmtree(folder)
    return outcomes


def check_served(folder: Path, sound: Sound, hurt: Path) -> str:
    """Make the checks of ``check_restored`` with a real server and its client."""
    try:
        with checked_server(state_dir=folder, settles=False) as checked:
            rows = until(lambda: settled(checked.client.models()), "each model was looked at")
            assert set(rows) >= NAMES
            for name, row in rows.items():
                uses = {"a", "b"} if name == "chained" else {name}
                if row["state"] == "ready":
                    [answer] = checked.client.infer(name, X).outputs.values()
                    assert is_bit_equal(answer, EXPECTED[name]), name
                else:
                    assert any(is_about(hurt, sound.digests[one]) for one in uses), row
                    assert row["reason"]
                    with pytest.raises(PipeSwitchError):
                        checked.client.infer(name, X)
            jobs = {row["name"]: row for row in checked.client.jobs()}
            assert {name: jobs[name]["state"] for name in JOBS} == JOBS
            is_hurt = hurt.parts[:2] == ("commits", "held")
            assert jobs["held"]["committed_step"] in sorted(sound.images)[is_hurt - 1 :], jobs
    except RuntimeError as error:
        if "Traceback" in str(error):
            raise
        return "refused"
    return "started"


def settled(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    are_settled = all(row["state"] not in ("building", "storing") for row in rows)
    return {row["name"]: row for row in rows} if are_settled else {}


def test_damage_to_one_file_loses_nothing_else(sound: Sound, tmp_path: Path) -> None:
    outcomes = damage_in_process(sound, tmp_path, 25, SEED)
    assert sum(outcomes.values()) == 25


def test_an_entry_that_cannot_be_used_is_left_out_and_named(sound: Sound, tmp_path: Path) -> None:
    """Start twice with entries that cannot be used, such as those of an older release."""
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
        database.execute("UPDATE model SET spec = x'00' WHERE name = 'b'")
        database.execute("UPDATE job SET entry = 'x' WHERE name = 'held'")
    for path in (
        *folder.glob("journal.backup*"),
        *folder.glob("*/b~model"),
        *folder.glob("*/held~*"),
    ):
        path.unlink()
    with contextlib.closing(Restored(folder)) as restored:
        models, jobs = restored.models(), restored.jobs()
        assert (models["a"]["state"], models["b"]["state"]) == ("storing", "failed")
        assert (jobs["over"]["state"], jobs["held"]["state"]) == ("done", "failed")
    digest = sound.digests["b"]
    for place in (f"models/{digest}", "commits/held"):
        [entry] = folder.glob(f"orphans/*/{place}")
        names = [path.name for path in (sound.folder / place).iterdir()]
        assert sorted(path.name for path in entry.iterdir()) == sorted(names)


def test_a_server_serves_what_is_undamaged(sound: Sound, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    shutil.copytree(sound.folder, folder)
    (folder / FILE_NAME).unlink()
    assert check_served(folder, sound, Path(FILE_NAME)) == "started"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_five_hundred_damaged_files_lose_nothing_else(sound: Sound, tmp_path: Path) -> None:
    with publishing("damaged-state") as figures:
        outcomes = damage_in_process(sound, tmp_path, IN_PROCESS, SEED + 1)
        figures.update(restored=dict(outcomes))
        served: Counter[str] = Counter()
        for number in range(SERVED):
            folder = tmp_path / f"server-{number}"
            hurt = hurt_at_random(sound, folder, random.Random(f"served-{number}"))
            served[check_served(folder, sound, hurt)] += 1
            shutil.rmtree(folder)
        figures.update(served=dict(served), wrong=0, lost=0)  # all checks have passed
