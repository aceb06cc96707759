"""Suspended, evicted or killed training ends bit-equal to the undisturbed plain run (I2)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import runpy
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipeswitch import job
from pipeswitch.base.errors import TaskPreempted
from pipeswitch.commits.area import CommitArea
from pipeswitch.commits.commit_files import load_commit, read_record, write_commit
from pipeswitch.commits.image import parse_image
from pipeswitch.devices.cpu.worker_device import CpuCopies
from pipeswitch.ipc.gate import Gate
from pipeswitch.workers.training import persistent_loaders
from pipeswitch.workers.training.session import TrainingSession
from pipeswitch.workers.training.snapshot import Captured, DataPosition, captured

Body = Callable[[], None]
SAMPLES, BATCH = 40, 8
pytestmark = pytest.mark.filterwarnings("ignore:job.steps. evaluated. the script")  # it is lost


# ------------------------------------------------------------------------------- a host


class FakeHost:
    """Stand-in for a worker: a thread copies commits to two buffers in this process."""

    __module__ = "pipeswitch.tests"  # so that no script's variable of this class is watched
    device = "cpu"

    def __init__(self) -> None:
        self.slots: list[bytes | None] = [None, None]
        self.newest = -1
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.leases = self.charged = self.room_bytes = 0
        self.remembered: list[tuple[int, dict[str, float]]] = []
        self.clock_ms = 0.0
        self._slice = torch.zeros(0, dtype=torch.uint8)
        self._copy: threading.Thread | None = None

    def lease(self, slice_bytes: int, state_bytes: int, *, is_same: bool = False) -> torch.Tensor:
        assert slice_bytes > 0
        self.room_bytes = max(self.room_bytes, state_bytes)
        if is_same:
            return self._slice
        self._slice.fill_(255)  # a tensor that is still in the old slice reads NaN
        self._slice = torch.zeros(slice_bytes, dtype=torch.uint8)
        self.leases += 1
        return self._slice

    def begin_commit(
        self, step: int, ranges: Sequence[tuple[int, int]], kept: tuple[int, int] | None = None
    ) -> None:
        assert self._copy is None, "two commits at once"
        memory = self._slice.numpy()
        start, more = kept or (0, 0)
        last = (self.restore() or b"")[start : start + more]
        assert len(last) == more
        assert ranges[0][1] + more <= self.room_bytes

        def copy() -> None:
            image = b"".join(memory[offset : offset + size].tobytes() for offset, size in ranges)
            self.store(image + bytes(last))

        self._copy = threading.Thread(target=copy)
        self._copy.start()

    def store(self, image: bytes) -> None:
        target = (self.newest + 1) % 2
        self.slots[target] = image
        self.newest = target

    def wait_commit(self, *, only_read: bool = False) -> float:
        self._copy.join()
        self._copy = None
        return 0.0

    def restore(self) -> memoryview | None:
        image = self.slots[self.newest] if self.newest >= 0 else None
        return None if image is None else memoryview(image)

    def report(self, kind: str, /, **values: Any) -> None:
        self.events.append((kind, values))

    def host_copies(self) -> CpuCopies:
        return CpuCopies(1e8)

    def charge_host(self, size_bytes: int) -> None:
        self.charged = size_bytes

    is_publishing = False
    ring = tiles = None

    def await_copy(self) -> None:
        pass

    def publish(
        self, model: str, step: int, tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        self.events.append(("publish", {"model": model, "step": step, "tensors": tensors}))

    def reached(self, step: int) -> None:
        pass

    def remember(self, step: int, values: Mapping[str, float]) -> None:
        self.remembered.append((step, dict(values)))

    def flush(self) -> None:
        pass

    def now_ms(self) -> float:
        self.clock_ms += 1.0
        return self.clock_ms

    def crash(self) -> None:
        """Simulate the worker's death; keep the commits."""
        if self._copy is not None:
            self._copy.join()
            self._copy = None
        self._slice.fill_(255)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


# ------------------------------------------------------------------------------- the scripts


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Dataset that augments with three random generators, in the loader."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = self.x[index] + 0.1 * torch.randn(3, 6, 6)
        x = x * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.01))
        return x, index % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 8),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.body(x)))
        return out


Trace = dict[int, str]


class Outside:
    """A call whose state is not the script's own."""

    __module__ = "pipeswitch.tests"

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class Result:
    """Digests of a run: ``trace`` of the loss by step, ``final`` of the final state."""

    __module__ = "pipeswitch.tests"

    def __init__(self) -> None:
        self.trace: Trace = {}
        self.final = ""


def digest(*parts: Any) -> str:
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(str((value.dtype, tuple(value.shape))).encode())
            total.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in value:
                total.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    for part in parts:
        add(part)
    return total.hexdigest()


def script(
    result: Result,
    *,
    optimizer: str = "adam",
    accumulate: int = 1,
    zero_at_start: bool = False,
    keep_zeros: bool = False,
    own_generator: bool = False,
    two: bool = False,
    phases: bool = False,
    epochs: int = 3,
    stop_early: bool = False,
    shrink: bool = False,
    shared: bool = False,
    closure: bool = False,
    workers: int = 0,
    keeps: bool = True,
    validates: str = "",
    limit: Mapping[str, str] = MappingProxyType({}),
    poke: Body = lambda: None,
) -> None:
    """Run an ordinary training script; ``poke`` is called in the body of each step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net().to(job.device)
    generator = torch.Generator().manual_seed(7) if own_generator else None
    processes: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0 < keeps}
    loader: Any = DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, generator=generator, **processes
    )
    validation = DataLoader(Noisy(), batch_size=2 * BATCH, **processes)
    if shared:
        loader = job.shared(loader)
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adam": lambda p: torch.optim.Adam(p, 0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, 0.05),
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
        "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=4),
    }
    if two:
        opts = [make[optimizer](model.body.parameters()), make["momentum"](model.head.parameters())]
    else:
        opts = [make[optimizer](model.parameters())]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opts[0], T_max=epochs)
    criterion = nn.CrossEntropyLoss()
    evaluated: list[str] = []

    def clear() -> None:
        for opt in opts:
            opt.zero_grad(set_to_none=not keep_zeros)

    def validate(*, limit: int = SAMPLES) -> None:
        with torch.no_grad():
            for index, (x, _) in enumerate(validation):
                evaluated.append(digest(x))
                if index == limit:
                    break

    def again(x: torch.Tensor, y: torch.Tensor) -> Any:
        clear()
        loss = criterion(model(x), y)
        poke()
        loss.backward()
        return loss

    def train(steps: Iterator[Any], epoch: int) -> None:
        for x, y in steps:
            if zero_at_start and job.step % accumulate == 0:
                clear()
            if shrink:  # writes parameters before the forward pass, without an optimizer
                with torch.no_grad():
                    model.head.weight.mul_(0.9)
            poke()
            if closure:
                loss = opts[0].step(partial(again, x, y))
            else:
                loss = criterion(model(x), y) / accumulate
                loss.backward()
            result.trace[job.step] = digest(loss)
            job.log(loss=loss)
            if (job.step + 1) % accumulate == 0 and not closure:
                for opt in opts:
                    opt.step(partial(again, x, y) if optimizer == "lbfgs" else None)
                    poke()
                if not zero_at_start:
                    clear()
            if validates == "in the loop" and job.step % 3 == 1:
                validate()
            poke()
            if stop_early and job.step == 2 * (epoch + 1):
                break

    def all_steps() -> Iterator[Any]:
        return job.steps(loader, model=model, optimizer=opts, scheduler=schedule, **limit)

    if phases:
        train(all_steps(), 0)
        teacher = [p.detach().clone() for p in model.parameters()]
        evaluated.append(digest(teacher, torch.rand(1)))
        with torch.no_grad():
            model.head.weight.mul_(torch.rand(()) + 0.5)
    for epoch in job.epochs(epochs):
        model.train()
        train(all_steps(), epoch)
        model.eval()
        with torch.no_grad():
            evaluated.append(digest(model(torch.randn(2, 3, 6, 6))))
        if validates == "after the loop":
            validate(limit=1)
        schedule.step()
    if phases:
        evaluated.append(digest(torch.rand(1), model.state_dict()))
        train(all_steps(), 0)
    poke()
    result.final = digest(
        model.state_dict(),
        [o.state_dict() for o in opts],
        schedule.state_dict(),
        [p.grad for p in model.parameters()],
        torch.rand(3),
        random.random(),
        np.random.rand(),
        evaluated[-1],
        evaluated[:1] if phases else 0,
        job.step,
        [] if generator is None else generator.get_state(),
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own generator": {"own_generator": True},
    "accumulation": {"accumulate": 2, "own_generator": True},
    "accumulation, zeroed at the start": {"accumulate": 2, "zero_at_start": True},
    "zeroed at the start": {"zero_at_start": True},
    "zeroed in place at the start": {"zero_at_start": True, "keep_zeros": True},
    "two optimizers": {"two": True},
    "two optimizers, three steps each": {"two": True, "accumulate": 3, "zero_at_start": True},
    **{name: {"optimizer": name} for name in ("adamw", "sgd", "momentum", "rmsprop", "adagrad")},
    "lbfgs": {"optimizer": "lbfgs"},
    "closure": {"closure": True},
    "phases": {"phases": True, "epochs": 2},
    "phases, own generator": {"phases": True, "epochs": 2, "own_generator": True},
    "left early": {"stop_early": True},
    "phases, left early": {"phases": True, "stop_early": True},
    "shared input, left early": {"shared": True, "stop_early": True},
    "parameters written in the body": {"shrink": True},
    "worker processes": {"workers": 2, "keeps": False},
    "persistent workers": {"workers": 2},
    "persistent workers, own generator, left early": {
        "workers": 2,
        "own_generator": True,
        "stop_early": True,
    },
    "persistent workers of two loaders": {"workers": 1, "validates": "after the loop"},
    "persistent workers, validation in the loop": {"workers": 2, "validates": "in the loop"},
    "persistent workers, phases": {"workers": 2, "phases": True, "epochs": 2},
    "activations under a budget": {"limit": {"activation_memory": "18KiB"}},
    "activations all sent away": {"limit": {"offload": "all"}, "accumulate": 2, "epochs": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    job._install(None)


def begun(host: FakeHost, gate: Gate | None = None, **options: Any) -> TrainingSession:
    """Begin a session that ``job`` uses; with the default gate nothing stops it."""
    if gate is None:
        gate = Gate(lambda *_: None)
        gate.grant(1)
    session = TrainingSession(host, gate, **options)
    job._install(session)
    session.begin()
    return session


def undisturbed(**variant: Any) -> Result:
    job._install(None)
    job._session.step = 0  # type: ignore[misc]
    result = Result()
    script(result, **variant)
    return result


class Crashed(BaseException):
    """Exception that simulates kill -9: no code of the session runs any more."""


def attempt(
    host: FakeHost, result: Result, disturb: Callable[[Gate], None], **variant: Any
) -> bool:
    """Run one life of a worker process; return true if the script reached its end."""
    random.seed()  # another process has other random states
    np.random.seed(random.randrange(1 << 30))
    torch.manual_seed(random.randrange(1 << 30))
    gate = Gate(lambda *_: None)
    gate.grant(1)
    session = begun(host, gate, commit_every_ms=variant.pop("every_ms", 9.0))
    try:
        script(result, poke=Outside(lambda: disturb(gate)), **variant)
    except (TaskPreempted, Crashed) as end:
        if isinstance(end, Crashed):
            session.place.is_over = True  # no more commits; ``close`` removes the hooks
            host.crash()
        session.close()
        for loader in persistent_loaders._numbers:  # ends their processes before garbage collection
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()
        host.charged = 0  # as the server does when it reaps the process
        return False
    session.finish()
    assert host.charged == 0, "the loop is over"
    return True


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_evicted_and_crashed_at_random_it_ends_bit_equal(variant: dict[str, Any]) -> None:
    variant = {"epochs": 4, **variant}
    expected = undisturbed(**variant)
    host, result, dice = FakeHost(), Result(), random.Random(5)

    def disturb(gate: Gate) -> None:
        if dice.random() < 0.10:
            gate.request_evict()
        elif dice.random() < 0.05:
            raise Crashed

    lives = 1
    while not attempt(host, result, disturb, **variant):
        lives += 1
        assert lives < 400, "no progress"
    assert lives > 5  # all variants together have about 150 interruptions
    differ = [step for step in expected.trace if expected.trace[step] != result.trace.get(step)]
    assert not differ
    assert result.final == expected.final


class HookedGate(Gate):
    """Gate that evicts at check number ``countdown`` in the layers' forward and backward hooks."""

    countdown = -1
    unwound_in = ""

    def answer(self, where: Any) -> None:
        if self.countdown >= 0 and where in ("forward", "backward"):
            if self.countdown == 0:
                self.request_evict()
            self.countdown -= 1
            self.is_pending = True
        try:
            super().answer(where)
        except TaskPreempted:
            self.unwound_in = self.unwound_in or where
            raise
        if self.countdown >= 0:
            self.is_pending = True


@pytest.mark.parametrize("name", ["plain", "accumulation", "zeroed at the start", "closure"])
def test_evicted_in_the_middle_of_forward_and_backward_it_ends_bit_equal(name: str) -> None:
    variant = VARIANTS[name]
    expected = undisturbed(**variant)
    host, result, dice = FakeHost(), Result(), random.Random(11)
    lives = 0
    ended = False
    while not ended:
        lives += 1
        gate = HookedGate(lambda *_: None)
        gate.grant(1)
        gate.countdown = dice.randrange(1, 25)
        session = begun(host, gate, commit_every_ms=9.0)  # so that epochs' beginnings are kept
        try:
            script(result, **variant)
            session.finish()
            ended = True
        except TaskPreempted:
            session.close()
            if name != "accumulation":  # accumulation first completes the update
                assert gate.unwound_in in ("forward", "backward"), "at once, in a closure too"
        assert lives < 200
    assert lives > 5
    assert result.trace == expected.trace
    assert result.final == expected.final


class Saved:
    """A tensor that forward saves for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        LIVING.add(self)


LIVING: weakref.WeakSet[Saved] = weakref.WeakSet()


@pytest.mark.parametrize("at_boundary", [False, True], ids=["for a request", "for another job"])
def test_suspended_in_place_at_random_nothing_is_lost(at_boundary: bool) -> None:
    """Suspend at random: for a request anywhere, for another job only while no tensor is saved."""
    expected = undisturbed(epochs=20)
    host, result, dice = FakeHost(), Result(), random.Random(3)
    parked = threading.Semaphore(0)
    places: list[str] = []
    counts, calls = [], list[int]()

    def on_parked(turn: int, next_turn: int, where: str) -> None:
        places.append(where)
        counts.append(len(LIVING))
        parked.release()

    gate = Gate(on_parked)
    gate.after_boundary = lambda: calls.append(gate.turn)
    over = threading.Event()

    def terminator() -> None:
        turn = 1
        gate.grant(turn)
        while not over.is_set():
            gate.request_stop(turn, turn + 1, at_boundary=at_boundary)
            while not parked.acquire(timeout=0.05):
                if over.is_set():
                    return
            turn += 2
            gate.grant(turn)
            over.wait(dice.uniform(0, 0.003))  # a random moment of the script

    session = begun(host, gate, commit_every_ms=3.0)
    thread = threading.Thread(target=terminator)
    thread.start()
    try:
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            script(result, epochs=20)
        session.finish()
    finally:
        over.set()
        thread.join()
    assert len(places) > 40
    if at_boundary:
        assert set(places) <= {"boundary", "loader"}
        assert not any(counts)
        assert len(calls) > 20
    else:
        assert {"forward", "backward"} & set(places)
        assert any(counts)
        assert not calls
    assert len(calls) <= len(places)
    assert result.trace == expected.trace
    assert result.final == expected.final
    assert "committed" in host.kinds()


@pytest.mark.parametrize("name", ["plain", "zeroed at the start", "zeroed in place at the start"])
def test_an_eviction_loses_no_finished_step(name: str) -> None:
    host, result = FakeHost(), Result()
    pokes = 0

    def disturb(gate: Gate) -> None:
        nonlocal pokes
        pokes += 1
        if pokes == 3 * 8 + 1:  # three pokes a step, so this is before the ninth forward pass
            gate.request_evict()

    assert not attempt(host, result, disturb, every_ms=1e9, **VARIANTS[name])
    assert host.events[-1] == ("evicting", {"step": 8, "committed_step": 8})


def test_importing_job_does_not_import_torch() -> None:
    code = "import sys; from pipeswitch import job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_swallowed_preemption_is_raised_again() -> None:
    host, result = FakeHost(), Result()
    swallowed = 0

    def disturb(gate: Gate) -> None:
        nonlocal swallowed
        gate.request_evict()
        with contextlib.suppress(TaskPreempted):
            gate.check()
        swallowed += 1

    assert not attempt(host, result, disturb)
    assert swallowed == 1
    assert host.kinds().count("evicting") == 1


def test_the_commit_is_a_self_describing_image_that_survives_the_disk(tmp_path: Path) -> None:
    host, result = FakeHost(), Result()
    assert attempt(host, result, lambda gate: None)
    image = host.restore()
    content, ranges = parse_image(image)
    assert content["meta"]["step"] == 15
    assert content["tensors"]["model.head.weight"]["shape"] == [4, 8]
    write_commit(tmp_path, 15, image)
    record = read_record(tmp_path)
    on_disk = load_file(tmp_path / record.image)  # with safetensors' own reader
    for name, entry in content["tensors"].items():
        offset, size = ranges[name]
        tensor = on_disk[name]
        assert (str(tensor.dtype), list(tensor.shape)) == (
            f"torch.{entry['dtype']}",
            entry["shape"],
        )
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == image[offset:][:size]
    loaded = load_commit(tmp_path)
    area = CommitArea(loaded[0], loaded[1])
    newest = area.newest()
    assert newest is not None
    other = FakeHost()
    other.store(bytes(area.image(newest)))
    area.close()
    os.close(loaded[0])
    assert other.restore() == image
    assert attempt(other, result, lambda gate: None)


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 1.0), (1, True), (0.0, -0.0), (np.float64(1), np.int64(1)), ("a", b"a")],
)
def test_options_that_differ_in_type_or_sign_alone_are_captured_anew(
    before: Any, after: Any
) -> None:
    first = captured({"lr": before}, None)
    second = captured({"lr": after}, first)
    assert second.data == Captured({"lr": after}).data
    assert repr(second.data) != repr(first.data)


def test_options_that_stay_are_captured_once_and_tensors_each_time() -> None:
    first = captured({"lr": 0.1, "betas": (0.9, 0.999)}, None)
    assert captured({"lr": 0.1, "betas": (0.9, 0.999)}, first) is first
    lr = torch.tensor(0.1)
    first = captured({"lr": lr}, None)
    lr.mul_(2)
    assert captured({"lr": lr}, first).read() != first.read()
    array = np.ones(3)
    first = captured({"weights": array}, None)
    assert captured({"weights": array.view(np.int64)}, first).data != first.data


FAULTS = """
import resource
from pipeswitch.workers.training.script import keep_freed_memory
keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = b"x" * (48 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


FREED = """
import os
from pipeswitch.workers.training import script
script.keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
blocks = [b"x" * (48 << 20), b"y" * (1 << 20)]
del blocks[0]
for room in (1 << 40, 0):
    script.available_bytes = lambda: room
    script.give_freed_memory_back()
    print(resident() - before >= 48 << 20)
"""


def test_a_job_that_waits_for_another_one_gives_freed_memory_back_where_it_is_short() -> None:
    command = [sys.executable, "-c", FREED]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert output.split() == ["True", "False"]


def test_a_job_takes_the_page_faults_of_a_block_once() -> None:
    command = [sys.executable, "-c", FAULTS]
    faults = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert faults < 3 * (48 << 20) // 4096, "20 blocks would take 20 times as many"


EARLY = """
import os, signal
from pipeswitch.workers.training import script
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
script._let_children_be_ended()
child = os.fork()
if not child:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGHUP)
print("stays")
"""


def test_a_scripts_process_is_ended_before_it_is_itself() -> None:
    command = [sys.executable, "-c", EARLY]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert output.split() == ["-15", "stays"], "a pool would wait for it for ever"


def test_the_history_of_lbfgs_has_its_room_from_the_start() -> None:
    host = FakeHost()
    session = begun(host, commit_every_ms=1.0)
    model = nn.Linear(100, 200)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=4, history_size=20)
    target = torch.randn(8, 200)
    for x in job.steps([torch.randn(8, 100)] * 12, model=model, optimizer=optimizer):

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value = nn.functional.mse_loss(model(x), target)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
    session.finish()
    assert len(optimizer.state[model.weight]["old_dirs"]) == 20
    assert host.kinds().count("committed") > 6
    assert "commit_failed" not in host.kinds()


def test_a_nan_loss_is_an_event_and_training_goes_on() -> None:
    host = FakeHost()
    session = begun(host)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in job.steps([1, 2], model=model, optimizer=optimizer):
        with pytest.warns(job.NonFiniteLossWarning):
            job.log(loss=float("nan"))
    session.finish()
    assert job.step == 2
    assert host.kinds().count("nan_loss") == 2


def test_reports_name_the_epoch() -> None:
    host = FakeHost()
    session = begun(host)
    script(Result(), epochs=3)
    session.finish()
    epochs = [values["epoch"] for kind, values in host.events if kind == "progress"]
    assert epochs == sorted(epochs)
    assert (epochs[0], epochs[-1]) == (0, 2)


WARNED = """
import torch; from pipeswitch import job; model, best = torch.nn.Linear(1, 1), 1.0
def main():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in job.steps(iter([1]), model=model, optimizer=optimizer, extra_state={"best": best}):
        job.log(loss=float("nan"))
main()
"""


def test_a_warning_names_the_line_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(WARNED)
    session = begun(FakeHost())
    with pytest.warns(UserWarning, match="job") as caught:
        runpy.run_path(str(path))
    session.finish()
    lines = {(one.filename, one.lineno) for one in caught}
    assert lines == {(str(path), 5), (str(path), 6)}


def test_an_iterable_without_state_warns_once() -> None:
    host = FakeHost()
    session = begun(host)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        for _ in job.epochs(2):
            for _ in job.steps(iter([1, 2]), model=model, optimizer=optimizer):
                pass

    with pytest.warns(job.InexactResumeWarning) as caught:
        train()
    session.finish()
    assert len(caught) == 1
    [warning] = [values for kind, values in host.events if kind == "warning"]
    assert "batches" in warning["text"]  # ``jobs`` shows this text as the job's ``why``


def test_another_torch_has_loaders_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_loaders, "_Base", object)
    session = begun(FakeHost())
    loader = DataLoader(range(8), num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    with pytest.warns(job.InexactResumeWarning, match="worker processes"):
        assert DataPosition(loader, {}).warn_if_inexact()
    assert persistent_loaders.capture() == {}
    session.close()


def test_what_a_worker_sends_passes_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        persistent_loaders, "get_worker_info", lambda: SimpleNamespace(id=1, dataset=Drawn())
    )
    loader = DataLoader(range(2), collate_fn=list)  # type: ignore[arg-type]
    worker = persistent_loaders._Worker(loader, {})
    plain = worker.collate([1])
    batch, pinned = torch.utils.data._utils.pin_memory.pin_memory(plain)
    assert (batch, pinned.states) == ([1], plain[1].states)
    persistent_loaders._Worker(loader, {1: pinned.states}).start(1)


def test_a_loader_is_itself_again_after_the_script() -> None:
    before = DataLoader.__init__, DataLoader._get_iterator  # type: ignore[attr-defined]
    begun(FakeHost()).close()
    assert before == (DataLoader.__init__, DataLoader._get_iterator)  # type: ignore[attr-defined]


class Drawn(Dataset[float]):
    """Samples drawn by the dataset's own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index + float(self.rng.random()) + random.random()


class Endless(IterableDataset[float]):
    """A stream of ten samples, of which each of two workers yields five."""

    def __iter__(self) -> Iterator[float]:
        for index in range(10)[torch.utils.data.get_worker_info().id :: 2]:  # type: ignore[union-attr]
            yield index + float(torch.rand(()))


class Batches:
    """A batch sampler that draws random numbers when an iterator is made."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(10).view(5, 2).tolist())

    def __len__(self) -> int:
        return 5


LOADERS: dict[str, Callable[..., DataLoader[float]]] = {
    "a generator of the dataset": partial(DataLoader, Drawn(), batch_size=3, shuffle=True),
    "a stream": partial(DataLoader, Endless(), batch_size=2),
    "without batches": partial(DataLoader, Drawn(), batch_size=None),
    "an eager batch sampler": partial(DataLoader, Drawn(), batch_sampler=Batches()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_new_workers_continue_where_the_old_ones_were(kind: str) -> None:
    def made() -> DataLoader[float]:
        return LOADERS[kind](num_workers=2, persistent_workers=True)

    torch.manual_seed(1)
    plain = made()
    expected = [[torch.as_tensor(one).tolist() for one in plain] for _ in range(4)]
    torch.manual_seed(1)
    persistent_loaders.watch()
    try:
        loader = made()
        seen = [[torch.as_tensor(one).tolist() for one in loader] for _ in range(2)]
        ended, drawn = persistent_loaders.capture(), torch.get_rng_state()
        begun_pass = iter(loader)
        next(begun_pass)
        under_way = persistent_loaders.capture()  # a resumed job repeats this pass
        assert digest(ended) == digest(under_way)
        for workers in (ended, under_way):
            persistent_loaders.watch()
            loader = made()
            list(loader)  # a pass before ``restore`` has no effect
            persistent_loaders.restore(workers)
            torch.set_rng_state(drawn)
            assert (
                seen + [[torch.as_tensor(one).tolist() for one in loader] for _ in range(2)]
                == expected
            )
    finally:
        persistent_loaders.unwatch()
