"""Jobs that move to another device, also when a process dies during the move."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pipeswitch.base.config import Config
from pipeswitch.controller.setup import sizes_of
from pipeswitch.devices import ChosenDevice
from pipeswitch.devices.cpu.kind import CpuKind
from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.events import JobSpec
from pipeswitch.scheduler.state.records import Job
from pipeswitch.scheduler.state.states import TaskState
from pipeswitch.scheduler.training.jobs import RestoredJob

MIB = 1 << 20
J = JobName("j")
TRAINING = Training(steps=60, slice_bytes=4 * MIB, state_bytes=MIB, step_ms=100.0)


class Server:
    """Server with two devices, and a job that has begun on the first device."""

    def __init__(self, **settings: float) -> None:
        self.settings = SchedulerSettings(
            arena_bytes=24 * MIB,
            store_bytes=256 * MIB,
            fence_count=64,
            standby=1,
            commit_every_ms=300.0,
            **settings,  # type: ignore[arg-type]
        )
        each = [replace(self.settings, device=f"cpu:{index}") for index in range(2)]
        self.scheduler = Scheduler(self.settings, devices=each)
        costs = Costs(to_device=Link(bytes_per_ms=MIB / 4), reap_ms=5.0)
        self.world = World(self.scheduler, costs=costs)
        self.clients = self.world.clients
        self.clients.train(J, TRAINING)
        self.run(250.0)

    @property
    def job(self) -> Job:
        job = self.scheduler.machine.jobs.get(J)
        assert job is not None
        return job

    @property
    def on(self) -> int:
        return self.scheduler.machine.jobs.home(self.job).state.index

    def run(self, ms: float) -> None:
        self.world.run(self.world.now_ms + ms)

    def move(self, to: int) -> None:
        token = self.clients.token()
        self.world.handle(ev.JobRequest(token=token, job=J, action="move", to=f"cpu:{to}"))

    def run_until_it_leaves(self) -> None:
        while self.job.state.state is not TaskState.EVICTING:
            assert self.on == 0, "it has arrived already"
            self.run(0.01)

    def finish(self) -> Job:
        """Run to the job's end; check that no lease and no open request is left; return the job."""
        self.world.run()
        regions = [one for d in self.scheduler.machine.devices for one in d.arena.regions]
        assert {region.owner.kind for region in regions} <= {"fences", "model"}
        assert not self.clients.open
        assert (self.job.state.state, self.job.progress.step) == (TaskState.DONE, TRAINING.steps)
        return self.job


def test_a_job_moves_by_an_eviction_and_computes_no_whole_step_again() -> None:
    server = Server()
    for count, to in enumerate((1, 0, 1), 1):
        server.move(to)
        server.run(350.0)
        assert (server.on, server.job.progress.evictions) == (to, count)
    job = server.finish()
    assert (job.progress.evictions, job.progress.restarts, job.progress.steps_recomputed) == (
        3,
        0,
        0,
    )


def test_a_job_that_its_device_is_asked_to_keep_is_not_evicted() -> None:
    server = Server()
    server.move(0)
    assert server.clients.outcomes["ok"] == 2
    assert server.finish().progress.evictions == 0


def test_a_job_waits_on_its_device_until_the_other_one_is_ready() -> None:
    server = Server(restart_backoff_ms=500.0)
    for _ in range(3):  # the daemon restarts at once after its first death, and later with a delay
        daemon = server.world.daemons[1]
        if daemon is not None:
            daemon.end(-9)
        server.run(50.0)
    assert not server.scheduler.machine.devices[1].state.daemon.is_ready
    server.move(1)
    server.run(100.0)
    assert (server.on, server.job.progress.evictions) == (0, 0)
    job = server.finish()
    assert (server.on, job.progress.evictions, job.progress.restarts) == (1, 1, 0)


def test_what_an_idle_job_leaves_behind_is_zeroed_before_a_model_comes_there() -> None:
    server = Server()
    server.clients.register(
        ModelName("m"), program_of("dm", 20 * MIB, groups=2, layer_ms=2.0), devices=("cpu:0",)
    )
    server.run(50.0)
    server.move(1)
    server.clients.infer(ModelName("m"))  # the simulator raises if the model overlaps the slice
    server.finish()
    assert server.clients.outcomes["ok"] == 4


@pytest.mark.parametrize("victim", ["process", "old daemon", "new daemon"])
def test_whatever_dies_during_a_move_the_last_commit_counts(victim: str) -> None:
    server = Server()
    server.run(400.0)  # the job has committed
    server.move(1)
    server.run_until_it_leaves()
    if victim == "process":
        next(one for one in server.world.workers.values() if one.script is not None).end(-9)
    else:
        server.world.daemons[int(victim == "new daemon")].end(-9)
    server.run(100.0)
    assert server.job.progress.restarts == (victim == "process")  # the daemon dies after the move
    server.finish()
    assert server.on == 1


def test_a_user_who_asks_for_a_device_that_is_lost_meanwhile_is_told_at_once() -> None:
    server = Server(restart_backoff_ms=1e6, max_daemon_restarts=0)
    server.move(1)
    server.run_until_it_leaves()
    server.world.daemons[1].end(-9)
    server.run(20.0)
    assert server.clients.outcomes["ServerUnavailable"] == 1
    assert server.on == 0
    server.finish()


def test_a_job_that_is_paused_during_a_move_goes_on_at_its_new_device() -> None:
    server = Server()
    server.move(1)
    server.run_until_it_leaves()
    server.clients.ask(J, "pause")
    server.run(50.0)
    assert (server.on, server.job.state.state) == (1, TaskState.PAUSED)
    server.clients.ask(J, "resume")
    server.finish()


def test_a_job_is_limited_to_devices_and_is_where_it_was_after_a_restart() -> None:
    server = Server()
    entries: list[dict[str, Any]] = []
    perform = server.world.perform

    def note(commands: list[ev.Command]) -> None:
        entries.extend(one.entry for one in commands if isinstance(one, ev.Journal))
        perform(commands)

    server.world.perform = note  # type: ignore[method-assign]
    for devices in (("cpu:7",), ("cpu:1",)):
        request = ev.TrainRequest(
            token=server.clients.token(),
            spec=ev.JobSpec(name=JobName("k"), entry="x.py", args=(), priority=1, devices=devices),
        )
        server.world.scene.scripts[JobName("k")] = TRAINING
        server.world.handle(request)
    assert server.clients.outcomes == {"InvalidInput": 1, "ok": 2}
    server.world.handle(
        ev.JobRequest(token=server.clients.token(), job=JobName("k"), action="move", to="cpu:0")
    )
    assert server.clients.outcomes["InvalidInput"] == 2
    server.move(1)
    server.run(50.0)
    (job,) = (one for one in entries if one["kind"] == "job")
    (placed,) = (one for one in entries if one["kind"] == "placed")
    assert (job["devices"], placed["name"], placed["device"]) == (["cpu:1"], "j", "cpu:1")
    jobs = Server().scheduler.machine.jobs
    jobs.restore(JobSpec(JobName("n"), "x.py", (), 1), RestoredJob(placed=placed))
    jobs.restore(JobSpec(JobName("o"), "x.py", (), 1, devices=("cpu:7", "cpu:0")), RestoredJob())
    job_rows = [jobs.get(JobName(name)) for name in "no"]
    assert [one.allowed for one in job_rows if one is not None] == [("cpu:1",), ("cpu:0",)]
    assert [jobs.home(one).state.index for one in job_rows if one is not None] == [1, 0]


def hold(server: Server, ms: float) -> None:
    """Keep the first device busy with requests that no other device may serve."""
    program = program_of("dm", MIB, groups=2, layer_ms=50.0)
    server.clients.register(ModelName("m"), program, devices=("cpu:0",))
    server.run(50.0)
    for _ in range(int(ms / 100.0)):
        server.clients.infer(ModelName("m"))
    server.run(ms)


@pytest.mark.parametrize(
    ("after_ms", "is_idle", "expected"),
    [(300.0, True, (1, 1)), (0.0, True, (0, 0)), (300.0, False, (0, 0)), (3e6, True, (0, 0))],
)
def test_a_job_whose_device_requests_hold_goes_to_an_idle_one_after_a_while(
    after_ms: float, is_idle: bool, expected: tuple[int, int]
) -> None:
    server = Server(move_after_ms=after_ms)
    if not is_idle:
        server.clients.train(JobName("k"), TRAINING)
    hold(server, 1000.0)
    assert (server.on, server.job.progress.evictions) == expected
    server.finish()


def test_a_job_that_its_user_sent_somewhere_stays_there() -> None:
    server = Server(move_after_ms=300.0)
    server.move(0)
    hold(server, 1000.0)
    assert (server.on, server.job.progress.evictions) == (0, 0)
    server.finish()


@pytest.mark.parametrize("seed", range(6))
def test_a_hundred_moves_evictions_and_kills_lose_and_repeat_no_committed_step(seed: int) -> None:
    """Move, evict and kill jobs at random. The simulator compares each commit with that of an
    undisturbed run (I2), and checks that no two processes use the same range of bytes (I4)."""
    chance = random.Random(seed)
    server = Server(max_job_deaths=1000, max_daemon_restarts=1000, restart_backoff_ms=10.0)
    for _ in range(100):
        if server.job.state.state is TaskState.DONE:
            break
        what = chance.choice(["move", "move", "move", "hold", "process", "daemon"])
        if what == "move":
            server.move(chance.randrange(2))
        elif what == "hold":
            server.clients.ask(J, "pause")
            server.clients.ask(J, "resume")
        elif what == "process":
            workers = list(server.world.workers.values())
            chance.choice(workers).end(-9) if workers else None
        else:
            daemon = server.world.daemons.get(chance.randrange(2))
            if daemon is not None:
                daemon.end(-9)
        server.run(chance.choice([0.01, 0.1, 1.0, 10.0, 100.0, 400.0]))
    server.finish()


def test_each_slot_that_jobs_in_place_and_standbys_take_has_a_bell() -> None:
    """Fill as many worker slots as possible: a worker in a slot without a doorbell cannot start."""
    config = Config()
    doorbells = sizes_of(config, [ChosenDevice(kind=CpuKind(), name="cpu")])[0].doorbell_count
    settings = SchedulerSettings(
        arena_bytes=64 * MIB,
        store_bytes=256 * MIB,
        fence_count=64,
        training_cycle_ms=50.0,
        standby=config.workers.standby,
    )
    scheduler = Scheduler(settings)
    world = World(scheduler)
    for name in "jklmn":
        world.clients.train(JobName(name), TRAINING)
    world.run(1000.0)
    slots = scheduler.machine.devices[0].state.workers
    assert len(slots) > 1 + config.workers.standby + 1  # several jobs are suspended
    assert max(slots) < doorbells
