"""A node's records of its jobs, and its replicas of other nodes' jobs: one folder for each job.

``job.json`` has the number of the job's life (``job_reconciler.py``) and its ``train`` request. The
folder also has the script and, for a replica, the newest commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ...base.errors import AlreadyExists, InvalidInput, RemoteProtocolError, ServerUnavailable
from ...base.plain_files import write_whole
from ...base.settings import NAME_PATTERN
from ...client.client import FINAL_JOB_STATES, Client
from ...commits.commit_files import RECORD_NAME, CommitRecord, read_record, remove_unnamed
from ...commits.progress import HANDED_ON, SUFFIX, Life, read_life
from ...controller.journal import FILE_NAME, JournalFile
from .cluster_client import answer_of, node_of, placement_of
from .job_reconciler import JobReplica
from .node_lease import pause_jobs

READ_TRIES: Final = 5  # tries to read a commit while newer commits replace it
ASK_S: Final = 0.3  # pause before a query is repeated


class NodeJobs:
    """Part of ``NodeActor`` that handles jobs; placement and other nodes call it through Ray."""

    _client: Client  # connected as the server's owner
    _tenant: Client  # connected as the cluster's tenant
    _until_s: float  # end of the lease, on the monotonic clock

    def __init__(self, name: str, state: Path) -> None:
        self._name, self._state, self._jobs = name, state, state / "jobs"
        self._jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._changing = threading.RLock()  # guards the folders of all jobs
        self._sending: set[str] = set()

    def _kept(self, job: str) -> dict[str, Any]:
        """Return the record of a job; empty if there is none."""
        try:
            return dict(json.loads((self._jobs / job / "job.json").read_text("utf-8")))
        except FileNotFoundError:
            return {}

    def _keep(self, job: str, **changed: Any) -> None:
        with self._changing:
            (self._jobs / job).mkdir(mode=0o700, exist_ok=True)
            text = json.dumps({**self._kept(job), **changed})
            write_whole(self._jobs / job / "job.json", text.encode())

    def _forget(self, job: str) -> None:
        with self._changing:
            shutil.rmtree(self._jobs / job, ignore_errors=True)

    def _copies(self) -> tuple[dict[str, JobReplica], list[dict[str, Any]]]:
        """Return what this node stores about each job, and the server's rows of jobs. The rows are
        fetched last, so the server knows each job that has a record."""
        records = {path.name: self._kept(path.name) for path in self._jobs.iterdir()}
        rows = {row["name"]: row for row in self._client.jobs()}
        copies = {job: self._copy(job, one, rows.get(job)) for job, one in records.items() if one}
        return copies, list(rows.values())

    def _copy(self, job: str, record: dict[str, Any], row: Mapping[str, Any] | None) -> JobReplica:
        state, step, is_paused = record["state"], -1, record["is_paused"]
        is_held = (self._jobs / job / "held").exists()
        if state == "replica":
            with contextlib.suppress(RemoteProtocolError):  # the next commit replaces a damaged one
                commit = read_record(self._jobs / job / "commit")
                step = commit.step if commit is not None else -1
        elif row is not None and row["state"] not in FINAL_JOB_STATES:
            step, is_paused = row["persisted_step"], row["state"] == "paused" and not is_held
        else:
            state = "over" if row is not None else "gone"
        sent = frozenset(record.get("sent", ()))
        return JobReplica(record["life"], state, step, is_paused, is_held, sent)

    def _claim(self, ray: Any) -> float:
        """Remove jobs that run elsewhere by now; called before the server starts. Blocks.

        Return the time of the last query of placement (monotonic clock), when the lease begins.
        """
        records = {path.name: self._kept(path.name) for path in self._jobs.iterdir()}
        claimed = {job: one["life"] for job, one in records.items() if one.get("state") == "home"}
        lost_jobs: set[str] | None = None if claimed else set()
        asked_s = time.monotonic()
        while lost_jobs is None:
            asked_s = time.monotonic()
            with contextlib.suppress(ServerUnavailable):  # placement is not running yet
                lost_jobs = answer_of(ray, placement_of(ray).claim.remote(self._name, claimed))
            time.sleep(0.0 if lost_jobs is not None else ASK_S)
        gone = lost_jobs | {job for job, one in records.items() if one.get("state") == "replica"}
        if (self._state / FILE_NAME).exists():
            journal = JournalFile(self._state / FILE_NAME)
            for job in gone & journal.jobs.keys():
                journal.append({"kind": "job-over", "name": job})
            journal.close()
        for job in lost_jobs:
            self._forget(job)
        return asked_s

    # ---- lives ---------------------------------------------------------------------------------

    def train(self, body: dict[str, Any], script: bytes, incarnation: int) -> dict[str, Any]:
        """Start a new job.

        Raises:
            InvalidInput: the name is not valid, or the server refuses the job.
        """
        job, entry = body["name"], Path(body["entry"])
        if not NAME_PATTERN.fullmatch(job):
            raise InvalidInput(f"job {job[:80]!r} is not a name", hint=NAME_PATTERN.pattern)
        self._forget(job)
        self._keep(job, life=incarnation - 1, state="replica", body=body, is_paused=False)
        with contextlib.suppress(OSError):
            if entry.suffix == ".py":
                write_whole(self._jobs / job / entry.name, script or entry.read_bytes())
        try:
            return self.take_over(job, incarnation)
        except BaseException:
            self._forget(job)
            raise

    def take_over(self, job: str, incarnation: int) -> dict[str, Any]:
        """Start the next life of a job from this node's replica; return the server's answer.

        Raises:
            InvalidInput: this node has no replica, or a record of this life or a later one.
            ServerUnavailable: the lease has ended.
        """
        record = self._kept(job)
        if record.get("state") != "replica" or record["life"] >= incarnation:
            raise InvalidInput(f"life {incarnation} of job {job} cannot begin on this node")
        if time.monotonic() > self._until_s:
            raise ServerUnavailable("this node has lost contact with placement")
        entry = Path(record["body"]["entry"])
        own = self._jobs / job / entry.name
        if own.exists():  # if the original is equal, use it: its imports are beside it
            is_same = entry.exists() and entry.read_bytes() == own.read_bytes()
            entry = entry if is_same else own
        commit, life_before = self._jobs / job / "commit", Life(*record.get("progress", ()))
        write_whole(self._jobs / job / HANDED_ON, life_before.continued().packed())
        body = {
            **record["body"],
            "entry": str(entry),
            "paused": record["is_paused"],
            "resumes": commit.exists() or "progress" in record,
        }
        answer = self._tenant._ask("train", body=body, is_safe=False)
        self._keep(job, life=incarnation, state="home")
        shutil.rmtree(commit, ignore_errors=True)  # the server has its own links to the files
        return answer

    def drop(self, job: str, incarnation: int, *, keeps_replica: bool = False) -> None:
        """Remove a job here, because its life ``incarnation`` is or will be on another node. Blocks
        until the server has removed the job. ``keeps_replica``: keep its commit as a replica."""
        record = self._kept(job)
        if not record or record["life"] > incarnation:
            return
        if keeps_replica:
            with contextlib.suppress(OSError):  # the job has no commit yet
                shutil.copytree(
                    self._state / "commits" / job,
                    self._jobs / job / "commit",
                    copy_function=os.link,
                )
            self._keep(job, state="replica", life=incarnation - 1)
            (self._jobs / job / "held").unlink(missing_ok=True)
        else:
            self._forget(job)
        if record["state"] == "home":
            with contextlib.suppress(InvalidInput):  # the job is over
                self._client.job(job, "cancel")
            while job in (row["name"] for row in self._client.jobs()):
                with contextlib.suppress(InvalidInput):  # the job's last commit is being written
                    self._client.job(job, "rm")
                time.sleep(ASK_S)

    def resume_if_paused(self, job: str) -> None:
        """Resume a job that runs here, if the cluster has paused it."""
        if (self._jobs / job / "held").exists() and time.monotonic() < self._until_s:
            with contextlib.suppress(InvalidInput):  # the job is over
                self._client.job(job, "resume")
            (self._jobs / job / "held").unlink()

    # ---- replicas ------------------------------------------------------------------------------

    def hand_over(self, job: str, to: str, incarnation: int) -> None:
        """Commit a job, send it to the node ``to``, which may then begin its next life, and keep
        only a replica. Blocks. Raise ServerUnavailable if the job ended or is being sent."""
        pause_jobs(self._client, self._jobs, job)
        try:
            with contextlib.suppress(InvalidInput):  # the job has no commit yet
                self._client.job(job, "export")
            if not self.send(job, to):
                raise ServerUnavailable(f'job "{job}" has ended or is moving: try again')
        except BaseException:
            self.resume_if_paused(job)
            raise
        self.drop(job, incarnation, keeps_replica=True)

    def send(self, job: str, to: str) -> bool:
        """Send a job's newest commit on disk, its script and its record to the node ``to``; return
        False if the job does not run here or is being sent already. Blocks."""
        import ray

        with self._changing:
            if job in self._sending:
                return False
            self._sending.add(job)
        try:
            record, copy = self._kept(job), self._copies()[0].get(job)
            if copy is None or copy.state != "home":
                return False
            record["is_paused"] = copy.is_paused
            record["sent"] = sorted(copy.sent | {self._name, to})
            record["progress"] = read_life(self._state / "logs" / f"job-{job}{SUFFIX}")
            with self._changing:
                if not self._kept(job):
                    return False  # the job was removed meanwhile
                # Record the receiver before it gets the replica.
                self._keep(job, sent=record["sent"], progress=record["progress"])
            own = self._jobs / job / Path(record["body"]["entry"]).name
            script = own.read_bytes() if own.exists() else b""
            commit = _newest(self._state / "commits" / job)
            ray.get(node_of(ray, to).receive.remote(job, record, own.name, script, *commit))
            return True
        finally:
            self._sending.discard(job)

    def receive(
        self, job: str, entry: dict[str, Any], name: str, script: bytes, record: bytes, image: bytes
    ) -> None:
        """Store a replica of another node's job, as ``send`` sends it.

        Raises:
            AlreadyExists: the job runs here, or this node has a record of a later life.
        """
        with self._changing:
            mine = self._kept(job)
            if mine and (mine["life"] > entry["life"] or mine["state"] == "home"):
                raise AlreadyExists(f"job {job} has life {mine['life']}, not {entry['life']}")
            self._keep(job, **{**entry, "state": "replica"})
            if script:
                write_whole(self._jobs / job / name, script)
            if record:
                folder = self._jobs / job / "commit"
                folder.mkdir(mode=0o700, exist_ok=True)
                write_whole(folder / msgspec.json.decode(record, type=CommitRecord).image, image)
                write_whole(folder / RECORD_NAME, record)
                remove_unnamed(folder)


def _newest(folder: Path) -> tuple[bytes, bytes]:
    """Return the newest commit's record and image; empty if there is none."""
    for _ in range(READ_TRIES):
        if (commit := read_record(folder)) is None:
            break
        with contextlib.suppress(FileNotFoundError):  # a newer commit has replaced it
            return msgspec.json.encode(commit), (folder / commit.image).read_bytes()
    return b"", b""
