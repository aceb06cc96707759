"""Pinned models never block others: what fits the rest of the arena is served and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.extras.lab.costs import Training
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.states import TASK_FINAL, Residency
from tests.unit.fleet_model import MIB, QUIET, Faults, World

# Sizes in MiB. All pinned models and any one slice fit the arena together.
SIZES = (
    {"p0": 1, "p1": 3, "p2": 5, "p3": 9, "j0": 32, "j1": 7, "j2": 18, "j3": 40},
    {"p0": 11, "p1": 3, "p2": 17, "p3": 7, "j0": 20, "j1": 7, "j2": 18, "j3": 13},
)
OTHERS = {"a": 30, "b": 14, "c": 21, "d": 5, "s": 120}  # "s" is larger than the arena, and streams
PINS, JOBS = ("p0", "p1", "p2", "p3"), ("j0", "j1", "j2", "j3")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pinned"), st.sampled_from(PINS)),  # registered as pinned
        st.tuples(st.just("register"), st.sampled_from([*PINS, *OTHERS])),
        st.tuples(st.just("pin"), st.sampled_from(PINS)),
        st.tuples(st.just("unpin"), st.sampled_from(PINS)),
        st.tuples(st.just("infer"), st.sampled_from([*PINS, *OTHERS])),
        st.tuples(st.just("train"), st.sampled_from(JOBS)),
        st.tuples(st.just("unregister"), st.sampled_from([*PINS, *OTHERS])),
        st.tuples(st.just("kill daemon"), st.just("")),
        st.tuples(st.just("kill worker"), st.just("")),
        st.tuples(st.just("acts"), st.sampled_from(["1", "5", "20", "100"])),
    ),
    max_size=40,
)


class Life:
    """Simulated server whose clients pin and train, and whose memory daemon may die."""

    def __init__(self, seed: int = 0, arena_mib: int = 64) -> None:
        faults = Faults(
            **QUIET, persist_error=0.0, prepare_error=0.0, unclean=0.0, skips_commit=0.0
        )
        self.world = World(seed, faults=faults, arena_mib=arena_mib)
        self.sizes = SIZES[seed % len(SIZES)] | OTHERS
        self.machine = self.world.scheduler.machine
        self.device = self.machine.devices[0]

    def do(self, what: str, name: str) -> None:
        """Perform one step: send a client's request, cause a fault, or advance the clock."""
        world, token = self.world, self.world.token
        match what:
            case "pinned" | "register":
                pin, groups = what == "pinned", 12 if name == "s" else 2
                world.register(name, self.sizes[name] * MIB, pin=pin, groups=groups)
            case "pin" | "unpin":
                world.handle(ev.PinRequest(token=token(), model=name, pin=what == "pin"))
            case "infer":
                world.infer(name)
            case "train":
                self.train(name, self.sizes[name])
            case "unregister":
                world.handle(ev.UnregisterRequest(token=token(), model=name))
            case "kill daemon":
                if world.daemon is not None:
                    world.daemon.end(-9)
            case "kill worker":
                for worker in world.workers.values():
                    if worker.runs and worker.script is not None:
                        worker.end(-9)
                        break
            case _:
                for _ in range(int(name)):
                    world.act()

    def train(self, name: str, mib: int, steps: int = 12) -> None:
        size = mib * MIB
        training = Training(steps=steps, step_ms=400.0, slice_bytes=size, state_bytes=MIB)
        self.world.clients.train(name, training)

    def rest(self) -> None:
        """Run until nothing is left to do; raise AssertionError if that takes too long."""
        for _ in range(4000):
            if not self.world.act() and (self.is_quiet or not self.world.to_next_wakeup()):
                return
        raise AssertionError(self.world.describe())

    @property
    def is_quiet(self) -> bool:
        device = self.device.state
        is_over = all(job.state.state.value in ("done", "failed") for job in self.machine.jobs)
        return is_over and device.is_ready and not device.is_busy

    def until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds; raise AssertionError if it never does."""
        for _ in range(4000):
            if condition():
                return
            assert self.world.act() or self.world.to_next_wakeup(), self.world.describe()
        raise AssertionError(self.world.describe())

    def ask(self, name: str) -> str:
        """Send a request and run until its answer; return "ok" or the error's name."""
        before = dict(self.world.counts)
        token = self.world.infer(name)
        self.until(lambda: token not in self.world.open)
        (outcome,) = [k for k, n in self.world.counts.items() if n > before.get(k, 0)]
        return outcome

    def job(self, name: str) -> Any:
        return next(job for job in self.machine.jobs if job.spec.name == name)

    def state(self, job: str) -> str:
        return self.job(job).state.state.value

    def error(self, job: str) -> str:
        return self.job(job).error


@given(seed=st.integers(0, 9), steps=STEPS)
def test_after_any_history_what_fits_beside_the_pinned_models_is_served(
    seed: int, steps: list[tuple[str, str]]
) -> None:
    life = Life(seed)
    for what, name in steps:
        life.do(what, name)
    life.rest()
    assert {job.progress.error for job in life.machine.jobs} <= {""}
    for name in OTHERS:
        life.do("register", name)
    life.rest()
    pinned_names = {name for name, model in life.machine.models.items() if model.want_pinned}
    pinned = {*life.device.state.pinned}
    assert pinned == pinned_names, life.world.describe()
    replicas = life.device.state.replicas
    free = life.device.arena.leasable_bytes // MIB
    free -= sum(-(-life.sizes[name] // 2) * 2 for name in pinned)
    for name in sorted(life.machine.models):
        fits = name in pinned or replicas[name].needs_bytes <= free * MIB
        assert life.ask(name) == ("ok" if fits else "OutOfDeviceMemory"), name
    life.train("last", free)
    life.rest()
    assert life.state("last") == "done", life.error("last")
    assert {*life.device.state.pinned} == pinned_names


def test_a_model_that_is_pinned_in_the_middle_moves_for_a_job_that_comes_back() -> None:
    """The large model evicts the job; the small model, pinned in the middle, must then move."""
    life = Life()
    for name in ("d", "a"):
        life.do("register", name)
    life.rest()
    life.train("job", 32, steps=100)
    life.do("acts", "60")
    assert life.ask("d") == life.ask("a") == "ok"
    before = life.device.state.replicas["d"].preferred_offset_bytes
    life.world.handle(ev.PinRequest(token=life.world.token(), model="d", pin=True))
    life.rest()
    assert life.state("job") == "done", life.error("job")
    assert life.ask("a") == life.ask("d") == "ok"
    assert life.device.state.replicas["d"].residency.state is Residency.PINNED
    life.train("other", 54)
    life.rest()
    assert life.state("other") == "done", life.error("other")
    assert life.device.state.replicas["d"].preferred_offset_bytes > before


def test_a_job_waits_for_memory_that_was_pinned_since_it_trained() -> None:
    life = Life()
    life.train("job", 54, steps=100)
    job = life.job("job")
    life.until(lambda: job.memory.committed_step > 0)
    token = life.world.register("p3", 9 * MIB, pin=True)
    life.until(lambda: token not in life.world.open)
    assert life.ask("p3") == "ok"
    life.until(lambda: "p3" in job.progress.why)
    life.train("small", 20)
    life.until(lambda: life.state("small") == "done")
    assert job.state.state not in TASK_FINAL
    assert "p3" in job.progress.why
    evictions = job.progress.evictions
    life.do("unpin", "p3")
    life.rest()
    assert life.state("job") == "done", job.progress.error
    assert job.progress.evictions == evictions


def test_a_job_that_has_not_trained_and_does_not_fit_beside_pinned_models_fails_at_once() -> None:
    life = Life()
    life.do("pinned", "p3")
    life.rest()
    life.train("job", 54)
    life.rest()
    assert life.state("job") == "failed"


@pytest.mark.parametrize("first", ["p1", "p2"])
def test_a_pinned_model_moves_for_another_one(first: str) -> None:
    """Both models fit the arena, but only if the first model moves."""
    life = Life()
    for name in ("c", first):
        life.do("register", name)
    life.rest()
    assert life.ask("c") == life.ask(first) == "ok"
    life.do("pin", first)
    life.rest()
    life.world.register("wide", 54 * MIB, pin=True)
    life.rest()
    assert {*life.device.state.pinned} == {first, "wide"}


def test_pinned_models_that_do_not_fit_together_do_not_chase_each_other() -> None:
    life = Life()
    for name, mib in (("x", 24), ("y", 30), ("z", 20)):
        life.world.register(name, mib * MIB, pin=True)
    life.rest()
    sent = life.world.scheduler.core.counts["transmissions"]
    for _ in range(50):
        life.world.pass_time(1000.0)
        life.rest()
    assert life.world.scheduler.core.counts["transmissions"] == sent
    assert len(life.device.state.pinned) == 2
