"""Oracle: a model of which answers a server may give, made of dictionaries, without torch or I/O.

A ``may_...`` method returns the outcomes that a request may have now. A ``did_...`` method records
the outcome that it had. An outcome is ``OK`` or the name of an error's class. Several outcomes are
allowed if the oracle cannot know: free memory may be fragmented, or a short script may have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pipeswitch.base.settings import NAME_PATTERN
from pipeswitch.client.client import FINAL_JOB_STATES
from pipeswitch.programs.spec import DEFAULT_MAX_BATCH

OK: Final = "ok"
Outcomes = frozenset[str]

SLOT_BYTES: Final = 2 << 20  # regions of the arena begin and end at multiples of this
COMMITS_BYTES: Final = 512 << 10  # limit of the commits of all jobs of the test in the host store
REJECTIONS: Final = frozenset({"InvalidInput", "ModelNotFound", "QueueFull"})  # before acceptance
MOVING: Final = frozenset(
    {"queued", "transmitting", "running", "stopping", "suspended", "evicting"}
    | {"swapping_out", "swapped", "swapping_in"}
)
ELSEWHERE: Final = frozenset({"host", "partial", "transmitting"})  # not completely on the device
CLASSES: Final = ("high", "normal", "low")  # most urgent first
PS_WORDS: Final[Mapping[str, str]] = {"running": "active", "stopping": "active"}
FINITE: Final[Mapping[str, str]] = {
    "short": "done",
    "broken": "failed",
}  # kind of job -> the state in which it ends by its own script


def only(*outcomes: str) -> Outcomes:
    return frozenset(outcomes)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that the test registers, and the facts about it."""

    name: str
    size_bytes: int = 4096  # upper limit of its size in the host store
    is_code: bool = False  # True for a factory, which some listeners refuse
    refusal: str = ""  # error of its registration; empty if it can be served
    batch_max: int = 0  # largest batch; 0: as registered

    @property
    def slots(self) -> int:
        return -(-self.size_bytes // SLOT_BYTES)


@dataclass(kw_only=True)
class KnownModel:
    """A registered model."""

    program: Program
    max_batch: int
    priority: str
    is_pinned: bool
    digest: str
    is_owners: bool  # True if the owner has registered it, False for another client
    is_quarantined: bool = False
    answered: int = 0  # number of requests with a result since the server's start
    stays: bool = False  # True if pinned and seen on the device: only a client can evict it

    @property
    def residencies(self) -> frozenset[str]:
        """Values that the model's row may show as its residency."""
        return ELSEWHERE | {"pinned" if self.is_pinned else "resident"}

    @property
    def batch_max(self) -> int:
        return self.program.batch_max or self.max_batch


@dataclass(kw_only=True)
class KnownJob:
    """A job that was accepted; it may have ended."""

    kind: str  # endless, short or broken
    priority: str
    is_paused: bool = False
    end: str = ""  # final state; empty until a row has shown it
    may_lack_memory: bool = False  # True if pinned models may leave no place for its slice
    committed_step: int = -1

    @property
    def states(self) -> frozenset[str]:
        """States that the job's row may show now."""
        if self.end:
            return only(self.end)
        if self.is_paused:
            return only("paused")
        ends = [FINITE[self.kind]] if self.kind in FINITE else []
        return MOVING | set(ends) | ({"failed"} if self.may_lack_memory else set())

    @property
    def may_be_over(self) -> bool:
        return bool(self.states & FINAL_JOB_STATES)


@dataclass
class Oracle:
    """State that a server must have now, if it was empty at its start.

    Args:
        arena_slots: number of slots of ``SLOT_BYTES`` in the arena, without the fences.
        store_bytes: size of the host store.
        digests: (program, largest batch) -> the digests that were seen. A digest never changes, but
            the owner's program and another client's program have different digests.
    """

    arena_slots: int
    store_bytes: int
    digests: dict[tuple[str, int], set[str]]
    models: dict[str, KnownModel] = field(default_factory=dict)
    jobs: dict[str, KnownJob] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # requests by outcome, since the start
    kills: int = 0
    daemon_deaths: int = 0  # number of deaths since the last answer

    # ---- memory --------------------------------------------------------------------------------

    def has_certain_place(self, slots: int, name: str = "") -> bool:
        """Return True if ``slots`` adjacent slots are free for every placement of pinned models."""
        pinned = [m.program.slots for n, m in self.models.items() if m.is_pinned and n != name]
        free = self.arena_slots - sum(pinned)
        return free > 0 and -(-free // (len(pinned) + 1)) >= slots

    def has_no_place(self, slots: int, name: str = "") -> bool:
        """Return True if the pinned models on the device leave fewer than ``slots`` slots."""
        there = [m.program.slots for n, m in self.models.items() if m.stays and n != name]
        return self.arena_slots - sum(there) < slots

    def device_lost(self) -> None:
        """Record the death of the memory daemon; pinned models are copied again later."""
        self.kills += 1
        self.daemon_deaths += 1
        for model in self.models.values():
            model.stays = False

    def _may_store(self, program: Program) -> Outcomes:
        free = self.store_bytes - sum(m.program.size_bytes for m in self.models.values())
        if free < program.size_bytes:
            return only("HostStoreFull")
        # In the worst case, the free bytes are divided into equal gaps between the models.
        if (free - COMMITS_BYTES) // (len(self.models) + 1) >= program.size_bytes:
            return only(OK)
        return only(OK, "HostStoreFull")

    # ---- models --------------------------------------------------------------------------------

    def may_register(
        self, name: str, program: Program, max_batch: int, *, is_owner: bool
    ) -> Outcomes:
        if not NAME_PATTERN.fullmatch(name):
            return only("InvalidInput")
        if program.is_code and not is_owner:
            return only("PermissionDenied")
        old = self.models.get(name)
        if old is not None:
            registration = (program, max_batch or DEFAULT_MAX_BATCH, is_owner)
            is_same = (old.program, old.max_batch, old.is_owners) == registration
            return only(OK if is_same else "AlreadyExists")
        if program.refusal:
            return only(program.refusal)
        return self._may_store(program)

    def did_register(
        self,
        name: str,
        program: Program,
        row: Mapping[str, Any],
        *,
        max_batch: int,
        priority: str,
        is_pinned: bool,
        is_owner: bool,
    ) -> None:
        """Record a registration whose answer is ``row``; a repeated one sets priority and pin."""
        old = self.models.get(name)
        if old is not None:
            assert row["digest"] == old.digest
            old.priority = priority or old.priority
            old.is_pinned |= is_pinned
            self._memory_changed()
            return
        max_batch = max_batch or DEFAULT_MAX_BATCH
        self.know_digest(program.name, max_batch, row["digest"])
        self.models[name] = KnownModel(
            program=program,
            max_batch=max_batch,
            priority=priority or "normal",
            is_pinned=is_pinned,
            digest=row["digest"],
            is_owners=is_owner,
        )
        self._memory_changed()

    def know_digest(self, program: str, max_batch: int, digest: str) -> None:
        """Check that a program has one digest per tenant, which no other program has."""
        digests = self.digests.setdefault((program, max_batch), set())
        digests.add(digest)
        assert len(digests) <= 2, program
        others = {name for (name, _), known in self.digests.items() if digest in known}
        assert others == {program}, f"{others} have one digest"

    def adopt(self, name: str, program: Program, row: Mapping[str, Any]) -> None:
        """Copy a row of ``models`` that results from requests whose order is unknown."""
        old = self.models.get(name)
        self.models[name] = KnownModel(
            program=program,
            max_batch=old.max_batch if old and old.digest == row["digest"] else DEFAULT_MAX_BATCH,
            priority=row["priority"],
            is_pinned=row["pinned"],
            digest=row["digest"],
            is_owners=not row["tenant"],
            is_quarantined=row["state"] == "quarantined",
        )
        self._memory_changed()

    def may_find(self, name: str) -> Outcomes:
        """Return the possible outcomes of ``show``, ``unregister``, ``load`` and ``unload``."""
        return only(OK if name in self.models else "ModelNotFound")

    def did_unregister(self, name: str) -> None:
        self.models.pop(name, None)

    def did_pin(self, name: str, row: Mapping[str, Any], *, is_pinned: bool) -> None:
        """Record a ``load`` or ``unload`` whose answer is ``row``."""
        model = self.models[name]
        model.is_pinned = is_pinned
        model.is_quarantined &= not is_pinned
        model.stays &= is_pinned
        assert (row["model"], row["pinned"]) == (name, is_pinned)
        assert row["state"] in model.residencies, row
        self._memory_changed()

    def comes_to_the_device(self, name: str) -> bool:
        """Return True if the pinned model must come to the device: it fits, and no job is alive."""
        model = self.models[name]
        is_alone = all(job.end for job in self.jobs.values())
        has_place = self.has_certain_place(model.program.slots, name)
        return model.is_pinned and not model.is_quarantined and is_alone and has_place

    def _memory_changed(self) -> None:
        if not self.has_certain_place(1):
            for job in self.jobs.values():
                job.may_lack_memory = True

    def may_profile(self, name: str, batches: Sequence[int]) -> Outcomes:
        model = self.models.get(name)
        if model is None:
            return only("ModelNotFound")
        if model.is_quarantined or any(not 1 <= n <= model.batch_max for n in batches):
            return only("InvalidInput")
        if any(not job.end for job in self.jobs.values()):
            return only(OK, "DeviceBusy", "OutOfDeviceMemory")  # OK, as a paused job uses no memory
        if not self.has_certain_place(model.program.slots, name):
            return only(OK, "OutOfDeviceMemory")
        return only(OK)

    # ---- requests ------------------------------------------------------------------------------

    def may_infer(self, name: str, batch: int = 1, *, fits: bool = True) -> Outcomes:
        """Return the possible outcomes of a request without a deadline. ``fits``: valid input."""
        model = self.models.get(name)
        if model is None:
            return only("ModelNotFound")
        if not fits or batch > model.batch_max:
            return only("InvalidInput")
        if model.is_quarantined:
            return only("ModelQuarantined")
        if self.has_no_place(model.program.slots, name):
            return only("OutOfDeviceMemory")
        if not self.has_certain_place(model.program.slots, name):
            return only(OK, "OutOfDeviceMemory")
        return only(OK)

    def class_of(self, name: str, priority: str) -> int:
        """Return a request's class (0: most urgent); without a priority, the model's counts."""
        return CLASSES.index(priority or self.models[name].priority)

    def did_infer(self, name: str, outcome: str) -> None:
        if outcome in REJECTIONS:
            self.counts["rejected"] += 1
            return
        self.counts["accepted"] += 1
        self.counts["ok" if outcome == OK else "error"] += 1
        if outcome == OK:
            self.counts["inferences"] += 1
            self.models[name].answered += 1
            self.daemon_deaths = 0
        elif outcome == "WorkerLost":
            self.models[name].is_quarantined = True

    # ---- jobs ----------------------------------------------------------------------------------

    def may_train(self, name: str, *, is_owner: bool, is_there: bool = True) -> Outcomes:
        if not NAME_PATTERN.fullmatch(name):
            return only("InvalidInput")
        if not is_owner:
            return only("PermissionDenied")
        if not is_there:
            return only("InvalidInput")
        job = self.jobs.get(name)
        if job is None or job.end:
            return only(OK)
        return only(OK, "AlreadyExists") if job.may_be_over else only("AlreadyExists")

    def did_train(self, name: str, kind: str, priority: str) -> None:
        self.jobs[name] = KnownJob(kind=kind, priority=priority or "low")
        self.jobs[name].may_lack_memory = not self.has_certain_place(1)

    def may_act(self, name: str, action: str) -> Outcomes:
        """Return the possible outcomes of pause, resume, cancel and show."""
        if not NAME_PATTERN.fullmatch(name):
            return only("InvalidInput")
        job = self.jobs.get(name)
        if job is None:
            return only("ModelNotFound")
        if action == "show":
            return only(OK)
        if job.end:
            return only("InvalidInput")
        return only(OK, "InvalidInput") if job.may_be_over else only(OK)

    def did_act(self, name: str, action: str, row: Mapping[str, Any]) -> None:
        """Record an action on a job whose answer is ``row``."""
        job = self.jobs[name]
        if action in ("pause", "cancel"):
            by_itself = job.states & FINAL_JOB_STATES
            assert row["state"] in by_itself | {f"{action}d" if action == "pause" else "cancelled"}
            job.is_paused = row["state"] == "paused"
            job.end = "" if job.is_paused else row["state"]
        elif action == "resume":
            job.is_paused = False
        self._saw_job(name, row)

    def _saw_job(self, name: str, row: Mapping[str, Any]) -> None:
        job = self.jobs[name]
        state = row["state"]
        assert state in job.states, f"{name}: {state}, expected {sorted(job.states)}: {row}"
        assert row["committed_step"] >= job.committed_step, f"{name} lost a commit: {row}"
        job.committed_step = row["committed_step"]
        assert row["persisted_step"] <= row["committed_step"]
        if state in FINAL_JOB_STATES:
            job.end = state

    # ---- the server ----------------------------------------------------------------------------

    def restarted(self, persisted: Mapping[str, int]) -> None:
        """Record a restart on the same state directory, after which all models and jobs exist.

        Args:
            persisted: job -> the step that certainly was on disk.
        """
        self.counts.clear()
        self.daemon_deaths = 0
        for model in self.models.values():
            model.answered, model.is_quarantined, model.stays = 0, False, False
        for name, job in self.jobs.items():
            job.committed_step = persisted.get(name, -1)

    def check_models(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that ``models`` shows the registered models and nothing else."""
        by_name = {row["name"]: row for row in rows}
        assert set(by_name) == set(self.models), f"{sorted(by_name)}, not {sorted(self.models)}"
        for name, row in by_name.items():
            self.check_model(name, row)

    def check_model(self, name: str, row: Mapping[str, Any]) -> None:
        """Check a model's row in ``models`` or ``show``."""
        model = self.models[name]
        state = "quarantined" if model.is_quarantined else "ready"
        shown = (row["state"], row["digest"], row["pinned"], row["priority"], row["requests"])
        known = (state, model.digest, model.is_pinned, model.priority, model.answered)
        assert shown == known, f"{name}: {shown}, not {known}"
        assert row["batch"] == [1, model.batch_max], row
        assert row["residency"] in model.residencies, row
        # A new profile changes the groups, for which the model is evicted and copied again.
        is_there = row["residency"] == "pinned" and not row["profile"]
        assert is_there or not model.stays or row["profile"], f"{name} was pinned, and left: {row}"
        model.stays = is_there

    def check_jobs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that ``jobs`` shows this test's jobs, and only ended jobs of other tests."""
        remaining = dict(self.jobs)
        for row in rows:
            if remaining.pop(row["name"], None) is not None:
                self._saw_job(row["name"], row)
            else:
                assert row["state"] in FINAL_JOB_STATES, row
        assert not remaining, f"lost: {sorted(remaining)}"

    def check_ps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that ``ps`` agrees with ``models`` and ``jobs``."""
        by_kind: dict[str, dict[str, Mapping[str, Any]]] = {}
        for row in rows:
            by_kind.setdefault(row["kind"], {})[row["name"]] = row
        models = by_kind.get("model", {})
        assert set(models) == set(self.models)
        for name, model in self.models.items():
            states = {"host", "transmitting", "resident", "active"}
            allowed = {"failed"} if model.is_quarantined else states
            assert models[name]["state"] in allowed, models[name]
            assert models[name]["prio"] == model.priority, models[name]
            assert models[name]["device"] in (0, model.program.slots * SLOT_BYTES)
            assert model.is_pinned or models[name]["why"] != "pinned", models[name]
        for name, job in self.jobs.items():
            row = by_kind["job"][name]
            assert row["state"] in {PS_WORDS.get(state, state) for state in job.states}, row
            assert row["prio"] == job.priority, row
        (daemon,) = by_kind["daemon"].values()
        if not self.jobs:  # no row shows a slice that is being zeroed
            device_count = sum(row["device"] for row in models.values())
            assert daemon["device"] == device_count, (daemon, models)
        pids = [row["pid"] for row in by_kind["worker"].values() if row["pid"]]
        assert len(pids) == len(set(pids)), f"one process in two slots: {pids}"

    def check_stats(self, stats: Mapping[str, Any]) -> None:
        """Check that every request is counted once, under its outcome."""
        assert stats["models"] == len(self.models)
        assert stats["draining"] is False
        assert stats["queued"] == 0
        assert stats["inferences"] == self.counts["inferences"]
        shown = {key: stats["inference"][key] for key in ("accepted", "ok", "error", "rejected")}
        assert shown == {key: self.counts[key] for key in shown}, f"{shown}, not {self.counts}"
        assert stats["inference"]["in_flight"] == 0
        assert stats["inference"]["undeliverable"] == self.counts["undeliverable"]
