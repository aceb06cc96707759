"""Models larger than the arena: where their groups are copied to, their runs, and reports."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import OutOfDeviceMemory, RemoteProtocolError
from pipeswitch.devices.order_checks import check_order
from pipeswitch.extras.lab.costs import Costs, Link, Training
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.ipc.messages.base import JobName, ModelName
from pipeswitch.ipc.messages.builder import BuildDone
from pipeswitch.ipc.messages.daemon import CancelTransmit, TransmitModel
from pipeswitch.ipc.messages.run import Run, SamplingParams
from pipeswitch.ipc.messages.worker import InferenceFailed, RunInference, Yielded
from pipeswitch.planning.planned_groups import PlannedFile
from pipeswitch.planning.streaming import StagingLayout, land, least_window
from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.graphs.graph import last_readers
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.scheduler.memory import plans
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings
from pipeswitch.scheduler.state.states import Residency
from tests.extras.lab.unit.test_simulator import Answered
from tests.unit.fleet_model import manifest_of, planned_of, profile_of
from tests.unit.test_scheduler_rules import Rig, received

MIB = 1 << 20
UNIT = 2
LARGE, SMALL, JOB = ModelName("large"), ModelName("small"), JobName("j")


# -- where groups land ------------------------------------------------------------------------


def overlap(layout: StagingLayout, sizes: list[int], one: int, other: int) -> bool:
    starts = layout.offsets[one], layout.offsets[other]
    return starts[0] < starts[1] + sizes[other] and starts[1] < starts[0] + sizes[one]


def check(layout: StagingLayout, sizes: list[int], until: list[int], window: int) -> None:
    padded = [-(-size // UNIT) * UNIT for size in sizes]
    for index, size in enumerate(padded):
        assert layout.offsets[index] % UNIT == 0
        assert 0 <= layout.offsets[index] <= window - size
        assert layout.waits[index] <= max(0, index - 1), "it is copied while another computes"
        for before in range(index):
            if padded[before] and size and overlap(layout, padded, before, index):
                assert not {before, index} & layout.resident, "what stays is overwritten"
                # Copies are made in order, so a copy also waits for what earlier copies wait for.
                waited = max(layout.waits[: index + 1])
                assert until[before] < waited, "what is read is overwritten"
    assert sum(padded[index] for index in layout.resident) == layout.resident_bytes


def test_no_landing_is_used_before_what_lay_there_has_been_read() -> None:
    rng = random.Random(1)
    for _ in range(400):
        count = rng.randint(1, 9)
        sizes = [rng.randint(0, 9) for _ in range(count)]
        until = [rng.choice([i, i, i, min(count - 1, i + 1), count - 1]) for i in range(count)]
        least = least_window(sizes, until, 200, UNIT)
        assert land(sizes, until, least - UNIT, UNIT) is None or not least
        for more in (0, UNIT, 4 * UNIT, 20 * UNIT):
            layout = land(sizes, until, least + more, UNIT)
            assert layout is not None
            check(layout, sizes, until, least + more)


@pytest.mark.parametrize("sizes", [*product((1, 2, 3), repeat=4)])
def test_the_least_ring_is_hardly_larger_than_the_best_there_is(sizes: tuple[int, ...]) -> None:
    """Find the smallest possible ring of memory by trying each place for each group."""

    def fits(ring: int) -> bool:
        places = [range(ring - size + 1) for size in sizes]
        return any(
            not any(
                a < b + y and b < a + x
                for (a, x), (b, y) in pairwise(zip(starts, sizes, strict=True))
            )
            for starts in product(*places)
        )

    best = next(ring for ring in range(20) if fits(ring))
    least = least_window(list(sizes), range(4), 20, 1)
    assert best <= least <= best + max(sizes)
    if len(set(sizes)) == 1:
        assert least == best


def test_the_first_group_stays_and_the_others_that_do_lie_apart() -> None:
    layout = land([4] * 24, range(24), 4 * 12, 4)
    assert layout is not None
    assert 0 in layout.resident
    assert len(layout.resident) == 12 - 3, "two landings and a third"
    streams = [index for index in range(24) if index not in layout.resident]
    assert max(b - a for a, b in pairwise(sorted(layout.resident))) <= 4
    assert len(streams) == 15


def test_what_is_read_again_at_the_end_stays() -> None:
    until = [11, *range(1, 12)]  # the first group is also used at the end
    layout = land([6] + [4] * 11, until, 20, 2)
    assert layout is not None
    assert layout.resident == {0}
    assert land([6] + [4] * 11, until, 12, 2) is None


# -- which weights are read again ---------------------------------------------------------------


def test_a_weight_is_read_by_what_may_alias_it_and_an_output_may_be_one() -> None:
    value = ValueSpec(name="x", dtype="float32", shape=(2, 2))
    graph = Graph(
        version=1,
        inputs=(value,),
        weights=("table", "plain", "viewed", "returned"),
        nodes=(
            Node("aten.mm.default", ({"v": 0}, {"v": 1})),  # value 5, from the table
            Node("aten.t.default", ({"v": 3},)),  # value 6, a view
            Node("aten.mm.default", ({"v": 5}, {"v": 2})),
            Node("aten.mm.default", ({"v": 7}, {"v": 6})),  # reads the third weight by its view
            Node("aten.mm.default", ({"v": 8}, {"v": 1})),  # reads the table again
        ),
        results=(9, 4),
        outputs=(value, value),
    )
    assert last_readers(graph) == [4, 2, 3, 5]


# -- on the virtual clock --------------------------------------------------------------------


class Streaming(Answered):
    """Server with 32 MiB for models, a model of 96 MiB in groups of 4 MiB, and a small model."""

    def __init__(self, ratio: float, layer_ms: float = 4.0) -> None:
        settings = SchedulerSettings(arena_bytes=34 * MIB, store_bytes=256 * MIB, fence_count=64)
        link = Link(bytes_per_ms=4 * MIB / (ratio * layer_ms), fixed_ms=0.0)
        super().__init__(Scheduler(settings), Costs(to_device=link))
        self.clients.register(
            LARGE, program_of("d", 96 * MIB, groups=24, layers_per_group=1, layer_ms=layer_ms)
        )
        self.clients.register(SMALL, program_of("s", 4 * MIB, groups=2, layer_ms=1.0))
        self.run()

    def ask(self, model: ModelName = LARGE) -> tuple[float, Any]:
        """Send a request; return its time in ms, and the timing in its answer."""
        began_ms, token = self.now_ms, self.clients.infer(model)
        self.run(self.now_ms + 1e4)
        at_ms, answer = self.answers[token]
        assert answer.error is None
        return at_ms - began_ms, answer.timing


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_pass_of_three_times_the_arena_is_hardly_longer_than_link_or_compute(
    ratio: float,
) -> None:
    world = Streaming(ratio)
    world.ask()
    for _ in range(3):
        took_ms, timing = world.ask()
        assert (timing.resident_bytes + timing.streamed, timing.resident) == (96 * MIB, False)
        link_ms = timing.streamed / world.scene.costs.to_device.bytes_per_ms
        assert max(link_ms, 96.0) <= took_ms <= 1.15 * max(link_ms, 96.0)


def test_a_small_model_and_a_job_stay_beside_one_that_streams() -> None:
    world = Streaming(1.0)
    plan = Training(steps=400, step_ms=5.0, slice_bytes=4 * MIB, state_bytes=MIB)
    world.ask()
    world.clients.train(JOB, plan)
    for _ in range(3):
        tokens = [world.clients.infer(SMALL), world.clients.infer(LARGE)]
        world.run(world.now_ms + 300.0)
        assert all(world.answers[token][1].error is None for token in tokens)
    assert world.answers[tokens[0]][1].timing.resident
    job = world.scheduler.machine.devices[0].state.jobs[JOB]
    assert (job.progress.evictions, job.progress.steps_recomputed) == (0, 0)


def test_a_pass_of_a_language_model_is_one_step_and_lets_in_whom_the_policy_does() -> None:
    world = Streaming(1.0)
    world.ask()
    request = next(one for _, _, one in world.story if isinstance(one, ev.InferArrived))
    tokens = [world.clients.token() for _ in range(2)]
    for token in tokens:
        run = Run(request_id=f"r{token}", sampling_params=SamplingParams(steps=8))
        world.handle(msgspec.structs.replace(request, token=token, run=run))
        world.run(world.now_ms + 10.0)
    assert not world.scene.device.stop_words  # nothing stops the second request's own pass
    world.run(world.now_ms + 1e4)
    assert all(world.answers[token][1].error is None for token in tokens)


# -- with hand-made events ----------------------------------------------------------------------


@pytest.fixture
def rig() -> Rig:
    return Rig()


def registered(rig: Rig, *, mib: int = 186, groups: int = 31, **fields: Any) -> ev.Token:
    """Register a model of three times the arena, in groups of 6 MiB; return its token."""
    token, op_id = rig.begin("large", **fields)
    manifest = manifest_of("digest large", mib * MIB, groups)
    done = BuildDone(model="large", op_id=op_id, digest=manifest.digest)
    rig.handle(received(done, manifest=manifest))
    if rig.answers.get(token) is None:
        rig.stored("large", op_id)
        rig.prepared()
    return token


def test_registering_says_what_it_will_cost(rig: Rig) -> None:
    body = rig.answers[registered(rig)].body
    streams = body["streams"]
    assert streams["window_bytes"] == 62 * MIB
    assert streams["sent_bytes"] < 186 * MIB - 30 * MIB
    assert body["notes"] == [streams["text"]]
    assert streams["text"].startswith("streams: ")


def test_before_its_first_pass_only_the_copy_is_predicted_and_is_called_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_link_bytes_per_ms", lambda _: float(MIB))
    streams = rig.answers[registered(rig)].body["streams"]
    copy_ms = streams["sent_bytes"] / MIB
    assert streams["text"].endswith(f"of which the copy alone takes {copy_ms:.0f} ms")


def test_each_request_is_a_pass_of_its_own_and_what_stays_is_not_sent_again(rig: Rig) -> None:
    registered(rig)
    rig.infer("large")
    (first,), (run,) = rig.sent(TransmitModel), rig.sent(RunInference)
    assert all(group.copied_bytes for group in first.groups)
    assert [group.arena_offset_bytes - first.arena_offset_bytes for group in first.groups] == [
        *run.staging
    ]
    rig.infer("large")
    assert not rig.sent(RunInference), "the ring is the other's"
    rig.arrived("large")
    rig.done()
    (second,) = rig.sent(TransmitModel)
    sent_indices = [index for index, group in enumerate(second.groups) if group.parts == ()]
    assert {*sent_indices} == rig.state.replicas["large"].staging.resident
    rig.arrived("large")
    rig.done()
    assert rig.residency("large") is Residency.PARTIAL


def test_a_request_that_fails_in_the_middle_stops_its_copy_and_the_next_one_is_served(
    rig: Rig,
) -> None:
    registered(rig)
    rig.infer("large")
    other = rig.infer("large")
    task = rig.state.owner.running
    rig.worker(task.slot, InferenceFailed(op_id=task.op_id, error="TaskFailed", message="no"))
    assert [one.op_id for one in rig.sent(CancelTransmit)] == [task.residency_id]
    assert not rig.sent(TransmitModel), "the range is the copy's until that has ended"
    rig.arrived("large", is_complete=False)
    assert len(rig.sent(TransmitModel)) == 1
    rig.arrived("large")
    rig.done()
    assert rig.error(other) is None


def test_its_worker_dies_and_it_is_served_again(rig: Rig) -> None:
    registered(rig)
    token = rig.infer("large")
    rig.worker_exits(rig.state.owner.running.slot)
    assert rig.sent(CancelTransmit)
    rig.arrived("large", is_complete=False)
    assert rig.sent(TransmitModel)
    rig.arrived("large")
    rig.done()
    assert rig.error(token) is None


def test_a_copy_whose_end_is_told_after_the_answer_leaves_what_stays(rig: Rig) -> None:
    registered(rig)
    rig.infer("large")
    rig.infer("large")
    rig.done()
    assert not rig.sent(TransmitModel), "the daemon may still write"
    rig.arrived("large")
    assert rig.sent(TransmitModel)[0].groups[0].copied_bytes == 0
    rig.arrived("large")
    rig.done()


def test_planned_groups_of_another_server_leave_its_groups(rig: Rig) -> None:
    _, op_id = rig.begin("large")
    manifest = manifest_of("digest large", 186 * MIB, 31)
    groups = planned_of(profile_of("large", manifest, layer_ms=50.0))
    done = BuildDone(model="large", op_id=op_id, digest=manifest.digest)
    rig.handle(received(done, manifest=manifest, planned=(PlannedFile("large.json", groups),)))
    rig.stored("large", op_id)
    answer = rig.answers[rig.ask(ev.Query, what="plan")].body
    assert answer["models"][0]["profile"] == groups.measurements
    assert len(answer["models"][0]["staging"]["waits"]) == 31
    assert len(rig.state.replicas["large"].manifest.groups) == 31


def test_it_is_neither_hinted_nor_sent_ahead(rig: Rig) -> None:
    registered(rig)
    rig.handle(ev.PrefetchHint(model="large"))
    assert not rig.sent(TransmitModel)


def test_it_cannot_be_pinned(rig: Rig) -> None:
    registered(rig)
    error = rig.error(rig.ask(ev.PinRequest, model="large", pin=True))
    assert isinstance(error, OutOfDeviceMemory)
    other = Rig()
    assert isinstance(other.error(registered(other, pin=True)), OutOfDeviceMemory)


def test_a_group_that_is_too_large_is_refused_with_the_number(rig: Rig) -> None:
    error = rig.error(registered(rig, mib=160, groups=4))
    assert isinstance(error, OutOfDeviceMemory)
    assert "the largest has 40.0 MiB" in error.message
    assert error.requested_bytes == 160 * MIB


def test_a_job_takes_what_it_keeps_and_it_streams_through_the_rest(rig: Rig) -> None:
    registered(rig)
    rig.infer("large")
    rig.arrived("large")
    rig.done()
    job = rig.start_training(mib=20)
    rig.infer("large")
    (sent,) = rig.sent(TransmitModel)
    assert sent.region_bytes == 42 * MIB
    rig.park(job, rig.state.owner.pending.turn)
    rig.arrived("large")
    rig.done()
    assert (job.progress.evictions, job.memory.lease_bytes) == (0, 20 * MIB)


# -- a pass that yields to other tasks ------------------------------------------------------------


def beside(rig: Rig) -> Any:
    """Make a small model resident, and start a run of the large model; return the run's task."""
    registered(rig)
    rig.register("small")
    rig.make_resident("small")
    rig.infer("large")
    return rig.state.owner.running


def steps_aside(rig: Rig, passing: Any) -> None:
    rig.worker(passing.slot, Yielded(op_id=passing.op_id))


def turns(rig: Rig) -> list[int]:
    return [command.turn for command in rig.commands(ev.RaiseTurn)]


def asked(rig: Rig) -> list[tuple[int, int]]:
    return [(command.target.slot, command.op_id) for command in rig.commands(ev.Interrupt)]


def test_a_pass_steps_aside_for_a_small_one_and_goes_on_before_the_next(rig: Rig) -> None:
    passing = beside(rig)
    rig.infer("small")
    assert asked(rig) == [(passing.slot, passing.op_id)]
    first = rig.state.owner.pending
    steps_aside(rig, passing)
    assert (rig.state.owner.running, turns(rig)) == (first, [first.turn])
    rig.infer("small")
    assert not asked(rig)
    rig.done()
    assert (rig.state.owner.running, turns(rig)) == (passing, [passing.turn])
    assert asked(rig) == [(passing.slot, passing.op_id)], "if only for a group"
    steps_aside(rig, passing)
    rig.done()
    assert rig.state.owner.running is passing
    rig.arrived("large")
    rig.done()
    assert rig.residency("large") is Residency.PARTIAL


def test_it_steps_aside_for_nobody_who_needs_a_copy_or_comes_after_it(rig: Rig) -> None:
    beside(rig)
    rig.infer("small", priority=2)
    assert not asked(rig), "a lower class never runs in front of a higher one"
    other = Rig()
    beside(other)
    other.infer("large")
    assert not asked(other)


def test_it_is_not_aside_for_ever(rig: Rig) -> None:
    passing = beside(rig)
    rig.infer("small")
    steps_aside(rig, passing)
    rig.now_ms += rig.core.judge.max_wait_ms
    rig.infer("small")
    rig.done()
    assert (rig.state.owner.running, asked(rig)) == (passing, [])


def test_who_was_let_in_is_gone_and_the_pass_goes_on(rig: Rig) -> None:
    passing = beside(rig)
    rig.infer("small")
    rig.worker_exits(rig.state.owner.pending.slot)
    steps_aside(rig, passing)
    assert rig.state.owner.running is passing or rig.state.owner.yielded is passing
    while rig.state.owner.running is not passing:
        rig.done()
    rig.arrived("large")
    rig.done()


def test_a_pass_that_dies_aside_is_run_again(rig: Rig) -> None:
    passing = beside(rig)
    small = rig.infer("small")
    steps_aside(rig, passing)
    rig.worker_exits(passing.slot)
    assert rig.sent(CancelTransmit)
    rig.done()
    assert rig.error(small) is None
    rig.arrived("large", is_complete=False)
    assert rig.sent(TransmitModel)
    assert rig.state.replicas["large"].model.deaths == 0, "it did not compute"


def test_a_worker_that_was_let_in_and_steps_aside_is_killed(rig: Rig) -> None:
    """Fixed bug: a second yield overwrote the pass that had yielded before, which got no answer."""
    passing = beside(rig)
    small = rig.infer("small")
    steps_aside(rig, passing)
    steps_aside(rig, rig.state.owner.running)
    (kill,) = rig.commands(ev.Kill)
    rig.worker_exits(kill.target.slot)
    assert rig.state.owner.running is passing
    rig.arrived("large")
    rig.done()
    rig.done()
    assert rig.error(small) is None


def test_the_memory_is_lost_while_a_pass_is_aside(rig: Rig) -> None:
    passing = beside(rig)
    rig.infer("small")
    steps_aside(rig, passing)
    rig.daemon_exits()
    assert (rig.state.owner.running, rig.state.owner.yielded) == (None, None)
    assert len(rig.state.queue) == 2


@pytest.mark.parametrize("waits", [(0,), (0, 2)])
def test_a_daemon_refuses_a_group_that_would_wait_for_ever(
    rig: Rig, waits: tuple[int, ...]
) -> None:
    registered(rig)
    rig.infer("large")
    (sent,) = rig.sent(TransmitModel)
    order = msgspec.structs.replace(sent, groups=sent.groups[:2], waits=waits)
    with pytest.raises(RemoteProtocolError):
        check_order(order, arena_bytes=64 * MIB, store_bytes=256 * MIB, fence_count=64)
