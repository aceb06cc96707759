"""Simulated servers with random clients, faults and deliveries; a life is one run of a server.

The simulator (``pipeswitch/simulator``) checks the rules that a scheduler can break. This module
adds the probabilities of faults, random clients, and the checks at the end of a life.
"""

# mypy: disable-error-code="arg-type"
# Names and ids are plain strings and numbers here, because NewTypes would make this hard to read.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import EX_IOERR
from typing import Any

from msgspec import convert, structs

from pipeswitch.extras.lab import profile as profiles
from pipeswitch.extras.lab import world as simulator
from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.device import require
from pipeswitch.extras.lab.measuring import MeasuredProgram, Measurement
from pipeswitch.extras.lab.planner import plan_of
from pipeswitch.extras.lab.profiling import instants_of
from pipeswitch.extras.lab.programs import program_of, variant_of
from pipeswitch.planning import planned_groups
from pipeswitch.programs.interface.groups import layer_bytes
from pipeswitch.programs.interface.layout import Batching, Manifest
from pipeswitch.scheduler.policies import MAKERS
from pipeswitch.scheduler.policies.placement import PLACEMENTS
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.server.device import Device
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from tests.unit.measured import batch_of, measured

MIB = 1 << 20
LAYER_MS = 5.0  # time to compute a layer; the time to copy a group is twice as long
COSTS = Costs(to_device=Link(fixed_ms=10.0))
PRIORITIES = (0, 1, 1, 2)
CALLERS = ("", "a", "b")
JOINED = {  # batching of the models; m2 is the operator's code, m3 runs each request alone
    "m0": Batching(limit=4, delay_ms=30.0, is_exact=True),
    "m1": Batching(limit=2, delay_ms=0.0, is_exact=True),
}
FINAL = ("done", "failed", "cancelled", "expired")


def manifest_of(digest: str, total_bytes: int, group_count: int) -> Manifest:
    """Return a manifest without a program: groups of two layers, with a tensor in each layer."""
    return program_of(digest, total_bytes, groups=group_count).manifest


def profile_of(name: str, manifest: Manifest, layer_ms: float) -> profiles.Profile:
    """Return a profile as on disk: copying a layer takes 10 ms, and computing it ``layer_ms``."""
    sizes = layer_bytes(manifest)
    return measured(
        sizes,
        {"beta_ms_per_mib": 10.0 * MIB / max(1, max(sizes))},
        model=name,
        digest=manifest.digest,
        batches=(batch_of(1, (layer_ms,) * len(sizes)),),
        overheads=profiles.Overheads(sigma_ms=0.01, launch_ms=0.0, wake_ms=0.0),
    )


def planned_of(profile: profiles.Profile) -> planned_groups.PlannedGroups:
    """Return a profile's planned groups, as a server reads them from its file."""
    check = profiles.PlanCheck(
        plan=plan_of(profile), batch=1, predicted_ms=1.0, measured_ms=1.0, spread_ms=0.0, trials=5
    )
    return planned_groups.decode(profiles.encode(structs.replace(profile, checks=(check,))))


@dataclass
class Profiling:
    """Client that measures a model, as ``Client.profile`` does."""

    model: str
    token: int  # its newest request
    measurement: Measurement | None = None
    retries: int = 0
    is_over: bool = False
    error: Any = None


@dataclass
class Faults:
    """Probabilities of events, per step or per decision. ``settle`` sets those of faults to 0."""

    kill_worker: float = 0.0
    kill_daemon: float = 0.0
    pings: bool = False  # clients sometimes ask for the health of all processes
    build_error: float = 0.05
    builder_dies: float = 0.05
    store_error: float = 0.0
    copy_error: float = 0.0
    persist_error: float = 0.1
    slice_error: float = 0.1
    prepare_error: float = 0.1
    early_error: float = 0.02
    infer_error: float = 0.1
    script_error: float = 0.1
    hang: float = 0.0
    swallow: float = 0.0
    linger: float = 0.0
    holds: float = 0.0  # 1: a stop holds a script between two kernels
    unclean: float = 0.5
    commit: float = 0.35
    skips_commit: float = 0.3
    takes_along: float = 0.5
    poison: frozenset[str] = frozenset()  # models whose requests kill their workers


QUIET: dict[str, Any] = dict.fromkeys(
    ("build_error", "builder_dies", "infer_error", "early_error", "script_error", "slice_error"),
    0.0,
)


class World(simulator.World):
    """A server with random clients. ``act`` makes one random move; ``settle`` ends all faults."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str = "priority",
        faults: Faults | None = None,
        standby: int = 2,
        arena_mib: int = 64,
        profiled: float = 0.0,
        max_compute_ms: float = 0.0,
        devices: int = 1,
        placement: str = "least-finish",
        scheduler: Scheduler | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        settings = SchedulerSettings(
            arena_bytes=arena_mib * MIB,
            store_bytes=256 * MIB,
            fence_count=64,
            standby=standby,
            max_queue=16,
            restart_backoff_ms=100.0,
            max_daemon_restarts=10**6,
            max_compute_ms=max_compute_ms,
            is_sandboxed=seed % 2 == 1,
            placement=placement,
        )
        kinds = ("cpu", "cuda" if seed % 3 == 2 else "cpu")
        each = [replace(settings, device=f"{kinds[index]}:{index}") for index in range(devices)]
        self.profiled = profiled  # probability that a built program's groups are planned on disk
        self.announced: set[str] = set()
        self.job_names: list[str] = []
        self.left_swapped = 0  # processes that were killed because their users held swapped jobs
        self.measuring: list[Callable[[], object]] = []  # next actions of measuring clients
        self.profilings: dict[int, Profiling] = {}  # token of a trial -> its client
        self.runs: dict[int, Profiling] = {}  # token of a trial's request -> its client
        super().__init__(
            scheduler or Scheduler(settings, policy, 2000.0, each), choices=self, costs=COSTS
        )
        self.open, self.counts, self.token = (
            self.clients.open,
            self.clients.outcomes,
            self.clients.token,
        )

    def happens(self, what: str, name: str) -> bool:
        """Return True with the probability of the event ``what`` (see ``Choices``)."""
        if what == "poison":
            return name in self.faults.poison
        chance: float = getattr(self.faults, what)
        return bool(chance) and self.random.random() < chance

    # -- moves ---------------------------------------------------------------------------------

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            match command:
                case ev.Kill(reason=reason) if reason.startswith(("cancel", "pause requested")):
                    self.left_swapped += 1
                case ev.ModelAvailable(model=model):
                    self.announced.add(model)
                case ev.ModelRemoved(model=model):
                    self.announced.discard(model)
                case ev.Reply(token=token, body=body) if token in self.profilings:
                    self._measuring(self.profilings[token], command, body)
                case ev.Reply(token=token, error=error) if token in self.runs and error:
                    cancel = ev.CancelRequest(token=self.runs[token].token)
                    self.measuring.append(partial(self.handle, cancel))
                case ev.Reply(token=token, outputs=outputs) if outputs:
                    names = [output.name for output in outputs]
                    require(names == [f"r{token}"], f"r{token} is answered with {names}")
                case _:
                    pass

    def act(self) -> bool:
        """Make one random move that is possible now; return False if there is none."""
        if self.measuring:
            self.measuring.pop(0)()
            return True
        moves = self.moves()
        if moves:
            self.make(self.random.choice(moves))
        return bool(moves)

    def inject_faults(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.runs]
        if alive and self.random.random() < self.faults.kill_worker:
            self.random.choice(alive).end(-9)
        for daemon in self.daemons.values():
            if daemon is not None and self.random.random() < self.faults.kill_daemon:
                daemon.end(-9)

    def settle(self, limit: int = 12000) -> None:
        """End all faults; run until all requests and jobs have ended, within ``limit`` moves."""
        self.faults = Faults(**QUIET, persist_error=0.0)
        for worker in self.workers.values():
            if worker.inference is not None:
                worker.inference.hangs = False
        for name in self.job_names:
            self.clients.ask(name, "resume")
        for _ in range(limit):
            is_still = not self.act() and not self.to_next_wakeup() and not self.help()
            if is_still or self.is_settled():
                break
        else:
            require(False, f"stuck: {self.describe()}")
        require(not self.open, f"never answered: {sorted(self.open)} {self.describe()}")

    def help(self) -> bool:
        """Act as the user: resume paused jobs, and unpin models if a job waits for memory.
        Return False if there was nothing to do."""
        machine = self.scheduler.machine
        paused = [job.spec.name for job in machine.jobs if job.state.state.value == "paused"]
        for name in paused:
            self.clients.ask(name, "resume")
        waits = any(job.memory.lease_asked_bytes for job in machine.jobs)
        pinned = [model.base for model in machine.models.values() if model.want_pinned]
        for name in pinned if waits else ():
            self.handle(ev.PinRequest(token=self.token(), model=name, pin=False))
        return bool(paused) or (waits and bool(pinned))

    def is_settled(self) -> bool:
        jobs = list(self.scheduler.machine.jobs)
        return (
            not self.open
            and all(job.state.state.value in FINAL for job in jobs)
            and not any(
                job.memory.commit_slot_bytes for job in jobs
            )  # if a disk error was injected, the commit is written again
            and not self.moves()
            and not any(worker.script for worker in self.workers.values())
        )

    def leave(self, limit: int = 6000) -> None:
        """Run a requested drain to its end, and check that every client has an answer."""
        self.faults = replace(Faults(), takes_along=0.0)
        for _ in range(limit):
            if self.left is not None or (not self.act() and not self.to_next_wakeup()):
                break
        core, lost = self.scheduler.core, self.scheduler.machine.jobs.lost_steps()
        may_lose = core.drain_at_ms is not None and core.now_ms >= core.drain_at_ms
        status = EX_IOERR if lost and may_lose else 0  # the grace period ended before a disk write
        require(self.left == status, f"drain did not end: {self.left} {self.describe()}")
        require(not self.open, f"never answered: {sorted(self.open)}")

    def describe(self) -> str:
        return "\n".join(map(self._describe, self.scheduler.machine.devices))

    def _describe(self, device: Device) -> str:
        state, turn = device.state, self.scenes[device.state.index].device.turn
        jobs = [
            (j.spec.name, j.state.state.value, j.memory.lease_asked_bytes)
            for j in state.jobs.values()
        ]
        workers = [(w.slot, w.state.state.value, w.job) for w in state.workers.values()]
        return (
            f"owner={state.owner.story} tasks={state.owner.tasks} promised={state.owner.promised} "
            f"queue={[r.model for r in state.queue]} jobs={jobs} workers={workers} "
            f"arena={list(device.arena.regions)} turn={turn}"
        )

    def check_rest(self) -> None:
        """Check invariant I3 at rest: the arena holds only fences and idle models."""
        machine = self.scheduler.machine
        open_areas = [daemon.areas for daemon in self.daemons.values() if daemon is not None]
        require(not any(open_areas), f"commit areas of jobs that are over: {open_areas}")
        for region in machine.store.regions:
            is_used = region.owner.kind == "shared" and bool(machine.models)
            is_used |= region.owner.name in machine.models
            require(is_used, f"leaked {region} in the store")
        for device in machine.devices:
            state = device.state
            for region in device.arena.regions:
                owner = region.owner
                is_idle_model = owner.kind in ("model", "rest") and owner.name in state.replicas
                require(owner.kind == "fences" or is_idle_model, f"leaked {region}")
            require(all(m.users == 0 for m in state.replicas.values()), "a lease at rest")
            require(state.owner.job is None and state.owner.running is None, "a task at rest")

    # -- clients -------------------------------------------------------------------------------

    def register(self, name: str, total_bytes: int, *, pin: bool = False, groups: int = 2) -> int:
        """Register a model; with probability ``profiled``, its groups are already planned."""
        planned: tuple[planned_groups.PlannedFile, ...] = ()
        program = program_of(
            f"d-{name}", total_bytes, groups=groups, layer_ms=LAYER_MS, batching=JOINED.get(name)
        )
        number = sum(name.encode())
        own = [i for i in range(2 * groups) if (i + number) % 3 == 0]  # the rest is each model's
        program = variant_of(program, name, own)
        if name.endswith("2"):  # this model is the operator's own code
            needs = {f"layer{index}": 0 for index in range(len(program.manifest.layers))}
            manifest = structs.replace(program.manifest, mode="module", extra={"needs": needs})
            program = replace(program, manifest=manifest)
        if self.random.random() < self.profiled:
            layer_ms = self.random.choice((1.0, 12.0, 40.0))
            groups = planned_of(profile_of(name, program.manifest, layer_ms))
            planned = (planned_groups.PlannedFile("found.json", groups),)
        names = [device.state.settings.device for device in self.scheduler.machine.devices]
        only: tuple[str, ...] = ()
        if len(names) > 1 and name[-1] in "34":
            only = (names[-1],) if name.endswith("3") else tuple(names)
        program = replace(program, planned=planned)
        return self.clients.register(name, program, pin=pin, devices=only)

    def infer(self, name: str, *, priority: int = 1, deadline_ms: float | None = None) -> int:
        caller = CALLERS[self.clients.last_token % len(CALLERS)]
        return self.clients.infer(name, priority=priority, deadline_ms=deadline_ms, caller=caller)

    def profile(self, name: str) -> Profiling:
        """Begin to measure a model."""
        profiling = Profiling(name, self.token())
        self._regroup(profiling)
        return profiling

    def _regroup(self, profiling: Profiling, **fields: Any) -> None:
        self.profilings[profiling.token] = profiling
        request = {"token": profiling.token, "model": profiling.model, **fields}
        self.handle(ev.RegroupRequest(**request))

    def _measuring(self, profiling: Profiling, reply: ev.Reply, body: dict[str, Any]) -> None:
        """Plan what a measuring client does after a reply."""
        if not reply.more and profiling.token == reply.token:
            profiling.is_over, profiling.error = True, reply.error
        elif "trial" in body:
            self.measuring.append(partial(self._run, profiling, body))
        elif "begins_ms" in body:
            self.measuring.append(partial(self._next, profiling, body))

    def _run(self, profiling: Profiling, body: dict[str, Any]) -> None:
        """Send the request of a trial."""
        if profiling.measurement is None:
            program = convert(body["program"], MeasuredProgram)
            identity = convert(body["identity"], planned_groups.Identity)
            profiling.measurement = Measurement(program, (body["batch"],), identity)
        if profiling.token in self.open:
            self.runs[self.infer(profiling.model)] = profiling

    def _next(self, profiling: Profiling, body: dict[str, Any]) -> None:
        """Record a trial's times, and begin the next trial or use the planned groups."""
        measurement = profiling.measurement
        if profiling.token not in self.open or measurement is None or measurement.next is None:
            return
        is_taken = measurement.take(instants_of(body, measurement.next))
        profiling.retries = 0 if is_taken else profiling.retries + 1
        if profiling.retries > 20:
            self.handle(ev.CancelRequest(token=profiling.token))
            return
        former, profiling.token = profiling.token, self.token()
        trial = measurement.next
        if trial is not None:
            self._regroup(profiling, plan=trial.plan, is_cold=trial.is_cold, trial=former)
            return
        document = profiles.encode(measurement.profile("now"))
        self._regroup(profiling, planned=document, trial=former)

    def train(self, name: str, *, priority: int = 1) -> None:
        size = sum(name.encode()) % 3  # each job has its own size
        training = Training(steps=6, slice_bytes=(6, 18, 30)[size] * MIB, state_bytes=MIB)
        self.clients.train(name, training, priority=priority)
        if name not in self.job_names:
            self.job_names.append(name)

    def random_client(self) -> None:
        """Send one random request, or advance the clock."""
        rng, ask, handle = self.random, self.clients.ask, self.handle
        name = f"m{rng.randrange(4)}"
        job = f"j{rng.randrange(3)}"
        deadline = rng.choice((None, None, 5.0, 500.0, 20000.0))
        choice = rng.randrange(25)
        if choice < 10:
            if self.announced and rng.random() < 0.95:
                name = rng.choice(sorted(self.announced))
            self.infer(name, priority=rng.choice(PRIORITIES), deadline_ms=deadline)
        elif choice < 13:
            self.register(name, rng.choice((1, 7, 15, 30, 40)) * MIB, pin=rng.random() < 0.1)
        elif choice < 15:
            self.train(job, priority=rng.choice(PRIORITIES))
        elif choice == 15:
            ask(job, rng.choice(("pause", "resume", "show", "wait", "cancel")))
        elif choice == 16:
            ask(job, rng.choice(("pause", "resume")))
        elif choice == 17 and rng.random() < 0.3:
            handle(ev.UnregisterRequest(token=self.token(), model=name))
        elif choice == 18:
            handle(ev.PinRequest(token=self.token(), model=name, pin=rng.random() < 0.5))
        elif choice == 19 or (choice == 22 and self.announced):
            if choice == 22:
                name = rng.choice(sorted(self.announced))
            handle(ev.PrefetchHint(model=name))
            if rng.random() < 0.5 and self.announced:
                self.infer(rng.choice(sorted(self.announced)))
                self.infer(name)
        elif choice == 20 and self.open:
            handle(ev.CancelRequest(token=rng.choice(sorted(self.open))))
        elif choice == 21:
            if self.faults.pings:
                handle(ev.PingRequest(token=self.token()))
            what: Any = rng.choice(("models", "ps", "jobs", "stats", "show", "trace", "plan"))
            handle(ev.Query(token=self.token(), what=what, name=name))
        elif choice == 24:
            self.profile(name)
        else:
            self.pass_time(rng.choice((0.0, 1.0, 40.0, 900.0, 3000.0)))


def live(world: World, steps: int) -> None:
    """Run random clients and faults in random order, then settle, check memory, and drain."""
    for name, mib in (("m0", 7), ("m1", 15), ("m2", 30)):
        world.register(name, mib * MIB)
        if world.random.random() < 0.1:
            world.profile(name)  # mostly refused, because the model is not ready yet
    leaves_at = world.random.choice((None, None, None, world.random.randrange(steps)))
    for step in range(steps):
        if step == leaves_at:
            world.handle(ev.DrainRequest(token=None, grace_ms=world.random.choice((10.0, 1e6))))
        if world.left is None and world.random.random() < 0.12:
            world.random_client()
        else:
            world.inject_faults()
            if not world.act() and world.random.random() < 0.5:
                world.to_next_wakeup()
    if world.left is not None or world.scheduler.core.is_draining:
        world.leave()
        return
    world.settle()
    world.check_rest()
    world.handle(ev.DrainRequest(token=world.token(), grace_ms=1e9))
    world.leave()


def random_world(seed: int, *, pings: bool = False, devices: int = 1) -> World:
    """Return a world whose settings and faults are drawn from the seed."""
    rng = random.Random(f"world {seed}")
    others = [name for name in MAKERS if name != "priority"]
    faults = Faults(
        kill_worker=rng.choice((0.0, 0.01, 0.05)),
        kill_daemon=rng.choice((0.0, 0.0, 0.004)),
        copy_error=rng.choice((0.0, 0.02)),
        store_error=0.03,
        hang=rng.choice((0.0, 0.03)),
        swallow=rng.choice((0.0, 0.15)),
        linger=rng.choice((0.0, 0.15)),
        holds=float(seed % 2),
        pings=pings,
        poison=frozenset({"m1"} if rng.random() < 0.2 else ()),
    )
    policy = rng.choice(("priority", "priority", others[seed % len(others)]))
    return World(
        seed,
        policy=policy,
        faults=faults,
        standby=rng.choice((0, 1, 2, 2)),
        arena_mib=rng.choice((48, 64, 96)),
        profiled=rng.choice((0.0, 0.7, 1.0)),
        max_compute_ms=rng.choice((0.0, 60000.0)),
        devices=devices,
        placement=tuple(PLACEMENTS)[seed % len(PLACEMENTS)],
    )
