"""Training policies on the virtual clock, compared with closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base import config
from pipeswitch.extras.lab.costs import Training
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import JobName
from pipeswitch.scheduler.policies.job_orders import JOB_ORDERS
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings

MIB = 1 << 20
STEP_MS = 100.0
CYCLE_MS = 1000.0


class Server(World):
    """Server whose memory has room for all jobs."""

    def __init__(self, order: str) -> None:
        self.ends_ms: dict[str, float] = {}
        self._names: dict[ev.Token, str] = {}
        settings = SchedulerSettings(
            arena_bytes=64 * MIB,
            store_bytes=64 * MIB,
            fence_count=64,
            training=order,
            training_cycle_ms=CYCLE_MS,
        )
        super().__init__(Scheduler(settings))
        self.run()
        self.began_ms = self.now_ms

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            if isinstance(command, ev.Reply) and command.token in self._names:
                self.ends_ms[self._names[command.token]] = self.now_ms - self.began_ms

    def start(
        self,
        name: str,
        seconds: float,
        *,
        mib: int = 2,
        priority: int = 1,
        step_ms: float = STEP_MS,
        loader_ms: float = 0.0,
    ) -> None:
        training = Training(
            steps=round(seconds * 1000.0 / step_ms),
            step_ms=step_ms,
            loader_ms=loader_ms,
            slice_bytes=2 * mib * MIB,
            state_bytes=mib * MIB,
        )
        self.clients.train(JobName(name), training, priority=priority)
        self._names[self.clients.ask(JobName(name), "wait")] = name

    def trained_ms(self, name: str) -> float:
        state = self.scheduler.machine.devices[0].state
        job = state.jobs[JobName(name)]
        running_ms = self.now_ms - job.timing.cycle_began_at_ms if state.owner.job == name else 0.0
        return job.timing.trained_ms + running_ms


def test_the_servers_file_names_the_orders_that_there_are() -> None:
    assert tuple(JOB_ORDERS) == config.JOB_ORDERS


@pytest.mark.parametrize("comes", ["new", "resumed"])
def test_by_fair_one_that_comes_late_has_half_from_then_on(comes: str) -> None:
    """Start or resume a second job when the first one has trained for 6 s longer. In the next 6 s,
    each must train for 3 s."""
    server = Server("fair")
    if comes == "resumed":
        server.start("second", 20.0)
        server.run(server.now_ms + 1500.0)
        server.clients.ask(JobName("second"), "pause")
    server.start("first", 40.0)
    server.run(server.now_ms + 8000.0)
    if comes == "resumed":
        server.clients.ask(JobName("second"), "resume")
    else:
        server.start("second", 20.0)
    names = ("first", "second")
    before = [server.trained_ms(name) for name in names]
    assert before[0] >= 6000.0 + before[1]
    server.run(server.now_ms + 6000.0)
    had = [server.trained_ms(name) - ms for name, ms in zip(names, before, strict=True)]
    assert had == pytest.approx([3000.0, 3000.0], abs=CYCLE_MS)
    server.run(server.now_ms + 90000.0)
    assert server.ends_ms.keys() == {"first", "second"}


@given(steps_ms=st.lists(st.floats(50.0, 900.0), min_size=2, max_size=4))
def test_by_fair_jains_index_is_near_one_however_long_their_steps_are(
    steps_ms: list[float],
) -> None:
    server = Server("fair")
    for index, step_ms in enumerate(steps_ms):
        server.start(f"j{index}", 100.0, step_ms=step_ms)
    for _ in range(2):
        server.run(server.now_ms + 15.0 * CYCLE_MS)
        had = [server.trained_ms(f"j{index}") for index in range(len(steps_ms))]
        assert sum(had) ** 2 / (len(had) * sum(ms * ms for ms in had)) >= 0.95


def test_by_fair_no_two_jobs_are_more_than_two_cycles_apart() -> None:
    server = Server("fair")
    names = ("a", "b", "c", "d")
    for name in names:
        server.start(name, 30.0)
    for _ in range(20):
        server.run(server.now_ms + 1700.0)
        had = [server.trained_ms(name) for name in names]
        assert max(had) - min(had) <= 2 * CYCLE_MS


@given(
    shapes=st.lists(st.tuples(st.floats(5.0, 300.0), st.floats(0.0, 300.0)), min_size=2, max_size=3)
)
def test_by_coshift_the_device_idles_only_where_no_job_could_have_it(
    shapes: list[tuple[float, float]],
) -> None:
    """Run jobs of 20 steps. While one job fetches a batch, another job must compute, except during
    fetches of less than 3 ms, which are not worth two switches."""
    server = Server("coshift")
    for index, (step_ms, loader_ms) in enumerate(shapes):
        server.start(f"j{index}", 0.02 * step_ms, step_ms=step_ms, loader_ms=loader_ms)
    server.run()
    busy_ms = sum(20 * step_ms for step_ms, _ in shapes)
    fetched_ms = max(20 * loader_ms for _, loader_ms in shapes)
    makespan_ms = max(server.ends_ms.values())
    assert busy_ms - 1.0 <= makespan_ms <= busy_ms + fetched_ms + 20 * 3.0 * len(shapes)


def test_by_coshift_a_loader_as_long_as_the_step_costs_the_device_nothing() -> None:
    """One job computes for 5 s and fetches for 5 s. Two jobs take 10 s, too, or 18 s in turns."""
    ends = {}
    for order in ("rotate", "coshift"):
        server = Server(order)
        for name in ("a", "b"):
            server.start(name, 5.0, loader_ms=STEP_MS)
        server.run(server.now_ms + 5000.0)
        rows = [server.scheduler.machine.jobs.row(job) for job in server.scheduler.machine.jobs]
        shifts = [row.get("beside", {}).get("shift_ms") for row in rows]
        assert shifts == ([STEP_MS, STEP_MS] if order == "coshift" else [None, None])
        server.run()
        ends[order] = sorted(server.ends_ms.values())
    assert ends["rotate"] == pytest.approx([17900.0, 18400.0])
    assert ends["coshift"] == pytest.approx([10000.0, 10100.0])


@pytest.mark.parametrize("order", JOB_ORDERS)
def test_a_priority_goes_before_any_order_and_all_end(order: str) -> None:
    server = Server(order)
    server.start("low", 2.0, priority=2)
    server.start("high", 9.0, mib=8, priority=0)
    server.run(server.now_ms + 60000.0)
    assert server.ends_ms["high"] < server.ends_ms["low"] == pytest.approx(11000.0)


def test_a_group_is_told_how_many_of_its_jobs_are_not_over() -> None:
    counts: list[tuple[str, int]] = []

    class Told(Server):
        def perform(self, commands: list[ev.Command]) -> None:
            super().perform(commands)
            counted = [one for one in commands if isinstance(one, ev.CountSharers)]
            counts.extend((one.group, one.jobs) for one in counted)

    server = Told("rotate")
    training = Training(steps=5, step_ms=STEP_MS, slice_bytes=2 * MIB, state_bytes=MIB)
    for name, share in (("a", "g"), ("b", "g"), ("c", "")):
        server.scene.scripts[JobName(name)] = training
        server.handle(
            ev.TrainRequest(
                token=server.clients.token(),
                spec=ev.JobSpec(name=JobName(name), entry="", args=(), priority=1, share=share),
            )
        )
    server.run()
    assert counts == [("/g", 1), ("/g", 2), ("/g", 1), ("/g", 0)]
