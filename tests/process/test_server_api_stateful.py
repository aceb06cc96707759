"""Random sequences of all verbs, made by Hypothesis, with kills and restarts of a real server.

Rules send requests; ``api_oracle`` knows the right outcomes. All examples share one server. It is
empty before and after each example. After a failure, the next example gets a new server.

The long form is ``pytest -m soak``. ``PIPESWITCH_STATEFUL_EXAMPLES`` and ``..._STEPS`` set its
size, by default less than half an hour on two busy cores; ``..._SEED`` selects other examples. With
``..._SHRINK=1``, Hypothesis minimises a failing example, with a new server for each attempt.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import itertools
import os
import re
import runpy
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, RemoteProtocolError
from pipeswitch.base.roles import Role
from pipeswitch.client.client import FINAL_JOB_STATES, Client
from pipeswitch.client.connection import Connection
from pipeswitch.frontend.verbs import VERBS
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.spec import DEFAULT_MAX_BATCH
from pipeswitch.testing import RunningServer, server
from tests.process import tools
from tests.process.api_oracle import OK, Oracle, Outcomes, Program, only
from tests.process.figures import publishing

ROOT: Final = Path(__file__).parents[2]
ANSWER_S: Final = 60.0  # a request without an answer after this time fails
ARENA_MIB: Final = 10  # 2 MiB of fences, and room for exactly two wide models
STORE_MIB: Final = 6  # room for two wide models, not for three
ENVIRONMENT: Final = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",
    "PIPESWITCH_SCHEDULER__MAX_WAIT": "600s",  # no waiting time overrides a priority
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}
MAX_KILLS: Final = 8  # per example: a job fails after ten deaths without a commit
MAX_DAEMON_DEATHS: Final = 3  # consecutive deaths; after five without an answer the server ends
DEADLY: Final = 13.0
HELD: Final = 17.0  # an input whose computation waits until the gate is opened
HOLDER: Final = "holder"  # name of the model that gets ``HELD``; other rules use other names
SHORT_DEADLINE_MS: Final = 5.0  # too short for the request to run
RESTART_EVERY: Final = 14  # a restart after this many examples, so once in the short form
NO_ROW: Final = 10  # an index above the embedding's rows

Given = ParamSpec("Given")
Answered = TypeVar("Answered")

FACTORIES = f"""
    import fcntl
    import os
    import torch

    GATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gate")

    class Poison(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            if float(x[0, 0]) == {DEADLY}:
                os._exit(9)
            if float(x[0, 0]) == {HELD}:
                with open(GATE) as gate:
                    fcntl.flock(gate, fcntl.LOCK_SH)
            return self.layer(x)

    def poison():
        torch.manual_seed(4)
        return Poison().eval()

    def made():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).eval()
"""
ENDLESS = """
    import torch
    from pipeswitch import job

    print("endless: begins")
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    data = [torch.randn(64, 16) for _ in range(1000)]
    for epoch in job.epochs(100_000):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
SHORT = """
    import hashlib
    import torch
    from pipeswitch import job

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout()).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = [torch.randn(8, 16) for _ in range(20)]
    for epoch in job.epochs(3):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print("kürzer:", job.step, hashlib.sha256(state).hexdigest())
"""
BROKEN = """
    print("broken: begins")
    raise ValueError("broken on purpose")
"""
SCRIPTS: Final = {"endless": ENDLESS, "short": SHORT, "broken": BROKEN}


# ------------------------------------------------------------------------------- programs


class Picks(torch.nn.Module):
    """Embedding that raises for an index out of range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(NO_ROW, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        picked: torch.Tensor = self.table(rows)
        return picked


WIDE: Final = 768
WIDE_BYTES: Final = 4 * WIDE * (WIDE + 1)
PROGRAMS: Final = {
    program.name: program
    for program in (
        Program(name="small", batch_max=64),
        Program(name="other", batch_max=64),
        Program(name="wide", size_bytes=-(-WIDE_BYTES // 4096) * 4096, batch_max=64),
        Program(name="picks", batch_max=64),
        Program(name="made", is_code=True),
        Program(name="poison", is_code=True, batch_max=1),
        Program(name="huge", size_bytes=16 << 20, refusal="OutOfDeviceMemory"),
        Program(name="garbage", refusal="RegistrationRefused"),
    )
}
SERVED: Final = [program.name for program in PROGRAMS.values() if not program.refusal]
FACTORY_INPUTS: Final[dict[str, Any]] = {
    "made": {"x": ((1, 16), "float32")},
    "poison": {"x": ((1, 4), "float32")},
}
WIDTHS: Final = {"small": 16, "other": 16, "wide": WIDE, "picks": 3, "made": 16, "poison": 4}


def value(program: str, batch: int, seed: int) -> torch.Tensor:
    """Return an input that this program accepts."""
    generator = torch.Generator().manual_seed(seed)
    if program == "picks":
        return torch.randint(0, NO_ROW, (batch, 3), generator=generator)
    return torch.randn(batch, WIDTHS[program], generator=generator)


def misfit(program: str, how: str) -> tuple[Any, dict[str, Any]]:
    """Return inputs and options of a request that no model accepts."""
    x = value(program, 1, 0)
    inputs: dict[str, Any] = {
        "dtype": x.to(torch.int16),
        "rank": x[None],
        "width": torch.cat([x, x], dim=1),
        "rows": x.repeat(1000, 1),
        "no rows": x[:0],
        "no input": {},
        "two inputs": [x, x],
        "name": {"surprise": x},
    }
    options: dict[str, dict[str, Any]] = {
        "priority": {"priority": "urgent"},
        "past": {"deadline_ms": -1.0},
        "never": {"deadline_ms": float("nan")},
    }
    return inputs.get(how, x), options.get(how, {})


MISFITS: Final = (
    "dtype",
    "rank",
    "width",
    "rows",
    "no rows",
    "no input",
    "two inputs",
    "name",
    "priority",
    "past",
    "never",
)


class Material:
    """Data of all examples: bundles, scripts, factories, and outputs of the plain modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, torch.nn.Module] = {
            "small": tools.mlp(16, 2, 1),
            "other": tools.mlp(16, 2, 2),
            "wide": tools.mlp(WIDE, 1, 3),
            "picks": Picks().eval(),
        }
        for name, module in self.modules.items():
            export_module_to_bundle(module, (value(name, 1, 0),), folder / f"{name}.bundle")
        huge = tools.mlp(1800, 1, 0)  # 12.4 MiB
        export_module_to_bundle(huge, (torch.zeros(1, 1800),), folder / "huge.bundle")
        head = b'{"x": {"dtype": "U8", "shape": [990], "data_offsets": [0, 990]}}'  # no program
        size = len(head).to_bytes(8, "little")
        (folder / "garbage.bundle").write_bytes(size + head + b"\xff" * 990)
        factories = runpy.run_path(str(tools.write_script(folder, "stateful_models.py", FACTORIES)))
        self.modules |= {name: factories[name]() for name in FACTORY_INPUTS}
        self.scripts = {
            kind: tools.write_script(folder, f"{kind}.py", text) for kind, text in SCRIPTS.items()
        }
        self.printed = _printed(self.scripts["short"])
        self.digests: dict[tuple[str, int], set[str]] = {}  # from servers; see ``Oracle``
        self._gate = folder / "gate"
        self._gate.touch()

    @contextlib.contextmanager
    def shut_gate(self) -> Iterator[None]:
        """Keep workers that compute ``HELD`` blocked in ``flock`` until the ``with`` block ends."""
        with self._gate.open() as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    @functools.cache  # noqa: B019 - one object, as long as its test
    def expected(self, program: str, batch: int, seed: int) -> torch.Tensor:
        answer: torch.Tensor = tools.eager(self.modules[program], value(program, batch, seed))
        return answer

    def source(self, program: str) -> tuple[Any, dict[str, Any]]:
        """Return source and options for ``Client.register``."""
        if PROGRAMS[program].is_code:
            inputs = {"inputs": FACTORY_INPUTS[program], "weights": ""}
            return f"stateful_models:{program}", inputs
        return self.folder / f"{program}.bundle", {}


def _printed(script: Path) -> str:
    """Run a script without a server, with one compute thread; return its output."""

    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script))
        return printed.getvalue()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------- the stage


class Stage:
    """Owner of the one server of all examples; kills it and restarts it on the same state."""

    def __init__(self, material: Material, folder: Path) -> None:
        self.material = material
        self.sent: set[str] = set()  # verbs sent since the last clear
        self.ran: Counter[str] = Counter()  # rule -> number of runs
        self.examples = 0
        self.is_spoilt = False  # an example failed, so its leftovers are not checked
        self.threads = ThreadPoolExecutor(16)
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self.mark = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        running: RunningServer = self._stack.enter_context(
            server(
                arena=f"{ARENA_MIB}MiB",
                host_store=f"{STORE_MIB}MiB",
                state_dir=self._folder,
                tcp_roles=tuple(Role),
                args=("--threads", "1"),
                environment={
                    **ENVIRONMENT,
                    tools.MARK: self.mark,
                    "PYTHONPATH": f"{self.material.folder}:{ROOT}",
                },
            )
        )
        self.checked = tools.Checked(running, self.mark)
        self._stack.callback(self.checked.client.close)
        self.clients: dict[bool, Client] = {True: self.checked.client}  # is_owner -> client
        self.greet(False)

    def greet(self, is_owner: bool) -> None:
        """Close the client of the owner's socket or of TCP, and connect a new one."""
        old = self.clients.get(is_owner)
        if old is not None:
            old.close()
        self.clients[is_owner] = self.checked.running.client(tcp=not is_owner)
        if is_owner:
            self.checked.client = self.clients[True]
        self.clients[is_owner].about()
        self._stack.callback(self.clients[is_owner].close)

    def restart(self, how: str) -> None:
        """End the server in one of three ways, and start another on the same state."""
        process = self.checked.running.process
        if how == "kill":
            process.kill()
        elif how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            self.checked.client.stop_server(drain_s=20.0)
        status = process.wait(40)
        assert status == (-signal.SIGKILL if how == "kill" else 0), self.checked.running.log()
        self._end()
        self._start()

    def start_anew(self) -> None:
        """Start a server with empty state, after a failure."""
        self._end()
        self._folder = self._folder.with_name(f"{self._folder.name}-next")
        self.is_spoilt = False
        self._start()

    def _end(self) -> None:
        self._stack.close()
        tools.gone(self.mark)

    def close(self) -> None:
        self._end()
        self.threads.shutdown()


# ------------------------------------------------------------------------------- the machine


RULES: Final[dict[str, frozenset[str]]] = {}
"""The verbs that each rule always sends."""


def speaks(*verbs: str) -> Callable[[Callable[Given, None]], Callable[Given, None]]:
    """Mark a rule as sending these verbs; if it fails, the next example gets a new server."""

    def mark(method: Callable[Given, None]) -> Callable[Given, None]:
        RULES[method.__name__] = frozenset(verbs)

        @functools.wraps(method)
        def run(*args: Given.args, **arguments: Given.kwargs) -> None:
            machine: Any = args[0]
            stage: Stage = machine.stage
            stage.sent.clear()
            stage.is_spoilt = True
            method(*args, **arguments)
            assert stage.sent >= set(verbs), f"only {stage.sent} of {verbs} were sent"
            stage.ran[method.__name__] += 1
            stage.is_spoilt = False

        return run

    return mark


WAYS_TO_END: Final = ("stop", "kill", "signal")
MODELS = st.sampled_from(["a", "b", "c"])
JOBS = st.sampled_from(["x", "y"])
HOSTILE = st.sampled_from(["", "../up", "UPPER", "a" * 65, "sp ace", "ünï", "-a", "a\n", "a\0b"])
OWNERS = st.booleans()
PRIORITIES = st.sampled_from(["", "high", "normal", "low"])
BATCHES = st.integers(1, 4)
SEEDS = st.integers(0, 3)
ACTIONS = st.sampled_from(["pause", "resume", "cancel", "show"])
BURSTS = st.lists(st.tuples(MODELS, BATCHES, SEEDS, OWNERS), min_size=1, max_size=10)

STORM: Final = ("register small", "register other", "unregister", "load", "unload", "infer")
FATES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", HOLDER]),
        PRIORITIES,
        st.sampled_from(["runs", "runs", "taken back", "late"]),
        OWNERS,
    ),
    min_size=2,
    max_size=8,
)
SURE_FATES: Final = [
    (HOLDER, "low", "runs", True),
    (HOLDER, "high", "runs", True),
    (HOLDER, "high", "runs", True),
    (HOLDER, "", "taken back", False),
    (HOLDER, "", "late", True),
]
"""Requests for the holder, which is always served."""
ORDERS = st.lists(st.tuples(st.sampled_from(STORM), MODELS, OWNERS), min_size=3, max_size=12)
STORM_OUTCOMES: Final = {
    "register": only(OK, "AlreadyExists", "HostStoreFull"),
    "unregister": only(OK, "ModelNotFound", "AlreadyExists"),
    "load": only(OK, "ModelNotFound"),
    "unload": only(OK, "ModelNotFound"),
    "infer": only(OK, "ModelNotFound", "InvalidInput", "OutOfDeviceMemory", "ModelQuarantined"),
}
"""The allowed outcomes of each verb while other verbs of the storm are in flight."""

# A valid request body for each verb, to which a field ``surprise`` is added.
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "infer": {},
    "ping": {"deep": True},
    "cancel": {"id": "nobody"},
    "put": {"digest": "0" * 64, "size_bytes": 1, "offset_bytes": 0, "kind": "bundle"},
    "register": {"source": "torchvision:resnet18", "weights": "random:0"},
    "train": {"name": "x", "entry": "json:dumps"},
    "job": {"name": "x", "action": "show"},
    "stop": {"drain_ms": 1.0},
    "publish": {"job": "x"},
    "trace": {"seconds": 0.1},
    **{
        verb: {}
        for verb in (
            "regroup",
            "plan",
            "unregister",
            "load",
            "unload",
            "models",
            "show",
            "ps",
            "jobs",
            "stats",
            "rollback",
        )
    },
}


class ServerApi(RuleBasedStateMachine):
    """State machine: each rule sends a request and compares the outcome with the oracle's."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        if stage.is_spoilt:
            stage.start_anew()
        self.stage = stage
        self.number = stage.examples = stage.examples + 1
        slots = (ARENA_MIB - 2) // 2
        self.oracle = Oracle(slots, STORE_MIB << 20, stage.material.digests)
        self.lives = 1
        self.steps = 0
        self._rebase()

    # ---- requests to the server -----------------------------------------------------------------

    def client(self, is_owner: bool = True) -> Client:
        return self.stage.clients[is_owner]

    def outcome(self, question: Callable[[], Answered]) -> tuple[str, Any]:
        """Return OK and the answer, or the error's name and the error; raise other exceptions."""
        future = self.stage.threads.submit(question)
        try:
            return OK, future.result(ANSWER_S)
        except PipeSwitchError as error:
            return type(error).__name__, error
        except TimeoutError:
            raise AssertionError(f"no answer within {ANSWER_S} s") from None

    def ask(self, allowed: Outcomes, question: Callable[[], Answered]) -> tuple[str, Any]:
        outcome, answer = self.outcome(question)
        assert outcome in allowed, f"{outcome} ({answer}), expected {sorted(allowed)}"
        return outcome, answer

    def raw(
        self,
        op: str,
        *,
        is_owner: bool = True,
        body: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Future[Any]:
        """Send a request for which the SDK has no method, or whose id is needed."""
        connection = self.client(is_owner)._connection
        return connection.request(op, body=dict(body or {}), **options)

    def job(self, name: str) -> str:
        """Return a job name that only this example uses, because ended jobs stay listed."""
        return f"{name}-{self.number}"

    def program(self, name: str) -> str:
        """Return the name of the model's program, or "small" if the model is not registered."""
        model = self.oracle.models.get(name)
        return model.program.name if model is not None else "small"

    def answered(self, name: str, batch: int, seed: int, outcome: str, answer: Any) -> None:
        """Record an outcome; check that the output equals the plain module's, bit for bit."""
        if outcome == OK:
            expected = self.stage.material.expected(self.program(name), batch, seed)
            (got,) = answer.outputs.values()
            assert tools.is_bit_equal(got, expected), f"{name}: {got}, not {expected}"
            assert answer.timing.op_id > 0
            assert answer.timing.total_ms >= answer.timing.queue_ms >= 0
            assert answer.timing.resident or not self.oracle.models[name].stays, name
        self.oracle.did_infer(name, outcome)

    def submit(self, requests: Sequence[tuple[str, int, int, bool]]) -> list[Future[Any]]:
        return [
            self.client(is_owner).submit(name, value(self.program(name), batch, seed))
            for name, batch, seed, is_owner in requests
        ]

    def collect(
        self, requests: Sequence[tuple[str, int, int, bool]], futures: Sequence[Future[Any]]
    ) -> None:
        for (name, batch, seed, _), future in zip(requests, futures, strict=True):
            allowed = self.oracle.may_infer(name, batch)
            outcome, answer = self.ask(allowed, functools.partial(future.result, ANSWER_S))
            self.answered(name, batch, seed, outcome, answer)

    # ---- models --------------------------------------------------------------------------------

    @rule(
        name=MODELS,
        program=st.sampled_from(SERVED),
        max_batch=st.sampled_from([0, 2, 8]),
        priority=PRIORITIES,
        pin=st.booleans(),
        is_owner=OWNERS,
    )
    @speaks()
    def register(
        self, name: str, program: str, max_batch: int, priority: str, pin: bool, is_owner: bool
    ) -> None:
        self._register(name, program, max_batch, priority, pin, is_owner)

    @rule(name=MODELS, program=st.sampled_from(["small", "made"]), is_owner=st.just(True))
    @speaks("register")
    def register_at_once(self, name: str, program: str, is_owner: bool) -> None:
        """Register without options, so that most examples have a model."""
        self._register(name, program, 0, "", False, is_owner)

    @rule(
        name=st.one_of(MODELS, HOSTILE),
        program=st.sampled_from(["huge", "garbage", "small"]),
        is_owner=OWNERS,
    )
    @speaks("register", "put")
    def register_what_may_not_be(self, name: str, program: str, is_owner: bool) -> None:
        self._register(name, program, 0, "", False, is_owner)

    def _register(
        self, name: str, program: str, max_batch: int, priority: str, pin: bool, is_owner: bool
    ) -> None:
        known = PROGRAMS[program]
        source, options = self.stage.material.source(program)
        options |= {"max_batch": max_batch, "priority": priority, "pin": pin}
        stages: list[tuple[str, float]] = []
        outcome, row = self.ask(
            self.oracle.may_register(name, known, max_batch, is_owner=is_owner),
            lambda: self.client(is_owner).register(
                name, source, progress=lambda stage, done: stages.append((stage, done)), **options
            ),
        )
        assert all(0.0 <= done <= 1.0 for _, done in stages)
        if outcome == OK:
            assert row["model"] == name
            assert row["mode"] == ("module" if program == "poison" else "graph")
            assert row["bytes"] <= known.size_bytes
            self.oracle.did_register(
                name,
                known,
                row,
                max_batch=max_batch,
                priority=priority,
                is_pinned=pin,
                is_owner=is_owner,
            )

    @rule(name=MODELS, program=st.sampled_from(["small", "made"]), wait_ms=st.integers(0, 60))
    @speaks("register", "cancel")
    def cancel_a_registration(self, name: str, program: str, wait_ms: int) -> None:
        """Cancel a registration. If that was too late, the model exists; else nothing is left."""
        source, options = self.stage.material.source(program)
        if not PROGRAMS[program].is_code:
            source = self.client().upload(source, "bundle")
        inputs = {key: [list(s), d] for key, (s, d) in options.get("inputs", {}).items()}
        connection = self.client()._connection
        header = connection._header
        ids: list[str] = []

        def noted(op: str, model: str, body: dict[str, Any] | None) -> dict[str, Any]:
            request_header = header(op, model, body)
            ids.append(request_header["id"])
            return request_header

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "_header", noted)
            future = self.raw("register", model=name, body={"source": source, "inputs": inputs})
        threading.Event().wait(wait_ms / 1000)  # a moment during the build, not a condition
        is_found = self.raw("cancel", body={"id": ids[0]}).result(ANSWER_S).body["found"]
        allowed = self.oracle.may_register(name, PROGRAMS[program], 0, is_owner=True)
        allowed |= {"Cancelled"} if is_found and name not in self.oracle.models else set()
        outcome, reply = self.ask(allowed, functools.partial(future.result, ANSWER_S))
        if outcome == OK:
            self.oracle.did_register(
                name,
                PROGRAMS[program],
                reply.body,
                max_batch=0,
                priority="",
                is_pinned=False,
                is_owner=True,
            )

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("unregister")
    def unregister(self, name: str, is_owner: bool) -> None:
        self._unregister(name, is_owner)

    def _unregister(self, name: str, is_owner: bool) -> None:
        self.ask(self.oracle.may_find(name), lambda: self.client(is_owner).unregister(name))
        self.oracle.did_unregister(name)

    @rule(name=MODELS, others=BURSTS, is_owner=OWNERS)
    @speaks("infer", "unregister")
    def unregister_behind_requests(
        self, name: str, others: list[tuple[str, int, int, bool]], is_owner: bool
    ) -> None:
        """Check that earlier requests are answered before the model is removed."""
        requests = [(other, batch, seed, is_owner) for other, batch, seed, _ in others]
        requests.append((name, 1, 0, is_owner))
        futures = self.submit(requests)
        allowed = self.oracle.may_find(name)
        gone_at = self.raw("unregister", is_owner=is_owner, model=name)
        self.collect(requests, futures)
        self.ask(allowed, functools.partial(gone_at.result, ANSWER_S))
        self.oracle.did_unregister(name)

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("rollback", "publish")
    def ask_for_other_versions(self, name: str, is_owner: bool) -> None:
        """Ask for other versions, which must fail, because no job has published any."""
        none, client = only("ModelNotFound"), self.client(is_owner)
        self.ask(none, lambda: client.rollback(name))
        self.ask(none, lambda: client.rollback(name, 7))
        self.ask(only("ModelNotFound"), lambda: client.publish(name, "never-was"))

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("load")
    def load(self, name: str, is_owner: bool) -> None:
        self._pin(name, True, is_owner)

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("load", "unload")
    def unload(self, name: str, is_owner: bool) -> None:
        self._pin(name, True, not is_owner)
        self._pin(name, False, is_owner)

    def _pin(self, name: str, is_pinned: bool, is_owner: bool) -> None:
        """Pin or unpin a model; if it will certainly reach the device, wait until it is there."""
        client = self.client(is_owner)
        outcome, row = self.ask(
            self.oracle.may_find(name),
            lambda: client.load(name) if is_pinned else client.unload(name),
        )
        if outcome == OK:
            self.oracle.did_pin(name, row, is_pinned=is_pinned)
            if self.oracle.comes_to_the_device(name):
                tools.until(
                    lambda: client.show(name)["residency"] == "pinned", f"{name} is brought"
                )

    @rule(programs=st.permutations(["wide", "wide", "small"]), is_owner=OWNERS)
    @speaks("unregister", "register")
    def crowd_the_device(self, programs: list[str], is_owner: bool) -> None:
        """Fill the device: idle models are evicted, pinned models stay until they are unloaded."""
        names = ("a", "b", "c")
        for name in names:
            self._unregister(name, is_owner)
        for name, program in zip(names, programs, strict=True):
            self._register(name, program, 0, "", False, is_owner)
        known = [name for name in names if name in self.oracle.models]
        wide = [name for name in known if self.oracle.models[name].program.slots > 1]
        for pinned in (wide[:1], wide, []):
            for name in wide:
                self._pin(name, name in pinned, is_owner)
            self.oracle.check_models(self.client().models())
            # The model with the fewest requests is evicted first, unless it is pinned.
            for name in [name for name in known if name not in pinned] * 3 + known:
                self._infer(name, is_owner)

    @rule(name=MODELS, batches=st.lists(st.integers(1, 4), max_size=2), is_owner=OWNERS)
    @speaks("regroup")
    def profile(self, name: str, batches: list[int], is_owner: bool) -> None:
        if name in self.oracle.models:
            self.oracle.models[name].stays = False  # profiling evicts it, to time its copy
        outcome, profile = self.ask(
            self.oracle.may_profile(name, batches),
            lambda: self.client(is_owner).profile(name, batches),
        )
        if outcome == OK:
            assert profile["digest"] == self.oracle.models[name].digest
            measured = [one["batch"] for one in profile["batches"]]
            assert measured == list(dict.fromkeys(batches)) or not batches
        garbled = self.raw("regroup", is_owner=is_owner, model=name, body={"planned": "[]"})
        refusals = only("ModelNotFound", "InvalidInput", "DeviceBusy", "OutOfDeviceMemory")
        self.ask(refusals, functools.partial(garbled.result, ANSWER_S))
        self._rebase()  # because the server has counted the requests of the profiling, too

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("show", "plan", "trace")
    def look_closer(self, name: str, is_owner: bool) -> None:
        client = self.client(is_owner)
        outcome, row = self.ask(self.oracle.may_find(name), lambda: client.show(name))
        if outcome == OK:
            self.oracle.check_model(name, row)
            assert row["inputs"]
            assert client.signature(name).batch_max == self.oracle.models[name].batch_max
        planned = {row["name"]: row["profile"] for row in client.plan()["models"]}
        assert set(planned) == set(self.oracle.models)
        for name, profile in planned.items():
            assert profile is None or profile["digest"] == self.oracle.models[name].digest
        assert isinstance(client.trace(0.1)["traceEvents"], list)

    # ---- requests ------------------------------------------------------------------------------

    @rule(
        name=MODELS,
        batch=BATCHES,
        seed=SEEDS,
        priority=PRIORITIES,
        is_owner=OWNERS,
        deadline_ms=st.sampled_from([None, 60_000.0]),
    )
    @speaks("infer")
    def infer(
        self,
        name: str,
        batch: int,
        seed: int,
        priority: str,
        is_owner: bool,
        deadline_ms: float | None,
    ) -> None:
        x = value(self.program(name), batch, seed)
        outcome, result = self.ask(
            self.oracle.may_infer(name, batch),
            lambda: self.client(is_owner).infer(
                name, x, priority=priority, deadline_ms=deadline_ms
            ),
        )
        self.answered(name, batch, seed, outcome, result)

    def _infer(self, name: str, is_owner: bool) -> None:
        x = value(self.program(name), 1, 0)
        allowed = self.oracle.may_infer(name)
        outcome, result = self.ask(allowed, lambda: self.client(is_owner).infer(name, x))
        self.answered(name, 1, 0, outcome, result)

    @rule(requests=BURSTS)
    @speaks("infer")
    def infer_at_once(self, requests: list[tuple[str, int, int, bool]]) -> None:
        self.collect(requests, self.submit(requests))

    @rule(name=MODELS, how=st.sampled_from(MISFITS), is_owner=OWNERS)
    @speaks("infer")
    def infer_what_does_not_fit(self, name: str, how: str, is_owner: bool) -> None:
        inputs, options = misfit(self.program(name), how)
        outcome, _ = self.ask(
            self.oracle.may_infer(name, fits=False),
            lambda: self.client(is_owner).infer(name, inputs, **options),
        )
        self.oracle.did_infer(name, outcome)

    @rule(name=MODELS, deadline_ms=st.sampled_from([1e-6, 0.1, 1.0, 5.0]), is_owner=OWNERS)
    @speaks("infer")
    def infer_in_a_hurry(self, name: str, deadline_ms: float, is_owner: bool) -> None:
        x = value(self.program(name), 1, 0)
        allowed = self.oracle.may_infer(name)
        if allowed & {OK, "OutOfDeviceMemory"}:
            allowed |= {"DeadlineExceeded"}
        outcome, result = self.ask(
            allowed, lambda: self.client(is_owner).infer(name, x, deadline_ms=deadline_ms)
        )
        self.answered(name, 1, 0, outcome, result)

    @rule(name=MODELS, before=st.integers(0, 3), is_owner=OWNERS)
    @speaks("infer", "cancel")
    def take_a_request_back(self, name: str, before: int, is_owner: bool) -> None:
        """Cancel a request. A cancellation that is too late changes nothing: the result arrives."""
        requests = [(name, 1, 0, is_owner)] * before
        futures = self.submit(requests)
        allowed = self.oracle.may_infer(name)
        future = self.client(is_owner).submit(name, value(self.program(name), 1, 1))
        body = {"id": self._last_id(is_owner)}
        is_found = self.raw("cancel", is_owner=is_owner, body=body).result(ANSWER_S).body["found"]
        if is_found:
            allowed |= {"Cancelled"}
        self.collect(requests, futures)
        outcome, result = self.ask(allowed, functools.partial(future.result, ANSWER_S))
        self.answered(name, 1, 1, outcome, result)

    def _last_id(self, is_owner: bool) -> str:
        """Return the id of the client's latest request; ids end in consecutive numbers."""
        connection = self.client(is_owner)._connection
        header_id = connection._header("ps", "", None)["id"]  # this request is never sent
        prefix, number = header_id.rsplit("-", 1)
        return f"{prefix}-{int(number) - 1}"

    @rule(fates=FATES)
    @speaks()
    def wait_behind_a_held_one(self, fates: list[tuple[str, str, str, bool]]) -> None:
        """Queue requests behind one that holds the device, so that their order is certain.

        1. One request holds the device, another is dispatched; all later ones are queued.
        2. Requests that are cancelled or exceed their deadline are answered at once and never run.
        3. When the device is released, the others run in the order of their priorities. Requests
           of one priority, model and connection run in the order of their arrival.
        """
        if not self._has_holder():
            return
        x = value("poison", 1, 0)
        x[0, 0] = HELD
        expected = tools.eager(self.stage.material.modules["poison"], x)
        fates = [one for one in fates if self.oracle.may_infer(one[0]) == {OK}] + SURE_FATES
        with self.stage.material.shut_gate():
            holder = self.client().submit(HOLDER, x, priority="high")
            tools.until(
                lambda: self.stage.checked.row(HOLDER)["state"] == "active", "it is held"
            )  # 1.
            x = value("poison", 1, 1)  # from another client, so that no later request overtakes it
            behind = self.client(is_owner=False).submit(HOLDER, x, priority="high")
            self._wait_until_queued(0)
            run = self._queue_up(fates)  # 2.
        outcome, answer = self.ask(only(OK), functools.partial(holder.result, ANSWER_S))
        assert tools.is_bit_equal(answer["y"], expected)
        self.oracle.did_infer(HOLDER, outcome)
        self.answered(HOLDER, 1, 1, *self.ask(only(OK), functools.partial(behind.result, ANSWER_S)))
        self._judge_order(run)  # 3.

    def _has_holder(self) -> bool:
        """Register the holder if necessary; return True if it certainly serves requests."""
        if HOLDER not in self.oracle.models:
            self._register(HOLDER, "poison", 0, "high", False, True)
        return self.oracle.may_infer(HOLDER) == {OK}

    def _waiting(self) -> tuple[int, int]:
        """Return the numbers of requests in flight and of queued requests."""
        stats = self.stage.checked.stats()
        return stats["inference"]["in_flight"], stats["queued"]

    def _queue_up(
        self, fates: Sequence[tuple[str, str, str, bool]]
    ) -> list[tuple[tuple[str, str, bool], Future[Any]]]:
        """Send requests; check the errors of cancelled and late ones; return those that run."""
        run = []
        taken_back = []
        for name, priority, fate, is_owner in fates:
            deadline_ms = SHORT_DEADLINE_MS if fate == "late" else None
            future = self.client(is_owner).submit(
                name, value(self.program(name), 1, 0), priority=priority, deadline_ms=deadline_ms
            )
            if fate == "runs":
                run.append(((name, priority, is_owner), future))
            elif fate == "taken back":
                taken_back.append((name, self._last_id(is_owner), is_owner, future))
            else:
                outcome, _ = self.ask(
                    only("DeadlineExceeded"), functools.partial(future.result, ANSWER_S)
                )
                self.oracle.did_infer(name, outcome)
            self._wait_until_queued(len(run) + len(taken_back))
        for name, request_id, is_owner, future in taken_back:
            reply = self.raw("cancel", is_owner=is_owner, body={"id": request_id})
            assert reply.result(ANSWER_S).body["found"] is True
            outcome, _ = self.ask(only("Cancelled"), functools.partial(future.result, ANSWER_S))
            self.oracle.did_infer(name, outcome)
        assert self._waiting() == (2 + len(run), len(run))
        return run

    def _wait_until_queued(self, count: int) -> None:
        """Wait until ``count`` requests are queued behind the running one and the next one."""
        tools.until(lambda: self._waiting() == (2 + count, count), f"{count} are queued")

    def _judge_order(self, run: Sequence[tuple[tuple[str, str, bool], Future[Any]]]) -> None:
        """Check the order of the runs by their operation ids, which are numbered at dispatch."""
        ran: list[tuple[int, str, bool, int]] = []
        for (name, priority, is_owner), future in run:
            outcome, answer = self.ask(only(OK), functools.partial(future.result, ANSWER_S))
            self.answered(name, 1, 0, outcome, answer)
            urgency = self.oracle.class_of(name, priority)
            ran.append((urgency, name, is_owner, answer.timing.op_id))
        for one, other in itertools.combinations(ran, 2):
            if one[0] != other[0]:
                assert (one[0] < other[0]) == (one[3] < other[3]), f"a lower class was first: {ran}"
            elif one[:3] == other[:3]:
                assert one[3] < other[3], f"the later one was first: {ran}"

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("infer")
    def infer_what_the_model_dies_of(self, name: str, is_owner: bool) -> None:
        self._infer_what_it_dies_of(name, is_owner)

    def _infer_what_it_dies_of(self, name: str, is_owner: bool) -> None:
        """Send an input on which the model raises, or kills workers until it is quarantined."""
        program = self.program(name)
        x = value(program, 1, 0)
        allowed = self.oracle.may_infer(name)
        kills = 0
        if program == "picks":
            x[:] = NO_ROW + 1
            allowed = (allowed - {OK}) | {"TaskFailed"} if OK in allowed else allowed
        elif program == "poison" and OK in allowed:
            x[:] = DEADLY
            allowed = (allowed - {OK}) | {"WorkerLost"}
            kills = 1
        outcome, result = self.ask(allowed, lambda: self.client(is_owner).infer(name, x))
        self.answered(name, 1, 0, outcome, result)
        if kills:
            self.stage.checked.wait_until_whole()

    @precondition(lambda self: self.oracle.kills < MAX_KILLS)
    @rule(is_owner=OWNERS, unpins=st.booleans())
    @speaks()
    def pardon_what_was_set_aside(self, is_owner: bool, unpins: bool) -> None:
        """Quarantine the holder, check that it refuses, load it, and check that it serves."""
        if not self._has_holder():
            return
        self.oracle.kills += 1
        self._infer_what_it_dies_of(HOLDER, is_owner)
        self.oracle.check_models(self.client().models())
        self._infer(HOLDER, not is_owner)
        self._pin(HOLDER, True, is_owner)
        self._infer(HOLDER, is_owner)
        if unpins:
            self._pin(HOLDER, False, is_owner)

    @rule(name=MODELS, is_owner=OWNERS)
    @speaks("prefetch", "stats")
    def prefetch(self, name: str, is_owner: bool) -> None:
        self.client(is_owner).prefetch(name)
        self.client(is_owner).stats()  # answered after the prefetch

    @rule(name=MODELS, count=st.integers(1, 5))
    @speaks("infer", "hello")
    def leave_before_the_answer(self, name: str, count: int) -> None:
        """Disconnect before the answers; each request must be counted and leave nothing behind."""
        before = self.stage.checked.stats()["inference"]
        requests = [(name, 1, 0, False)] * count
        with self.stage.checked.running.client(tcp=True) as visitor:
            visitor.about()
            for _ in requests:
                visitor.submit(name, value(self.program(name), 1, 0))
        after = tools.until(self._quiet, "nothing is in flight")["inference"]
        moved = {key: after[key] - before[key] for key in before}
        assert moved["accepted"] == moved["ok"] + moved["error"] + moved["undeliverable"]
        assert moved["accepted"] + moved["rejected"] <= count
        self._rebase()

    def _quiet(self) -> Any:
        stats = self.stage.checked.stats()
        return stats if stats["inference"]["in_flight"] == 0 and stats["queued"] == 0 else None

    def _rebase(self) -> None:
        """Set the oracle's counts to the server's: it is unknown how many requests arrived."""
        checked = self.stage.checked
        stats = checked.stats()
        counts = stats["inference"]
        self.oracle.counts = Counter({key: counts[key] for key in counts if key != "in_flight"})
        self.oracle.counts["inferences"] = stats["inferences"]
        for row in checked.client.models():
            self.oracle.models[row["name"]].answered = row["requests"]

    @rule(orders=ORDERS, daemon_dies=st.sampled_from([False, False, False, True]))
    @speaks("models")
    def ask_for_everything_at_once(
        self, orders: list[tuple[str, str, bool]], daemon_dies: bool
    ) -> None:
        """Send many verbs at once, in an order that only the server knows; check each outcome.

        Then the oracle takes over the state in ``models``; all other answers must agree with it.
        """
        material, x = self.stage.material, value("small", 1, 0)
        answers = [material.expected(program, 1, 0) for program in ("small", "other", "made")]
        bundles = {}
        for program, _ in itertools.product(("small", "other"), orders):
            source, _ = material.source(program)  # one upload per use: a use may remove it
            bundles[program] = self.client().upload(source, "bundle")
        pid = self.stage.checked.daemon_pid()
        futures = []
        for what, name, is_owner in orders:
            if what == "infer":
                futures.append(self.client(is_owner).submit(name, x))
            else:
                op, _, program = what.partition(" ")
                body = {"source": bundles[program]} if program else {}
                futures.append(self.raw(op, is_owner=is_owner, model=name, body=body))
        daemon_dies = daemon_dies and self._may_kill_the_daemon()
        if daemon_dies:
            self._kill_the_daemon(pid)
        for (what, name, _), future in zip(orders, futures, strict=True):
            outcome, answer = self.outcome(functools.partial(future.result, ANSWER_S))
            allowed = STORM_OUTCOMES[what.split()[0]]
            if what.startswith("register") and any(o[:2] == ("unregister", name) for o in orders):
                allowed |= {"Cancelled"}  # an unregister cancels the build
            assert outcome in allowed, f"{what} {name}: {outcome} {answer}"
            if what == "infer" and outcome == OK and answer.outputs["y"].shape == x.shape:
                assert any(tools.is_bit_equal(answer["y"], y) for y in answers), name
            elif what.startswith("register") and outcome == OK:
                program = what.split()[1]
                self.oracle.know_digest(program, DEFAULT_MAX_BATCH, answer.body["digest"])
        if daemon_dies:  # until its successor runs, ``models`` may describe the old device
            self._wait_for_another_daemon(pid)
        self.stage.checked.wait_until_whole()
        self._adopt()

    def _adopt(self) -> None:
        """Set the oracle's models to those that ``models`` shows."""
        known = {one: PROGRAMS[p] for (p, _), all_ in self.oracle.digests.items() for one in all_}
        rows = {row["name"]: row for row in self.client().models()}
        for name in set(self.oracle.models) - set(rows):
            self.oracle.did_unregister(name)
        for name, row in rows.items():
            self.oracle.adopt(name, known[row["digest"]], row)
        self._rebase()

    # ---- jobs ----------------------------------------------------------------------------------

    @rule(
        name=JOBS,
        kind=st.sampled_from(sorted(SCRIPTS)),
        priority=PRIORITIES,
        is_owner=st.sampled_from([True, True, True, False]),
    )
    @speaks("train")
    def train(self, name: str, kind: str, priority: str, is_owner: bool) -> None:
        self._train(self.job(name), kind, priority, is_owner)

    @rule(name=JOBS, kind=st.sampled_from(["endless", "short"]), action=ACTIONS)
    @speaks("train", "job")
    def train_at_once(self, name: str, kind: str, action: str) -> None:
        """Start a job, so that most examples have one, and act on it shortly after its start."""
        self._train(self.job(name), kind, "", True)
        self._act(self.job(name), action, False)

    def _train(self, name: str, kind: str, priority: str, is_owner: bool) -> None:
        script = self.stage.material.scripts[kind]
        outcome, _ = self.ask(
            self.oracle.may_train(name, is_owner=is_owner),
            lambda: self.client(is_owner).train(script, name=name, priority=priority),
        )
        if outcome == OK:
            self.oracle.did_train(name, kind, priority)

    @rule(name=HOSTILE.filter(bool), is_owner=OWNERS, is_there=st.booleans())
    @speaks("train")
    def train_what_may_not_be(self, name: str, is_owner: bool, is_there: bool) -> None:
        if not is_there:
            name = self.job("x")
        script = self.stage.material.scripts["short"].with_stem("short" if is_there else "none")
        self.ask(
            self.oracle.may_train(name, is_owner=is_owner, is_there=is_there),
            lambda: self.client(is_owner).train(script, name=name),
        )

    @rule(name=JOBS, action=ACTIONS, is_owner=OWNERS)
    @speaks("job")
    def act(self, name: str, action: str, is_owner: bool) -> None:
        self._act(self.job(name), action, is_owner)

    @rule(name=HOSTILE, action=ACTIONS, is_owner=OWNERS)
    @speaks("job")
    def act_on_no_job(self, name: str, action: str, is_owner: bool) -> None:
        self._act(name, action, is_owner)

    def _act(self, name: str, action: str, is_owner: bool) -> None:
        outcome, answer = self.ask(
            self.oracle.may_act(name, action), lambda: self.client(is_owner).job(name, action)
        )
        if outcome == OK:
            self.oracle.did_act(name, action, answer["job"])

    @rule(name=JOBS, is_owner=OWNERS)
    @speaks("job")
    def wait(self, name: str, is_owner: bool) -> None:
        """Wait for the end of a job; cancel it if it would not end on its own."""
        name = self.job(name)
        future = self.raw("job", is_owner=is_owner, body={"name": name, "action": "wait"})
        job = self.oracle.jobs.get(name)
        if job is not None and not job.end and (job.is_paused or job.kind == "endless"):
            self._act(name, "cancel", True)
        outcome, answer = self.outcome(functools.partial(future.result, ANSWER_S))
        if job is None:
            assert outcome == "ModelNotFound", answer
        else:
            row = answer.body["job"] if outcome == OK else answer.job
            assert row["state"] in job.states & FINAL_JOB_STATES, row
            assert outcome == ("TaskFailed" if row["state"] == "failed" else OK)
            job.end = row["state"]
            self._judge_log(name)

    @rule(name=JOBS, offset_bytes=st.integers(0, 200), is_owner=OWNERS)
    @speaks("job", "ping")
    def read_a_log(self, name: str, offset_bytes: int, is_owner: bool) -> None:
        name = self.job(name)
        client = self.client(is_owner)
        allowed = only(OK if name in self.oracle.jobs else "ModelNotFound")
        outcome, piece = self.ask(
            allowed, lambda: client.job(name, "logs", offset_bytes=offset_bytes)
        )
        client.about()
        if outcome == OK:
            whole = "".join(client.task(name).logs()).encode()
            end_bytes = piece["end_bytes"]  # at that time; a running job prints more
            assert min(offset_bytes, end_bytes) <= piece["offset_bytes"] <= end_bytes
            assert whole.endswith(b"\n") or not whole
            if self.oracle.jobs[name].end:
                assert end_bytes <= len(whole)
                assert piece["text"].encode() in whole

    def _judge_log(self, name: str) -> None:
        """Check the output of an ended job's last run."""
        job = self.oracle.jobs[name]
        text = "".join(self.client().task(name).logs())
        if job.kind == "short" and job.end == "done":
            assert text.endswith(self.stage.material.printed), text
        elif job.kind == "broken" and job.end == "failed":
            assert "ValueError: broken on purpose" in text

    # ---- the server ----------------------------------------------------------------------------

    @rule(is_owner=OWNERS)
    @speaks("ping")
    def ping(self, is_owner: bool) -> None:
        client = self.client(is_owner)
        assert client.ping()["ready"]

        def all_answer() -> bool:
            deep = client.ping(deep=True)
            times_ms = [deep["daemon_ms"], *(worker["ms"] for worker in deep["workers"])]
            return bool(deep["ready"]) and None not in times_ms

        # Short jobs use up workers, so for a moment there may be none that has started.
        tools.until(all_answer, "the daemon and the workers answer")
        about = client.about()
        assert about["pid"] == self.stage.checked.pid
        assert about["is_owner"] is about["accepts_code"] is is_owner

    @rule(is_owner=OWNERS)
    @speaks("hello", "ping")
    def say_hello_again(self, is_owner: bool) -> None:
        self.stage.greet(is_owner)

    @rule(verb=st.sampled_from(sorted(BODIES)), is_owner=OWNERS)
    @speaks()
    def say_too_much(self, verb: str, is_owner: bool) -> None:
        """Send a field that no verb has."""
        model = "a" if verb == "register" else next(iter(self.oracle.models), "a")
        body = {**BODIES[verb], "surprise": 1}
        if verb in ("job", "train"):
            body["name"] = next(iter(self.oracle.jobs), "x")
        future = self.raw(verb, is_owner=is_owner, model=model, body=body)
        allowed = only("InvalidInput")
        if verb == "train" and not is_owner:
            allowed = only("InvalidInput", "PermissionDenied")
        self.ask(allowed, functools.partial(future.result, ANSWER_S))
        self.oracle.counts["rejected"] += verb == "infer"

    @rule(drain_ms=st.sampled_from([-1.0, float("nan"), 1e300, "soon", None, True]))
    @speaks("stop")
    def stop_it_at_no_time(self, drain_ms: Any) -> None:
        future = self.raw("stop", body={"drain_ms": drain_ms})
        self.ask(only("InvalidInput"), functools.partial(future.result, ANSWER_S))

    @rule(verb=st.sampled_from(["", "no-such-verb", "INFER", "infer\0"]), is_owner=OWNERS)
    @speaks("stats")
    def say_what_is_no_verb(self, verb: str, is_owner: bool) -> None:
        before = self.client(is_owner).stats()["malformed"]
        future = self.raw(verb, is_owner=is_owner)
        with pytest.raises(RemoteProtocolError):
            future.result(ANSWER_S)
        assert self.client(is_owner).stats()["malformed"] == before + 1

    @rule(
        content=st.binary(min_size=2, max_size=50),
        how=st.sampled_from(["right", "digest", "gap", "too long", "kind", "two frames"]),
        is_owner=OWNERS,
    )
    @speaks("put")
    def put(self, content: bytes, how: str, is_owner: bool) -> None:
        """Upload a file in two pieces; a second upload of the same file needs no piece."""
        kind = "pickle" if how == "kind" else "safetensors"
        content += uuid.uuid4().bytes  # so that the file is new
        digest = hashlib.sha256(content if how != "digest" else b"another").hexdigest()
        body = {"digest": digest, "size_bytes": len(content), "kind": kind}
        half = len(content) // 2
        pieces = [(0, content[:half]), (half, content[half:])]
        if how == "gap":
            pieces[1] = (half + 1, content[half + 1 :])
        elif how == "too long":
            pieces[1] = (half, content)
        last: tuple[str, Any] = ("", None)
        for offset, piece in pieces:
            frames = [piece, piece] if how == "two frames" else [piece]
            future = self.raw(
                "put", is_owner=is_owner, body={**body, "offset_bytes": offset}, frames=frames
            )
            last = self.outcome(functools.partial(future.result, ANSWER_S))
        assert last[0] == (OK if how == "right" else "InvalidInput"), last
        if how == "right":
            assert last[1].body["complete"] is True
            again = self.raw("put", is_owner=is_owner, body={**body, "offset_bytes": 0})
            assert again.result(ANSWER_S).body["complete"] is True

    # ---- faults --------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.kills < MAX_KILLS)
    @rule(which=st.integers(0, 3), requests=BURSTS)
    @speaks("ps", "infer")
    def kill_a_worker(self, which: int, requests: list[tuple[str, int, int, bool]]) -> None:
        pids = sorted(self.stage.checked.worker_pids().items())
        futures = self.submit(requests)
        _, pid = pids[which % len(pids)]
        tools.kill(pid)
        self.oracle.kills += 1
        self.collect(requests, futures)
        tools.until(lambda: pid not in self.stage.checked.worker_pids().values(), "it was reaped")
        self.stage.checked.wait_until_whole()

    def _may_kill_the_daemon(self) -> bool:
        return self.oracle.kills < MAX_KILLS and self.oracle.daemon_deaths < MAX_DAEMON_DEATHS

    @precondition(_may_kill_the_daemon)
    @rule(requests=BURSTS)
    @speaks("ps", "infer")
    def kill_the_memory_daemon(self, requests: list[tuple[str, int, int, bool]]) -> None:
        pid = self.stage.checked.daemon_pid()
        futures = self.submit(requests)
        self._kill_the_daemon(pid)
        self.collect(requests, futures)
        self._wait_for_another_daemon(pid)
        self.stage.checked.wait_until_whole()

    def _kill_the_daemon(self, pid: int) -> None:
        tools.kill(pid)
        self.oracle.device_lost()

    def _wait_for_another_daemon(self, pid: int) -> None:
        tools.until(
            lambda: self.stage.checked.row("memory-daemon")["pid"] not in (0, pid), "a new one"
        )

    @precondition(lambda self: self.steps >= 32 and self.number % 4 == 1 and self.lives == 1)
    @rule(how=st.sampled_from(WAYS_TO_END))
    @speaks("hello")
    def restart(self, how: str) -> None:
        """Restart the server, which takes seconds; it must know everything that it acknowledged."""
        self._restart(how)

    def _restart(self, how: str) -> None:
        self._leave_marks()
        rows = {row["name"]: row for row in self.client().jobs()}
        self.oracle.check_jobs(rows.values())
        self.lives += 1
        self.stage.restart(how)
        self.oracle.restarted({name: row["persisted_step"] for name, row in rows.items()})
        self.stage.checked.wait_until_whole()
        tools.until(
            lambda: all(row["state"] == "ready" for row in self.client().models()),
            "all models are ready",
        )

    def _leave_marks(self) -> None:
        """Set state that a restart could lose: pins, unpins, a removed name, a pause."""
        for name in ("a", "b", "c"):
            self._register(name, "small", 0, "low", True, True)  # refused if the name exists
        self._unregister("c", True)
        self._pin("a", True, True)
        self._pin("a", False, True)
        self._pin("b", True, True)
        name = self.job("held")
        self._train(name, "endless", "normal", True)
        self._act(name, "pause", True)

    # ---- always --------------------------------------------------------------------------------

    @invariant()
    def server_and_oracle_agree(self) -> None:
        spoilt, self.stage.is_spoilt = self.stage.is_spoilt, True
        client = self.client(self.steps % 2 == 0)
        self.steps += 1
        self.oracle.check_models(client.models())
        self.oracle.check_jobs(client.jobs())
        self.oracle.check_ps(client.ps())
        stats = client.stats()
        tools.check_identity(stats)
        self.oracle.check_stats(stats)
        self.stage.is_spoilt = spoilt

    def _be_sharp(self) -> None:
        """Run each rule of ``SHARP`` that no example has chosen.
        Hypothesis's choices depend on the server's answers, and so on the machine's load."""
        sharp: dict[str, Callable[[], None]] = {
            "wait_behind_a_held_one": lambda: self.wait_behind_a_held_one([]),
            "pardon_what_was_set_aside": lambda: self.pardon_what_was_set_aside(True, False),
            "crowd_the_device": lambda: self.crowd_the_device(["wide", "small", "wide"], True),
        }
        assert sharp.keys() == SHARP
        for name, ask in sharp.items():
            if name not in self.stage.ran:
                ask()
                self.server_and_oracle_agree()

    def teardown(self) -> None:
        """Empty the server; check that every byte, lease and slab is free."""
        if self.stage.is_spoilt:
            return
        if self.number % RESTART_EVERY == RESTART_EVERY - 1:
            self._be_sharp()
        self.stage.is_spoilt = True
        if self.number % RESTART_EVERY == 0 and self.lives == 1:
            self._restart(WAYS_TO_END[self.number // RESTART_EVERY % len(WAYS_TO_END)])
            self.server_and_oracle_agree()
        checked = self.stage.checked
        for name, job in self.oracle.jobs.items():
            if not job.end:
                with contextlib.suppress(InvalidInput):  # the job has ended on its own
                    checked.client.job(name, "cancel")
        for name in self.oracle.models:
            checked.client.unregister(name)
        if self.oracle.daemon_deaths:  # an answer resets the count of deaths
            checked.client.register("last", self.stage.material.folder / "small.bundle")
            checked.client.infer("last", value("small", 1, 0))
            checked.client.unregister("last")
        checked.wait_until_whole()
        checked.settle()
        tools.until(lambda: _is_empty(checked.stats()), "all memory is back")
        assert checked.client.models() == []
        self.stage.is_spoilt = False


def _is_empty(stats: Mapping[str, Any]) -> bool:
    return all(
        stats[f"{what}_free_bytes"] == stats[f"{what}_capacity_bytes"]
        for what in ("arena", "store", "pool")
    )


# ------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def stage(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage_made = Stage(material, tmp_path / "state")
    transmit = Connection._transmit

    def noted(link: Any, fields: Mapping[str, Any], frames: Sequence[Any]) -> None:
        stage_made.sent.add(str(fields["op"]))
        transmit(link, fields, frames)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "_transmit", staticmethod(noted))
    try:
        yield stage_made
    finally:
        stage_made.close()


def test_every_verb_of_the_protocol_has_a_rule() -> None:
    section = (ROOT / "docs/protocol.md").read_text().partition("## Verbs")[2].partition("\n## ")[0]
    documented = set(re.findall(r"\*\*(\w+)\*\*", section))
    assert documented == set(VERBS), "the document and the table list the same verbs"
    spoken = frozenset().union(*RULES.values()) | {"models", "jobs"}  # sent by the invariant
    # The other verbs are tested in test_tcp, test_keys, test_chains, test_sequences, and others.
    elsewhere = {"caller", "events", "chain", "sequences", "generation", "generate", "nodes"}
    here = documented - elsewhere
    assert spoken == here
    assert set(BODIES) == here - {"hello", "prefetch"}


def run(stage: Stage, chosen: settings) -> None:
    def machine() -> ServerApi:
        return ServerApi(stage)

    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[arg-type]


SHARP: Final = {"wait_behind_a_held_one", "crowd_the_device", "pardon_what_was_set_aside"}
QUICK = settings(
    max_examples=RESTART_EVERY,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # no shrinking
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_any_verbs_in_any_order_are_answered_as_the_oracle_says(stage: Stage) -> None:
    run(stage, QUICK)
    assert sum(stage.ran.values()) > 200
    assert stage.ran.keys() >= SHARP


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_very_many_verbs_in_any_order_are_answered_as_the_oracle_says(stage: Stage) -> None:
    defaults = (("EXAMPLES", "80"), ("STEPS", "40"), ("SEED", "1"), ("SHRINK", "0"))
    examples, steps, seed, shrinks = (
        int(os.environ.get(f"PIPESWITCH_STATEFUL_{name}", default)) for name, default in defaults
    )
    chosen = settings(
        QUICK,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
    )
    with publishing("api-stateful") as figures:
        try:
            seeded = hypothesis.seed(seed)
            seeded(functools.partial(run, stage, chosen))()
        finally:
            figures |= {"examples": stage.examples, "rules": dict(stage.ran), "seed": seed}
