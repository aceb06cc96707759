"""The simulator on its virtual clock: times by formula, preemption, deaths of processes."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.device import Violation
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings

MIB = 1 << 20
MODEL, JOB = ModelName("m"), JobName("j")
COPY_MS, LAYER_MS, GROUPS, STEP_MS = 2.0, 3.0, 4, 50.0
LINK = Link(bytes_per_ms=float(MIB), fixed_ms=1.0)  # a group of 1 MiB takes COPY_MS


class Answered(World):
    """Simulated server that records when each request was answered."""

    def __init__(self, scheduler: Scheduler, costs: Costs) -> None:
        self.answers: dict[ev.Token, tuple[float, ev.Reply]] = {}
        super().__init__(scheduler, costs=costs)

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            if isinstance(command, ev.Reply) and not command.more:
                self.answers[command.token] = (self.now_ms, command)


class Server(Answered):
    """Server with one model."""

    def __init__(self, store_mib: int = 64, **costs: Any) -> None:
        settings = SchedulerSettings(
            arena_bytes=64 * MIB, store_bytes=store_mib * MIB, fence_count=64
        )
        super().__init__(Scheduler(settings), Costs(to_device=LINK, **costs))
        program = program_of(
            "d", GROUPS * MIB, groups=GROUPS, layers_per_group=1, layer_ms=LAYER_MS
        )
        self.clients.register(MODEL, program)
        self.run()

    def took_ms(self, token: ev.Token, since_ms: float) -> float:
        return self.answers[token][0] - since_ms


def trained(world: Answered, steps: int) -> ev.Token:
    plan = Training(steps=steps, step_ms=STEP_MS, slice_bytes=MIB, state_bytes=MIB)
    world.clients.train(JOB, plan)
    return world.clients.ask(JOB, "wait")


def test_a_cold_request_takes_the_first_copy_then_the_slower_of_copying_and_computing() -> None:
    world = Server()
    began_ms = world.now_ms
    cold = world.clients.infer(MODEL)
    world.run()
    # PipeSwitch 4.2: computing waits only for the first group; the others arrive meanwhile.
    assert world.took_ms(cold, began_ms) == COPY_MS + GROUPS * LAYER_MS
    began_ms = world.now_ms
    warm = world.clients.infer(MODEL)
    world.run()
    assert world.took_ms(warm, began_ms) == GROUPS * LAYER_MS
    timing = world.answers[cold][1].timing
    assert (timing.copy_ms, timing.compute_ms) == (GROUPS * COPY_MS, GROUPS * LAYER_MS)


def test_a_slow_link_is_what_a_cold_request_waits_for() -> None:
    world = Server(message_ms=0.5)
    world.scene.costs = Costs(to_device=Link(bytes_per_ms=MIB / 9, fixed_ms=1.0), message_ms=0.5)
    began_ms = world.now_ms
    token = world.clients.infer(MODEL)
    world.run()
    assert world.took_ms(token, began_ms) == GROUPS * 10.0 + LAYER_MS + 0.5  # 0.5 for the answer


def test_a_request_suspends_training_in_place_and_costs_it_no_more_than_its_own_time() -> None:
    alone = Server()
    began_ms = alone.now_ms
    done = trained(alone, steps=10)
    alone.run()
    assert alone.took_ms(done, began_ms) == 10 * STEP_MS
    world = Server()
    began_ms = world.now_ms
    done = trained(world, steps=10)
    tokens = []
    for at_ms in (70.0, 230.0):
        world.clock.at(began_ms + at_ms, lambda: tokens.append(world.clients.infer(MODEL)))
    world.run()
    assert [world.answers[token][1].error for token in tokens] == [None, None]
    # A cold request also suspends the job for the copy of its first group.
    assert world.took_ms(done, began_ms) == 10 * STEP_MS + COPY_MS + 2 * GROUPS * LAYER_MS


def test_a_request_outlives_its_worker_and_a_job_its_process() -> None:
    world = Server()
    began_ms = world.now_ms
    token = world.clients.infer(MODEL)
    busy = [worker for worker in world.workers.values() if worker.orders]
    world.clock.at(began_ms + COPY_MS + 1.0, lambda: busy[0].end(-9))
    world.run()
    # The copy continued meanwhile, so the next worker finds all groups on the device.
    assert world.took_ms(token, began_ms) == COPY_MS + 1.0 + GROUPS * LAYER_MS
    done = trained(world, steps=10)
    world.clock.at(world.now_ms + 120.0, lambda: _kill_training(world))
    world.run()
    assert world.answers[done][1].body["job"]["state"] == "done"
    assert world.answers[done][1].body["job"]["restarts"] == 1


def _kill_training(world: World) -> None:
    (worker,) = [worker for worker in world.workers.values() if worker.script is not None]
    worker.end(-9)


def test_until_an_instant_nothing_later_happens() -> None:
    world = Server()
    began_ms = world.now_ms
    world.clients.infer(MODEL)
    world.run(began_ms + COPY_MS + LAYER_MS)
    (busy,) = [worker.inference for worker in world.workers.values() if worker.inference]
    assert busy.next_group == 1
    assert world.now_ms == began_ms + COPY_MS + LAYER_MS


def test_a_token_is_answered_once() -> None:
    world = Server()
    with pytest.raises(Violation, match="answered twice"):
        world.perform([ev.Reply(token=ev.Token(1))])


@pytest.mark.parametrize("slice_mib", [12, 45], ids=["fit side by side", "fit one at a time"])
def test_three_jobs_train_nearly_as_much_as_one_alone_and_equally(slice_mib: int) -> None:
    """Send a request every second; each script takes two seconds to start."""

    def trained_steps(jobs: int) -> list[int]:
        world = Server(start_ms=300.0, to_host=LINK, message_ms=0.1, store_mib=1024)
        plan = Training(
            steps=10**6,
            step_ms=100.0,
            start_ms=2000.0,
            slice_bytes=slice_mib * MIB,
            state_bytes=slice_mib * MIB,
        )
        for number in range(jobs):
            world.clients.train(JobName(f"j{number}"), plan)
        for second in range(200):
            world.clock.at(second * 1000.0 + 17.0, lambda: world.clients.infer(MODEL))
        world.run(200_000.0)
        all_jobs = world.scheduler.machine.devices[0].state.jobs.values()
        return [job.memory.committed_step for job in all_jobs]

    alone, steps = trained_steps(1), trained_steps(3)
    assert sum(steps) >= 0.9 * alone[0]
    assert min(steps) >= 0.5 * max(steps)
