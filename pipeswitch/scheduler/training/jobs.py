"""All jobs of the machine: their devices, the reports of their scripts, and their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from ...base.errors import TaskFailed
from ...ipc.messages.base import JobName, OpId
from ...ipc.messages.worker import JobReport
from ..memory import device_placement
from ..memory.commits import Commits
from ..state.core import ALL, JOBS, Core
from ..state.device_state import DeviceState
from ..state.events import CountSharers, JobSpec, Journal, RemoveJob
from ..state.records import Job
from ..state.states import TASK_FINAL, TASK_ON_WORKER, TASK_SWAPS, TaskEvent, TaskState

Place = Callable[[Job, int | None, Sequence[int]], int]  # job, index of its device, jobs per device
WAITS: Final = {TaskState.QUEUED, TaskState.STOPPING, TaskState.SUSPENDED, TaskState.SWAPPED}
RATE_WEIGHT: Final = 0.2  # weight of the newest report in a job's steps per second


MAX_NAMES: Final = 64  # of values that are not restored; a script sends them
MAX_NAME: Final = 120


class Home(NamedTuple):
    """Device on which jobs are placed, with their commits."""

    state: DeviceState
    commits: Commits


class RestoredJob(NamedTuple):
    """State of an unfinished job that a restarted server finds."""

    slot_bytes: int = 0  # slot size of its commit area, loaded from disk; 0: none
    step: int = -1  # step of the commit in this area
    is_paused: bool = False
    placed: Mapping[str, Any] | None = None  # journal entry of its last move; None: none
    restarts: int = 0  # number of restarts, including the one that the server's end caused
    steps_recomputed: int = 0  # recomputed steps, without those that the next dispatch counts
    last_step: int = 0  # last step of the process that ended with the server
    why: str = ""  # note for the user about its restart; empty if nothing was damaged


class Jobs:
    """All jobs and their desired states; ``TrainingJobs`` gives them the device.

    Each job is placed on one device. It may move while it has no process, because commits belong to
    the machine.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.homes: list[Home] = []  # all devices, in order
        self.place: Place = lambda job, home, counts: home or 0
        self._sharers: Counter[str] = Counter()  # group -> unfinished jobs, as last reported

    def __iter__(self) -> Iterator[Job]:
        return (job for home in self.homes for job in home.state.jobs.values())

    @property
    def names(self) -> list[str]:
        """Names of the devices."""
        return [home.state.settings.device for home in self.homes]

    def get(self, name: JobName) -> Job | None:
        """Return the job of that name, on any device."""
        return next((h.state.jobs[name] for h in self.homes if name in h.state.jobs), None)

    def home(self, job: Job) -> Home:
        """Return the device of a known job."""
        return next(home for home in self.homes if home.state.jobs.get(job.spec.name) is job)

    def tidy(self) -> None:
        """Count the jobs that share inputs; remove jobs that are no longer kept."""
        before = self._sharers
        self._sharers = Counter(
            job.spec.group for job in self if job.spec.share and job.state.state not in TASK_FINAL
        )
        for group in before.keys() | self._sharers.keys():
            if before[group] != self._sharers[group]:
                self._core.emit(CountSharers(group=group, jobs=self._sharers[group]))
        self._forget_old()

    def counts(self) -> list[int]:
        """Return the number of unfinished jobs on each device."""
        return [
            sum(job.state.state not in TASK_FINAL for job in home.state.jobs.values())
            for home in self.homes
        ]

    def has_process_of(self, name: JobName) -> bool:
        """Return True if any device has a process of the job, even one that is exiting.

        A job never has two processes. The old one may still write the job's log and commits; when
        it is reaped, the slice with the job's name is released.
        """
        workers = (worker for home in self.homes for worker in home.state.workers.values())
        return any(worker.job == name for worker in workers)

    def adopt(self, spec: JobSpec, *, sent_to: str = "", on: str = "") -> Job:
        """Add a new job, or a job of the journal whose last device was ``on``."""
        core = self._core
        job = Job(replace(spec, devices=device_placement.limit(spec.devices, self.names)), sent_to)
        job.created_op_id = OpId(core.last_epoch)
        job.place = core.next_op_id()
        job.timing.cycle_left_ms = core.settings.training_cycle_ms
        index = self.names.index(on) if on in self.names else self.place(job, None, self.counts())
        self.enters(job, self.homes[index])
        return job

    def enters(self, job: Job, home: Home) -> None:
        """Add a job to a device."""
        home.state.jobs[job.spec.name] = job
        self.count_anew(home)

    def count_anew(self, home: Home) -> None:
        """Restart the count of each job's device time, as in Salus, because a job was added.
        Otherwise the new job would have the device until its time equals the oldest job's."""
        state = home.state
        for job in state.jobs.values():
            now_ms = self._core.now_ms if state.owner.job == job.spec.name else 0.0
            job.timing.counted_from_ms += job.view(now_ms).share_ms

    def restore(self, spec: JobSpec, restored: RestoredJob) -> None:
        """Restore an unfinished job from the journal."""
        placed = restored.placed
        on = placed["device"] if placed is not None and placed["device"] in self.names else ""
        sent_to = on if placed is not None and placed["is_sent"] else ""
        job = self.adopt(spec, sent_to=sent_to, on=on)
        job.progress.restarts = restored.restarts
        job.progress.steps_recomputed = restored.steps_recomputed
        job.progress.why = restored.why
        if restored.slot_bytes:
            self.home(job).commits.restore(job, restored.slot_bytes, restored.step)
        job.progress.step = max(job.progress.step, restored.last_step)
        if restored.is_paused:
            job.state.apply(TaskEvent.PAUSE, "as before the restart")

    def restore_ended(self, name: JobName, record: Mapping[str, Any], persisted_step: int) -> None:
        """Restore an ended job, and the step of its state on disk (-1: none).

        Raises:
            ValueError, TypeError, KeyError, msgspec.ValidationError: the record is invalid.
        """
        state = TaskState(record["state"])
        if state not in TASK_FINAL:
            raise ValueError(f"{state.value} is no end")
        job = self.adopt(msgspec.convert({**record, "name": name}, JobSpec))
        job.state.state = state  # its transitions were in an earlier server
        progress = job.progress
        progress.step, progress.epoch_index = int(record["step"]), int(record["epoch"])
        progress.error, progress.why = str(record["error"]), str(record["why"])
        progress.last_log = dict(record["log"])
        progress.not_restored = [*record.get("not_restored", [])]
        job.timing.ended_at_ms = float(record["ended_at_ms"])
        job.memory.committed_step = job.memory.persisted_step = persisted_step

    def remove(self, job: Job) -> None:
        """Remove an ended job, its commits and its files."""
        home = self.home(job)
        home.commits.remove(job)
        self._core.dirty = ALL
        self._core.emit(RemoveJob(job=job.spec.name))
        del home.state.jobs[job.spec.name]

    def _forget_old(self) -> None:
        """Remove ended jobs older than ``keep_jobs_ms``; 0: all but the last ``keep_jobs``."""
        core, settings = self._core, self._core.settings
        over = [job for job in self if job.state.state in TASK_FINAL]
        if not over:
            return
        over.sort(key=lambda job: job.timing.ended_at_ms)
        gone = over[: max(0, len(over) - settings.keep_jobs)]
        if settings.keep_jobs_ms:
            now_ms = core.now_ms + settings.unix_offset_ms
            gone = [job for job in over if now_ms >= job.timing.ended_at_ms + settings.keep_jobs_ms]
            for job in over[len(gone) : len(gone) + 1]:
                left_ms = job.timing.ended_at_ms + settings.keep_jobs_ms - now_ms
                core.wake_at(core.now_ms + left_ms)
        for job in gone:
            if not job.memory.is_persisting and not job.exporters:
                self.remove(job)
                core.emit(Journal(entry={"kind": "job-over", "name": job.spec.name}))

    def publish(self, job: Job, topic: str, /, **body: Any) -> None:
        self.home(job).state.publish(topic, **(body | {"job": job.spec.name}))

    def row(self, job: Job) -> dict[str, Any]:
        """Return one line of ``jobs``."""
        spec, progress, memory, timing = job.spec, job.progress, job.memory, job.timing
        return {
            "name": spec.name,
            "state": job.state.state.value,
            "entry": spec.entry,
            "args": list(spec.args),
            "folder": spec.folder,
            "env": [one.partition("=")[0] for one in spec.env],  # without the values
            # The script does not report each step.
            "step": max(progress.step, memory.committed_step),
            "epoch": progress.epoch_index,
            "committed_step": memory.committed_step,
            "persisted_step": memory.persisted_step,
            "steps_per_s": round(progress.steps_per_s, 3),
            "steps_left": progress.steps_left if progress.steps_left >= 0 else None,
            "trained_s": round(timing.trained_ms / 1000.0, 3),
            "suspensions": progress.suspensions,
            "preempted_s": round(timing.preempted_ms / 1000.0, 3),
            "swaps": progress.swaps,
            "evictions": progress.evictions,
            "restarts": progress.restarts,
            "steps_recomputed": progress.steps_recomputed,
            "lease_bytes": memory.lease_bytes,
            "worker": job.slot,
            "error": progress.error,
            "why": progress.why or behind(job, self.home(job).state),
            "tenant": spec.tenant,
            "share": spec.share,
            "log": progress.last_log,
            "not_restored": progress.not_restored,
            **({"beside": progress.beside} if progress.beside else {}),
            **({"activations": memory.activations} if memory.activations else {}),
            **memory_row(job),
            **({"on": on} if (on := self.home(job).state.label) else {}),
        }

    def report(self, job: Job, message: JobReport) -> None:
        """Apply a report of the job's script."""
        values = {str(key): value for key, value in message.values.items()}
        if message.kind == "progress":
            self._progress(job, values)
            if len(self.home(job).state.jobs) > 1:  # the report may change the order
                self._core.dirty |= JOBS
        elif message.kind == "unseen":  # a dead process's steps after its last report
            job.progress.steps_recomputed += max(0, _number(values.get("steps"), 0))
        elif message.kind == "nan_loss":
            name, value, step = map(values.get, ("name", "value", "step"))
            job.progress.why = f"{name} was {value} at step {step}"
        elif message.kind in ("warning", "commit_failed"):
            names = values["names"] if isinstance(values.get("names"), list) else []
            known = job.progress.not_restored
            known += [str(name)[:MAX_NAME] for name in names[:MAX_NAMES] if name not in known]
            del known[MAX_NAMES:]
            job.progress.why = str(values.get("text") or values.get("what", message.kind))
        self.publish(job, f"job.{message.kind}", **values)

    def _progress(self, job: Job, values: dict[str, Any]) -> None:
        """Update a job's finished steps, and its speed while it had the device."""
        progress, timing = job.progress, job.timing
        before = progress.step
        progress.step = _number(values.get("step"), progress.step)
        progress.epoch_index = _number(values.get("epoch"), progress.epoch_index)
        progress.steps_left = _number(values.get("left"), -1)
        timing.away_ms = float(_number(values.get("away_ms"), -1))
        has_device = self.home(job).state.owner.job == job.spec.name
        share_ms = job.view(self._core.now_ms if has_device else 0.0).share_ms
        trained_ms = share_ms + timing.counted_from_ms
        elapsed_ms = trained_ms - timing.reported_trained_ms
        if progress.step > before and progress.reported_op_id == job.op_id and elapsed_ms > 0:
            rate = (progress.step - before) * 1000.0 / elapsed_ms
            known = progress.steps_per_s
            progress.steps_per_s += RATE_WEIGHT * (rate - known) if known else rate
        progress.reported_op_id, timing.reported_trained_ms = job.op_id, trained_ms
        if isinstance(values.get("log"), dict):
            progress.last_log = values["log"] or progress.last_log
        if isinstance(values.get("activations"), dict):
            job.memory.activations = values["activations"]

    def unwound(self, job: Job) -> None:
        if job.state.state is TaskState.QUEUED:
            if job.wanted == "pause":
                job.state.apply(TaskEvent.PAUSE, "requested by the user")
            elif job.wanted == "cancel":
                job.state.apply(TaskEvent.CANCEL, "requested by the user")
            if job.wanted in ("pause", "drain"):
                job.memory.persist_due_at_ms = self._core.now_ms  # the commit is written at once
        self.changed(job)

    def changed(self, job: Job) -> None:
        core = self._core
        progress = job.progress
        self.publish(job, f"job.{job.state.state.value}", step=progress.step, error=progress.error)
        if job.state.state is TaskState.PAUSED:  # the next server restores this
            core.emit(Journal(entry={"kind": "hold", "name": job.spec.name, "why": "paused"}))
        core.answer_all(job.answer_on_change, job=self.row(job))
        job.wanted = "run" if job.wanted != "drain" else job.wanted
        if job.state.state in TASK_FINAL:
            job.timing.ended_at_ms = core.now_ms + core.settings.unix_offset_ms
            job.memory.persist_due_at_ms = core.now_ms
            record = {**self.row(job), **entry_of(job.spec), "ended_at_ms": job.timing.ended_at_ms}
            core.emit(Journal(entry={"kind": "ended", "name": job.spec.name, "record": record}))
            self.answer_final(job)

    def answer_final(self, job: Job) -> None:
        if job.state.state not in TASK_FINAL:
            return
        if job.state.state is TaskState.FAILED:
            kind, _, text = job.progress.error.partition(": ")
            error = TaskFailed(
                f'job "{job.spec.name}" failed: {job.progress.error}',
                hint=f"pipeswitch jobs logs {job.spec.name}",
                type=kind,
                text=text,
                job=self.row(job),
            )
            self._core.refuse_all(error, job.waiters)
        else:
            self._core.answer_all(job.waiters, job=self.row(job))

    def lost_steps(self) -> list[str]:
        """Return a sentence for each job whose newest commit the next server will not find."""
        return [
            f'job "{job.spec.name}" loses steps {max(job.memory.persisted_step, 0) + 1} to '
            f"{job.memory.committed_step} ({job.progress.why or 'its commit is not on disk'})"
            for job in self
            if Commits.is_unsaved(job)
        ]

    def drain(self) -> None:
        """Make each job commit and unwind, and write all commits to disk for the next server."""
        for job in self:
            job.memory.persist_due_at_ms = self._core.now_ms  # also for a queued job
            if job.state.state in TASK_ON_WORKER and job.wanted == "run":
                job.wanted = "drain"  # TrainingJobs evicts it

    @property
    def is_quiet(self) -> bool:
        """True if no job is on a worker."""
        return not any(job.state.state in TASK_ON_WORKER for job in self)


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def memory_row(job: Job) -> dict[str, int]:
    """Return the bytes of a job's activations outside its slice, those of its offloaded ones, and,
    while it is swapped, the size of its slice's image in host memory."""
    is_swapped = job.state.state in TASK_SWAPS
    figures = job.memory.activations if job.memory.lease_bytes or is_swapped else {}
    named = {"activation_bytes": "peak_bytes", "offloaded_bytes": "offloaded_bytes"}
    row = {name: _number(figures[key], 0) for name, key in named.items() if key in figures}
    return row | ({"swapped_bytes": job.swap.size_bytes} if is_swapped else {})


def behind(job: Job, device: DeviceState) -> str:
    """Return a sentence with the number of requests before a job; empty if there are none."""
    if job.state.state not in WAITS:
        return ""
    count = len(device.owner.tasks) + len(device.queue) + len(device.awaiting_model)
    return f"waits behind {count} request{'s' * (count > 1)}" if count else ""


def entry_of(spec: JobSpec) -> dict[str, Any]:
    """Return a job's spec as its entry in the journal has it."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in vars(spec).items()
    }
