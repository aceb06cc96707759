"""A node's jobs and its replicas of others': a folder for each, beside its server's own.

``job.json`` says which life of the job it speaks of (``lives.py``), how it was asked for, and
where its replicas may be; beside it lie its script and, of a replica, the newest commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..client.client import FINAL_JOB_STATES, Client
from ..client.cluster import placement_of, told
from ..commits.files import RECORD_NAME, CommitRecord, read_record, remove_unnamed
from ..controller.journal import FILE_NAME, JournalFile
from ..errors import AlreadyExists, InvalidInput, PipeSwitchError, ServerUnavailable
from .leases import hold
from .lives import Copy

PIECE_BYTES: Final = 8 << 20
ASK_S: Final = 0.3  # between two questions to a placement that cannot say yet
REMOVE_S: Final = 60.0  # for the last write of a job that goes
NEW: Final = ".new"  # ends the name of a file that is being written


class NodeJobs:
    """Of one ``Node``: the part of it that Ray calls about jobs."""

    def __init__(self, name: str, state: Path) -> None:
        self._name, self._state = name, state
        self._jobs = state / "jobs"
        self._jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._changing = threading.RLock()  # of job.json of any
        self._sending: set[str] = set()
        self._client: Client  # the owner's
        self._tenant: Client  # the cluster's

    # ---- what is kept --------------------------------------------------------------------------

    def _kept(self, job: str) -> dict[str, Any]:
        """Empty: nothing."""
        try:
            return dict(json.loads((self._jobs / job / "job.json").read_text("utf-8")))
        except FileNotFoundError:
            return {}

    def _keep(self, job: str, **changed: Any) -> None:
        with self._changing:
            path = self._jobs / job / "job.json"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, json.dumps({"at": [], **self._kept(job), **changed}).encode())

    def _forget(self, job: str) -> None:
        shutil.rmtree(self._jobs / job, ignore_errors=True)

    def _commit(self, job: str) -> Path:
        """Where a replica's lies, and what the server takes over."""
        return self._jobs / job / "commit"

    def _served(self, job: str) -> Path:
        return self._state / "commits" / job

    def _copies(self) -> tuple[dict[str, Copy], list[dict[str, Any]]]:
        """What it keeps of each job, and the server's rows; one that is over by now is written down
        as that. The server is asked last: what is kept then is of a job that it has taken."""
        kept = {path.name: self._kept(path.name) for path in self._jobs.iterdir()}
        rows = self._client.jobs()
        by_name = {row["name"]: row for row in rows}
        return {job: self._copy(job, one, by_name.get(job, {}))
                for job, one in kept.items() if one}, rows  # fmt: skip

    def _copy(self, job: str, kept: Mapping[str, Any], row: Mapping[str, Any]) -> Copy:
        state, step, is_paused = kept["state"], -1, bool(kept["is_paused"])
        is_held = (self._jobs / job / "held").exists()
        if state == "replica":
            with contextlib.suppress(PipeSwitchError):  # damaged: the next one is whole
                found = read_record(self._commit(job))
                step = found.step if found is not None else -1
        elif state == "home":
            step = row.get("persisted_step", -1)
            is_paused = row.get("state") == "paused" and not is_held
            if row.get("state", "done") in FINAL_JOB_STATES:
                with self._changing:
                    if self._kept(job) == kept:
                        self._keep(job, state="over")
                state = "over"
        elif state == "starting":
            state = "home"
        return Copy(kept["life"], state, step, is_paused, is_held, tuple(kept["at"]))

    # ---- a start of the node -------------------------------------------------------------------

    def _claim(self, ray: Any) -> float:
        """Before its server goes on with its jobs: those that live elsewhere by now are replicas.

        Returns when placement was asked last, which counts on this node from then on.
        """
        if not (self._state / FILE_NAME).exists():
            return time.monotonic()
        kept = {path.name: self._kept(path.name) for path in self._jobs.iterdir()}
        lives = {job: one["life"] for job, one in kept.items()
                 if one and one["state"] in ("home", "starting")}  # fmt: skip
        asked_s = time.monotonic()
        lost: dict[str, int] | None = None if lives else {}
        while lost is None:
            asked_s = time.monotonic()
            with contextlib.suppress(ServerUnavailable):  # it is started again, or was not yet
                lost = told(ray, placement_of(ray).claim.remote(self._name, lives))
            time.sleep(0.0 if lost is not None else ASK_S)
        journal = JournalFile(self._state / FILE_NAME)
        for job, life in lost.items():
            self._becomes_replica(job, life)
        for job in journal.jobs:  # also where it ended between the two
            if self._kept(job).get("state") == "replica":
                journal.append({"kind": "job-over", "name": job})
        journal.close()
        return asked_s

    def _go_on(self) -> None:
        """With what was about to start here when the node ended."""
        there = {row["name"] for row in self._client.jobs() if row["state"] not in FINAL_JOB_STATES}
        for path in self._jobs.iterdir():
            kept = self._kept(path.name)
            if kept.get("state") == "starting" and path.name not in there:
                self._start(path.name)
            elif kept.get("state") == "starting":
                self._keep(path.name, state="home")

    # ---- lives ---------------------------------------------------------------------------------

    def train(self, body: dict[str, Any], script: bytes, life: int) -> dict[str, Any]:
        """A new job's first life."""
        job, entry = body["name"], Path(body["entry"])
        at = self._kept(job).get("at", [])  # of an older one of its name
        with contextlib.suppress(OSError):
            script = script or (entry.read_bytes() if entry.suffix == ".py" else b"")
        self._forget(job)
        self._keep(job, life=life, state="starting", body=body, is_paused=False, at=at)
        if script:
            _write(self._jobs / job / entry.name, script)
        try:
            return self._start(job)
        except BaseException:
            self._forget(job)
            raise

    def take_over(self, job: str, life: int) -> None:
        """Go on here with a job whose replica this is.

        Raises:
            InvalidInput: another life of it is known here.
        """
        with self._changing:
            kept = self._kept(job)
            if kept.get("state") != "replica" or kept["life"] >= life:
                raise InvalidInput(f"life {life} of job {job} is none that could begin here")
            at = {*kept["at"], kept["home"]} - {self._name}
            self._keep(job, life=life, state="starting", at=sorted(at))
        try:
            self._start(job)
        except PipeSwitchError:  # there is no room: elsewhere, perhaps
            self._keep(job, state="replica", home=kept["home"])
            raise

    def _start(self, job: str) -> dict[str, Any]:
        kept = self._kept(job)
        entry = Path(kept["body"]["entry"])
        own = self._jobs / job / entry.name
        if own.exists():  # the same file may be here too, with what it imports beside it
            with contextlib.suppress(OSError):
                own = entry if entry.read_bytes() == own.read_bytes() else own
            entry = own
        body = {**kept["body"], "entry": str(entry), "paused": kept["is_paused"],
                "resumes": self._commit(job).exists()}  # fmt: skip
        answer = self._tenant._ask("train", body=body, is_safe=False)
        shutil.rmtree(self._commit(job), ignore_errors=True)  # the server has linked it
        self._keep(job, state="home")
        return answer

    def drop(self, job: str, life: int) -> None:
        """Of a replica, nothing is kept. A job that lives here does so no more: another node has
        its life of that number, or is about to, and what it committed here is a replica."""
        kept = self._kept(job)
        if not kept or kept["life"] > life:
            return
        if kept["state"] not in ("home", "starting"):
            self._forget(job)
            return
        self._becomes_replica(job, life)
        (self._jobs / job / "held").unlink(missing_ok=True)
        with contextlib.suppress(InvalidInput):  # it is over
            self._client.job(job, "cancel")
        until_s = time.monotonic() + REMOVE_S
        while time.monotonic() < until_s:
            try:
                self._client.job(job, "rm")
                return
            except InvalidInput:  # its last commit is being written
                time.sleep(ASK_S)

    def _becomes_replica(self, job: str, life: int) -> None:
        is_kept = False
        while not is_kept and (commit := read_record(self._served(job))) is not None:
            shutil.rmtree(self._commit(job), ignore_errors=True)
            self._commit(job).mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # a newer one has taken its place
                os.link(self._served(job) / commit.image, self._commit(job) / commit.image)
                _write(self._commit(job) / RECORD_NAME, msgspec.json.encode(commit))
                is_kept = True
        self._keep(job, life=life, state="replica", home=self._name)

    def settle(self, job: str, gone: tuple[str, ...]) -> None:
        """A job is over, and these nodes keep nothing of it; without any that may, nor does this
        one."""
        with self._changing:
            kept = self._kept(job)
            if kept.get("state") != "over" or job in self._sending:
                return
            at = [node for node in kept["at"] if node not in gone]
            if at:
                self._keep(job, at=at)
            else:
                self._forget(job)

    def go_on(self, job: str) -> None:
        """It lives here, whatever held it."""
        with contextlib.suppress(InvalidInput):  # it is over
            self._client.job(job, "resume")
        (self._jobs / job / "held").unlink(missing_ok=True)

    def hand_over(self, job: str, target: Any, to: str, life: int) -> None:
        """Commit it, send that, and let go of it; ``target`` may begin its next life."""
        hold(self._client, self._jobs, job)
        try:
            with contextlib.suppress(InvalidInput):  # it has committed nothing
                self._client.job(job, "export")
            if not self._send(job, target, to):
                raise ServerUnavailable(f'job "{job}" is over, or is being sent: try again')
        except BaseException:
            self.go_on(job)
            raise
        self.drop(job, life)

    # ---- replicas ------------------------------------------------------------------------------

    def send(self, job: str, target: Any, to: str) -> None:
        """The newest commit on disk, if it is not on its way already."""
        self._send(job, target, to)

    def _send(self, job: str, target: Any, to: str) -> bool:
        import ray

        with self._changing:
            if job in self._sending or self._kept(job).get("state") != "home":
                return False
            self._sending.add(job)
        try:
            copy = self._copies()[0][job]
            if copy.state != "home":
                return False
            self._keep(job, at=sorted({*copy.at, to}))
            kept = self._kept(job)
            script = self._jobs / job / Path(kept["body"]["entry"]).name
            record = {**kept, "state": "replica", "home": self._name, "is_paused": copy.is_paused}
            text = script.read_bytes() if script.exists() else b""
            has_step = ray.get(target.receive.remote(job, record, script.name, text))
            commit = read_record(self._served(job))
            if commit is not None and commit.step != has_step:
                with open(self._served(job) / commit.image, "rb") as file:  # kept, while it is open
                    while piece := file.read(PIECE_BYTES):
                        at = file.tell() - len(piece)
                        ray.get(target.more.remote(job, commit.image, at, piece))
                ray.get(target.finish.remote(job, copy.life, msgspec.json.encode(commit)))
            return True
        finally:
            self._sending.discard(job)

    def receive(self, job: str, record: dict[str, Any], name: str, script: bytes) -> int:
        """Another node's job; the step of the commit that is here.

        Raises:
            AlreadyExists: it lives here, or a later life of it was heard of.
        """
        with self._changing:
            kept = self._kept(job)
            is_home = kept.get("state") in ("home", "starting")
            if is_home or kept.get("life", 0) > record["life"]:
                raise AlreadyExists(
                    f"job {job}: life {kept['life']} is known, not {record['life']}"
                )
            if kept.get("state") == "over":
                self._forget(job)
            self._keep(job, **record)
        if script:
            _write(self._jobs / job / name, script)
        self._commit(job).mkdir(mode=0o700, exist_ok=True)
        for rest in self._commit(job).glob(f"*{NEW}"):  # of a sender that died
            rest.unlink()
        return self._copy(job, record, {}).step

    def more(self, job: str, image: str, offset: int, piece: bytes) -> None:
        path = self._commit(job) / f"{image}{NEW}"
        with open(path, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)

    def finish(self, job: str, life: int, record: bytes) -> None:
        """All of it is here: it is the replica from now on.

        Raises:
            InvalidInput: it is not what was sent; or the job lives here by now.
        """
        folder, commit = self._commit(job), msgspec.json.decode(record, type=CommitRecord)
        new = folder / f"{commit.image}{NEW}"
        with open(new, "rb") as file:
            os.fsync(file.fileno())
            if hashlib.file_digest(file, "sha256").hexdigest() != commit.sha256:
                raise InvalidInput(f"the commit of job {job} does not match its digest")
        with self._changing:
            kept = self._kept(job)
            if (kept.get("state"), kept.get("life")) != ("replica", life):
                raise InvalidInput(f"life {life} of job {job} is over")
            os.rename(new, folder / commit.image)
            _write(folder / RECORD_NAME, record)
            remove_unnamed(folder)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all; synced."""
    new = path.with_name(path.name + NEW)
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, path)
