"""Mixed load for the chaos test. A lane is a thread that sends one kind of requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pipeswitch.base import errors
from pipeswitch.client.client import Client, Task
from pipeswitch.wire import frames
from tests.models.sequences import CELL, RECALLS, Cell, Recalls, seeded
from tests.models.sequences import WIDTH as CELL_WIDTH
from tests.models.words import published
from tests.raw_peer import RawPeer, ask

from ..process.tools import eager, is_bit_equal, mlp, run_plain, write_script
from .history import Outcome
from .stage import Stage

WIDTH: Final = 512
DEPTH: Final = 8  # 8 MiB
MODELS: Final = ("a", "b", "c")
PROBE: Final = "probe"
STAGED: Final = "staged"  # model whose preprocessing, ``numpy:copy``, copies the input
TALKER: Final = "talker"
MOST_TOKENS: Final = 100  # so many that a generation has several runs, with faults between them
ANSWER_TIMEOUT_S: Final = 90.0
CONTROLLER_GRACE_S: Final = 40.0
GONE: Final = ("ServerUnavailable", "SequenceNotFound")  # errors after a restart of the server
DEADLINES_MS: Final = (None, None, None, 40.0, 2000.0)

TRAIN = """
    import hashlib, os, sys
    import torch
    from pipeswitch import job

    seed, stop_file, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2),
        torch.nn.ReLU(), torch.nn.Linear(64, 64),
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    data = [torch.randn(64, 64) for _ in range(20)]
    last = int(sys.argv[4]) if len(sys.argv) > 4 else 10**9
    for epoch in job.epochs(10**9):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x + 0.1 * torch.randn_like(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if os.path.exists(stop_file) or job.step >= last:
            break
    total = hashlib.sha256()
    for value in net.state_dict().values():
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    with open(out, "w") as file:
        file.write(f"{job.step} {total.hexdigest()}")
"""


class Load:
    """All lanes of the load. ``stop`` ends them; then ``finish_jobs`` checks the jobs' results."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._history = stage.history
        self._seed = seed
        self._stop = threading.Event()
        self.modules = {name: mlp(WIDTH, DEPTH, n) for n, name in enumerate(MODELS)}
        self.modules |= {name: mlp(16, 1, 9) for name in (PROBE, STAGED)}
        self._cell, self._recalls = seeded(Cell), seeded(Recalls)
        self._talker = talker(stage.folder / TALKER)
        self._prompts = ([7, 300, 2], [*range(40, 90)])
        self._answers = [greedy(self._talker, one) for one in self._prompts]
        self._script = write_script(stage.folder, "train.py", TRAIN)
        self._jobs = ("job-1", "job-2")
        lanes: list[tuple[str, Callable[[random.Random], None]]] = [
            (PROBE, self._probe),
            (STAGED, self._probe),
            ("infer-1", self._infer),
            ("infer-2", self._infer),
            ("raw", self._raw),
            ("http", self._http),
            ("sequence-1", self._sequences),
            ("sequence-2", self._sequences),
            ("generate-1", self._generate),
            ("generate-2", self._generate),
            ("control", self._control),
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(name, lane), name=name) for name, lane in lanes
        ]

    # ---- life ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Register all models, and get one answer from each, because first requests take longer."""
        client = self._stage.checked.client
        for name, module in self.modules.items():
            width = WIDTH if name in MODELS else 16
            more: dict[str, Any] = {}
            if name == STAGED:
                more = {"preprocess": "numpy:copy", "raw": {"a": ((1, width), "float32")}}
            x = torch.zeros(1, width)
            client.register(name, module, example_inputs=(x,), max_batch=4, **more)
            client.infer(name, x)
        example = (torch.zeros(2, 8), *_cell_state())
        client.register("cell", self._cell, example_inputs=example, state=CELL)
        example = (torch.zeros(1, 3, 8), torch.zeros(1, 5, 8))
        dynamic = {"x": {1: ("length", 1, 8)}, "past": {1: ("past", 1, 100)}}
        client.register(
            "recalls", self._recalls, example_inputs=example, dynamic=dynamic, state=RECALLS
        )
        client.register(TALKER, self._talker, generate=True, precision="exact")
        assert (
            client.generate(TALKER, self._prompts[0], max_new_tokens=1).text == ""
        )  # without a tokenizer the text is empty
        self._ask_gateway(PROBE, torch.ones(1, 16))

    def start(self) -> None:
        client = self._stage.checked.client
        for seed, name in enumerate(self._jobs):
            args = [str(seed), str(self._stop_file(name)), str(self._out(name))]
            client.train(self._script, name=name, args=args)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_TIMEOUT_S + 30)
            if thread.is_alive():
                self._history.violations.append(f"lane {thread.name} never came back")

    def finish_jobs(self) -> dict[str, Any]:
        """End both jobs; record a violation if their results differ from runs without a server."""
        rows = {}
        for name in self._jobs:
            self._stop_file(name).touch()
        client = self._stage.checked.client
        for seed, name in enumerate(self._jobs):
            with contextlib.suppress(errors.PipeSwitchError):
                client.job(name, "resume")
            task: Task = client.task(name)
            try:
                rows[name] = task.wait(120.0)
            except (errors.TaskFailed, TimeoutError) as error:
                log = "".join(task.logs())[-2000:]
                self._history.violations.append(f"{name}: {error!r} {task.status()} {log}")
                continue
            served = self._out(name).read_text()
            plain = self._stage.folder / f"{name}.plain"
            run_plain(self._script, str(seed), str(plain) + ".never", str(plain), served.split()[0])
            if plain.read_text() != served:
                self._history.violations.append(f"{name}: {served} is not {plain.read_text()}")
        return {
            name: {key: row.get(key) for key in ("step", "restarts", "state")}
            for name, row in rows.items()
        }

    def _stop_file(self, name: str) -> Path:
        return self._stage.folder / f"{name}.stop"

    def _out(self, name: str) -> Path:
        return self._stage.folder / f"{name}.out"

    def _run(self, name: str, lane: Callable[[random.Random], None]) -> None:
        try:
            lane(random.Random(f"{self._seed} {name}"))
        except Exception as error:
            self._history.violations.append(f"lane {name} ended by {error!r}")

    # ---- lanes ---------------------------------------------------------------------------------

    def _probe(self, _: random.Random) -> None:
        """Send requests to the model that has the lane's name."""
        x, name = torch.ones(1, 16), threading.current_thread().name
        with self._stage.client() as client:
            while not self._stop.wait(0.02):
                self._one(client, name, name, x, None, is_cancelled=False)

    def _infer(self, generator: random.Random) -> None:
        lane = threading.current_thread().name
        with self._stage.client() as client:
            while not self._stop.wait(generator.uniform(0.0, 0.2)):
                name = generator.choice(MODELS)
                x = torch.full((generator.randrange(1, 4), WIDTH), generator.random())
                deadline = generator.choice(DEADLINES_MS)
                is_cancelled = generator.random() < 0.05
                self._one(client, lane, name, x, deadline, is_cancelled=is_cancelled)

    def _one(
        self,
        client: Client,
        lane: str,
        name: str,
        x: torch.Tensor,
        deadline_ms: float | None,
        *,
        is_cancelled: bool,
    ) -> None:
        sent_at_s = time.monotonic()
        try:
            future = client.submit(name, x, deadline_ms=deadline_ms)
            if is_cancelled:
                future.cancel()
            (answer,) = future.result(ANSWER_TIMEOUT_S).outputs.values()
            kind = "ok" if is_bit_equal(answer, eager(self.modules[name], x)) else "wrong"
        except TimeoutError:
            kind = "no answer"
        except errors.ModelQuarantined:
            kind = "ModelQuarantined"
            with contextlib.suppress(errors.PipeSwitchError):
                client.load(name)  # ends the quarantine
                client.unload(name)
        except (errors.PipeSwitchError, CancelledError) as error:
            kind = type(error).__name__
        self._history.outcomes.append(
            Outcome(
                lane=lane,
                model=name,
                sent_at_s=sent_at_s,
                ended_at_s=time.monotonic(),
                kind=kind,
                may_fail=deadline_ms is not None or is_cancelled,
            )
        )

    def _sequences(self, generator: random.Random) -> None:
        """Compare each answer in a sequence with a plain loop's; repeat requests that failed."""
        with self._stage.client() as client:
            while not self._stop.wait(generator.uniform(0.0, 0.1)):
                self._one_sequence(client, generator, generator.choice(["cell", "recalls"]))

    def _one_sequence(self, client: Client, generator: random.Random, name: str) -> None:
        lane, kind, past = threading.current_thread().name, "ok", list[torch.Tensor]()
        began_at_s = time.monotonic()
        with client.sequence(name) as sequence:
            while kind not in GONE and len(past) < 20 and not self._stop.is_set():
                shape = (1, generator.randrange(1, 5), 8) if name == "recalls" else (1, 8)
                x = torch.full(shape, generator.uniform(-1.0, 1.0))
                # A growing state has no initial value, so the first request brings it.
                brought = {"past": torch.zeros(1, 1, 8)} if name == "recalls" and not past else {}
                expected, after = self._after(name, x, [*brought.values(), *past])
                sent_at_s = time.monotonic()
                try:
                    actual = torch.as_tensor(sequence.infer(x=x, **brought)["y"])
                    kind, past = "ok" if is_bit_equal(actual, expected) else "wrong", after
                except errors.PipeSwitchError as error:
                    kind = type(error).__name__
                since_s = began_at_s if kind in GONE else sent_at_s
                outcome = Outcome(lane, name, since_s, time.monotonic(), kind)
                self._history.outcomes.append(outcome)

    def _after(
        self, name: str, x: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the expected answer to ``x`` after the state ``past``, and the next state."""
        if name == "cell":
            out = eager(self._cell, x, *(past[-2:] or _cell_state(1)))
            return out["y"], [*past, out["h_out"], out["c_out"]]
        out = eager(self._recalls, x, torch.cat(past, 1))
        return out["y"], [*past, out["rows"]]

    def _generate(self, generator: random.Random) -> None:
        """Compare each generation with the greedy tokens of the model without a server."""
        lane = threading.current_thread().name
        with self._stage.client() as client:
            while not self._stop.wait(generator.uniform(0.0, 0.1)):
                number = generator.randrange(len(self._prompts))
                count, kind = generator.randrange(1, MOST_TOKENS + 1), "wrong"
                expected, ids = self._answers[number][:count], list[int]()
                sent_at_s = time.monotonic()
                try:
                    prompt = self._prompts[number]
                    for token in client.generate(TALKER, prompt, max_new_tokens=count):
                        ids.append(token.id)
                    kind = "ok" if ids == expected else "wrong"
                except errors.PipeSwitchError as error:
                    kind = type(error).__name__ if ids == expected[: len(ids)] else "wrong"
                outcome = Outcome(lane, TALKER, sent_at_s, time.monotonic(), kind)
                self._history.outcomes.append(outcome)

    def _raw(self, generator: random.Random) -> None:
        """Send requests through a raw connection, because the SDK would hide duplicate replies."""
        with contextlib.closing(RawClient(self._stage.address)) as raw:
            number = 0
            while not self._stop.wait(generator.uniform(0.02, 0.1)):
                number += 1
                sent_at_s = time.monotonic()
                raw.ask(f"raw-{number}", generator.choice(MODELS))
                kinds = raw.listen(f"raw-{number}", self._stop)
                for kind in kinds:
                    self._history.outcomes.append(
                        Outcome("raw", "", sent_at_s, time.monotonic(), kind)
                    )

    def _http(self, generator: random.Random) -> None:
        """Send requests to the gateway, each on a new connection."""
        while not self._stop.wait(generator.uniform(0.0, 0.1)):
            name = generator.choice(MODELS)
            x = torch.full((1, WIDTH), generator.random())
            sent_at_s = time.monotonic()
            kind = self._ask_gateway(name, x)
            self._history.outcomes.append(Outcome("http", name, sent_at_s, time.monotonic(), kind))

    def _ask_gateway(self, name: str, x: torch.Tensor) -> str:
        tensor = {"name": "x", "datatype": "FP32", "shape": [*x.shape], "data": x.tolist()}
        caller = http.client.HTTPConnection(self._stage.http_address, timeout=ANSWER_TIMEOUT_S)
        try:
            caller.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}))
            answer = caller.getresponse()
            body = json.loads(answer.read())
        except TimeoutError:
            return "no answer"
        except (OSError, http.client.HTTPException):
            return "hung up"
        finally:
            caller.close()
        if answer.status != 200:
            return str(body["code"])
        (output,) = body["outputs"]
        actual = torch.tensor(output["data"]).reshape(output["shape"])
        return "ok" if is_bit_equal(actual, eager(self.modules[name], x)) else "wrong"

    def _control(self, generator: random.Random) -> None:
        """Register and unregister models, pause and resume jobs, and query statistics."""
        with self._stage.client() as client:
            while not self._stop.wait(generator.uniform(0.2, 0.6)):
                draw = generator.random()
                with contextlib.suppress(
                    errors.RegistrationRefused,
                    errors.AlreadyExists,
                    errors.ModelNotFound,
                    errors.ServerUnavailable,
                    errors.PipeSwitchError,
                ):
                    if draw < 0.4:
                        name = f"extra-{generator.randrange(2)}"
                        client.register(name, mlp(16, 1, 3), example_inputs=(torch.zeros(1, 16),))
                        client.unregister(name)
                    elif draw < 0.6:
                        client.job(generator.choice(self._jobs), "pause")
                    elif draw < 0.9:
                        for name in self._jobs:
                            client.job(name, "resume")
                    else:
                        client.stats()


def _cell_state(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch, CELL_WIDTH), torch.zeros(batch, CELL_WIDTH)


def talker(folder: Path) -> Any:
    """Return a small language model that does not repeat a single token."""
    import transformers

    published(folder, transformers.AutoModelForCausalLM, scale=8.0)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """Return the greedy tokens of the model run without a server."""
    with torch.no_grad():
        output = model.generate(torch.tensor([ids]), max_new_tokens=MOST_TOKENS, do_sample=False)
    return [int(one) for one in output[0, len(ids) :]]


class RawClient:
    """Client that gets every reply, even duplicates, and reconnects if its connection has ended."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._peer: RawPeer | None = None
        self._session = ""
        self._answered: set[str] = set()

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def ask(self, request_id: str, model: str) -> None:
        payload = np.full((1, WIDTH), 0.5, np.float32)
        tensor = frames.WireTensor(name="", dtype="float32", shape=(1, WIDTH), frame=0)
        with contextlib.suppress(OSError, EOFError):
            peer = self._greeted()
            header = frames.RequestHeader(
                v=1, id=request_id, op="infer", model=model, session=self._session, inputs=(tensor,)
            )
            peer.send(frames.encode_header(header), payload.tobytes())

    def _greeted(self) -> RawPeer:
        if self._peer is None:
            self._peer = RawPeer(self._address)
            self._session = ask(self._peer, op="hello").session
        return self._peer

    def listen(self, request_id: str, stop: threading.Event) -> list[str]:
        """Return the kinds of replies up to this request's; the next call finds late duplicates."""
        kinds: list[str] = []
        ends_at_s = time.monotonic() + CONTROLLER_GRACE_S
        while self._peer is not None and time.monotonic() < ends_at_s:
            try:
                message = self._peer.next_message(0.5)
            except EOFError:
                break
            reply = None if message is None else frames.decode_reply(message.parts)
            if reply is None or reply.more or not reply.id.startswith("raw-"):
                continue
            if reply.id in self._answered:
                kinds.append("duplicate")
                continue
            self._answered.add(reply.id)
            kinds.append("ok" if reply.error is None else reply.error.type)
            if reply.id == request_id:
                return kinds
        self.close()
        return [*kinds, "no answer to a raw request"]
