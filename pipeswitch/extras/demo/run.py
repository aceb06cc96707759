"""``pipeswitch demo``: a real server, three models and a training job, with measured costs.

In order: start a server whose arena holds about two of the three models; register them, and one of
them in precision ``fast``, too; train (``demo.digits``); send Poisson requests that alternate over
these four; stop. Then measure the two baselines (``demo.baselines``) on the same machine. Every
number shown is measured in this run. This process never imports torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ... import __version__
from ...base.errors import PipeSwitchError, TaskFailed
from ...base.machine import processor_name
from ...cli.infer import RequestOutcome, instants
from ...client.client import Client, Task
from ...testing import RunningServer, server
from ..page.browser import open_page, page_url
from . import report as demo_report
from .digits import check_digits

JOB: Final = "digits"
ENTRY: Final = "pipeswitch.extras.demo.digits:main"
START_WAIT_S: Final = 60.0  # limit for the job's first step
END_WAIT_S: Final = 120.0  # limit for the job's last epoch
BASELINE_TIMEOUT_S: Final = 300.0
INTERRUPTED: Final = 130  # exit status of a shell after SIGINT
SHOW_PER_S: Final = 0.7  # rate of requests while the page is open: the job trains between them
LOG_LINES: Final = 15  # number of the server's log lines shown after a failure
TOLERANCE: Final = 1e-3  # largest difference of an answer from the plain model's; normally 0
FAST_TOLERANCE: Final = 1e-3  # like TOLERANCE for precision fast, relative to the largest output
FAST: Final = "-fast"  # suffix of a model's name in precision fast


@dataclass(frozen=True)
class DemoModel:
    """A model to serve, and the inputs of one request."""

    source: str
    inputs: Mapping[str, tuple[tuple[int, ...], str]]


BERT: Final = DemoModel(
    "hf:bert-base-uncased", {"input_ids": ((1, 32), "int64"), "attention_mask": ((1, 32), "int64")}
)
VIT: Final = DemoModel("torchvision:vit_b_16", {"x": ((1, 3, 224, 224), "float32")})


def _default_models() -> dict[str, DemoModel]:
    """Return the README's models; without transformers, a vision transformer replaces BERT."""
    has_bert = importlib.util.find_spec("transformers") is not None
    return {
        "resnet152": DemoModel("torchvision:resnet152", {"x": ((1, 3, 128, 128), "float32")}),
        "inception_v3": DemoModel("torchvision:inception_v3", {"x": ((1, 3, 160, 160), "float32")}),
        **({"bert-base": BERT} if has_bert else {"vit_b_16": VIT}),
    }


@dataclass(frozen=True)
class Plan:
    """Plan of a run; the defaults are small enough for two cores."""

    models: Mapping[str, DemoModel] = field(default_factory=_default_models)
    fast: str = "inception_v3"  # the model that is served in precision fast, too
    weights: str = "random:0"
    arena: str = "704MiB"  # room for two of the models and the job, so that requests switch models
    host_store: str = "1GiB"
    requests: int = 32  # eight for each model, and for the one in precision fast
    load: float = 0.4  # share of time that requests should take; it sets their rate
    alone_s: float = 3.0  # length of each measurement of training without requests
    start_rounds: int = 1  # stop-and-start trials per model
    seed: int = 0


def run(out: Path, *, as_json: bool = False, plan: Plan | None = None) -> int:
    """Run the demo, print its table, write ``demo.json`` and ``demo-timeline.json``.

    Args:
        out: folder for the two files; created if it is missing.
        as_json: print the result as JSON on stdout, and everything else on stderr.
        plan: sizes and models; by default the README's.

    Returns:
        0; 1 if a request failed, a step was lost, or an answer differs from the plain model's;
        130 after Ctrl-C.
    """
    plan = plan or Plan()
    check_digits()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipeSwitchError(f"cannot write to {str(out)!r}: {error.strerror}") from None
    console = Console(stderr=as_json, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="pipeswitch-demo-") as folder:
            result = Demo(plan, console, Path(folder), out).run()
    except KeyboardInterrupt:
        console.print("interrupted: the server has stopped, and its files were removed")
        return INTERRUPTED
    (out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    demo_report.show(result, console)
    console.print(f"written: {out / 'demo.json'}, {out / 'demo-timeline.json'} (opens in Perfetto)")
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    for problem in result["problems"]:
        console.print(f"✘ {problem}", style="bold red")
    return 1 if result["problems"] else 0


def show(plan: Plan | None = None) -> int:
    """Serve the demo's models while its job trains, send a request now and then, open the page.

    Returns:
        130, after Ctrl-C ends it.
    """
    check_digits()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="pipeswitch-demo-") as folder:
        try:
            Demo(plan or Plan(), console, Path(folder), Path(folder)).stay()
        except KeyboardInterrupt:
            console.print("interrupted: the server has stopped, and its files were removed")
        return INTERRUPTED


class Demo:
    """One run of the demo. ``folder`` is temporary, ``out`` belongs to the user."""

    def __init__(self, plan: Plan, console: Console, folder: Path, out: Path) -> None:
        self._plan, self._console = plan, console
        self._folder, self._out, self._plan_file = folder, out, folder / "plan.json"
        self._inputs: dict[str, list[Any]] = {}
        self._expected: dict[str, Any] = {}  # each model's answer to its inputs before the job
        self._threads = 1

    def run(self) -> dict[str, Any]:
        """Run all phases; return the content of ``demo.json``."""
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            with self._started() as (running, client):
                self._threads = int(client.about()["threads"])
                facts = {"threads": self._threads, "folder": str(self._folder)}
                self._plan_file.write_text(json.dumps(asdict(self._plan) | facts))
                # The baseline builds its models on another core while the server builds.
                ready = stack.enter_context(_baseline("ready", self._plan_file))
                served = self._serve(running, client, ready)
            baselines = self._baselines(ready, served.pop("schedule"))
        result = {**served, **baselines, "took_s": round(time.monotonic() - began_s, 1)}
        result["largest_difference"] = max(
            served["largest_change"], *baselines["differences"].values()
        )
        return {**result, "problems": _problems(result)}

    def stay(self) -> None:
        """Serve until interrupted; send requests at random times to the models in turn."""
        with self._started(http=True) as (_, client):
            self._register(client, self._plan.models)
            self._warm_up(client)
            job = client.train(ENTRY, name=JOB, args=["--epochs", "100000"])
            self._wait_for_first_step(client, job)
            url = page_url(client.about())
            if not open_page(url, self._folder):
                self._console.print("no browser found; the page is at")
            self._console.print(url, style="bold", soft_wrap=True)
            self._console.print("Ctrl-C ends it")
            chance = random.Random(self._plan.seed)
            for name in itertools.cycle(self._plan.models):
                time.sleep(chance.expovariate(SHOW_PER_S))
                client.infer(name, self._inputs[name])

    @contextlib.contextmanager
    def _started(self, *, http: bool = False) -> Iterator[tuple[RunningServer, Client]]:
        plan = self._plan
        if "bert-base" not in plan.models and "vit_b_16" in plan.models:
            self._say("transformers is not installed: vit_b_16 stands in for bert-base")
        self._console.print("starting a server on the cpu device …")
        with contextlib.ExitStack() as stack:
            context = server(arena=plan.arena, host_store=plan.host_store, http=http)
            try:
                with self._console.status("starting its processes"):  # shows that it lives
                    running = stack.enter_context(context)
            except RuntimeError as error:  # its text has the server's output
                raise PipeSwitchError(str(error).strip()) from None
            stack.enter_context(self._log_on_failure(running))
            yield running, stack.enter_context(running.client())

    # ---- our side ------------------------------------------------------------------------------

    def _serve(
        self, running: RunningServer, client: Client, ready: subprocess.Popen[str]
    ) -> dict[str, Any]:
        about = client.about()
        _, _, facts = running.ready_line.partition(" device ")
        self._say(f"device {facts}, {self._threads} compute thread(s)")
        fast_name = self._plan.fast + FAST
        self._register(client, [*self._plan.models, fast_name])
        with self._console.status("first requests to each model"):
            rate_per_s = self._warm_up(client)
            client.infer(fast_name, self._inputs[self._plan.fast])
            if ready.stdout is not None:  # its models are built: it computes nothing meanwhile
                ready.stdout.readline()
        training_began_s = time.monotonic()
        stop_file = self._folder / "stop"
        job = client.train(
            ENTRY, name=JOB, args=["--epochs", "100000", "--stop-file", str(stop_file)]
        )
        self._wait_for_first_step(client, job)
        before = self._measure_alone(job, "alone, before the requests")
        start = _steps(job)
        due = list(instants("poisson", rate_per_s, self._plan.requests, self._plan.seed))
        outcomes = self._send(client, due)
        end = _steps(job)
        after = self._measure_alone(job, "alone, after the requests")
        stop_file.touch()
        with self._bar("training its last epoch", 1) as advance:
            ended = job.wait(END_WAIT_S)
            advance()
        seconds = time.monotonic() - training_began_s
        (self._out / "demo-timeline.json").write_text(json.dumps(client.trace(seconds)))
        stats, exact = client.stats(), [one for one in outcomes if one[0] != fast_name]
        fast = [one for one in outcomes if one[0] == fast_name]
        return {
            **self._facts(about, rate_per_s),
            **_answers(exact),
            "largest_change": max(self._change(*one) for one in exact),
            "fast": _answers(fast) | {"largest_error": max(self._error(*one) for one in fast)},
            "training": _training(ended, before, _between(start, end), after, outcomes)
            | {"accuracy_percent": _accuracy_percent(job)},
            "switches": stats["switches"],
            "transmitted_bytes": stats["transmitted_bytes"],
            "schedule": list(zip(due, self._turns(), strict=True)),
        }

    def _facts(self, about: Mapping[str, Any], rate_per_s: float) -> dict[str, Any]:
        import importlib.metadata as metadata

        return {
            "machine": {
                "cpu": processor_name(),
                "cores": len(os.sched_getaffinity(0)),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "torch": metadata.version("torch"),
            },
            "pipeswitch_version": __version__,
            "device": about["device"],
            "arena_bytes": about["arena_bytes"],
            "threads": self._threads,
            "rate_per_s": round(rate_per_s, 3),
            "plan": asdict(self._plan),
        }

    def _register(self, client: Client, names: Iterable[str]) -> None:
        with self._progress() as progress:
            for name in names:
                model = self._plan.models[name.removesuffix(FAST)]
                line = progress.add_task(f"registering {name}", total=1.0)

                def show(stage: str, fraction: float, line: Any = line, name: str = name) -> None:
                    text = f"registering {name}: {stage}"
                    progress.update(line, description=text, completed=fraction)

                row = client.register(
                    name,
                    model.source,
                    weights=self._plan.weights,
                    inputs=dict(model.inputs),
                    precision="fast" if name.endswith(FAST) else "exact",
                    progress=show,
                )
                progress.remove_task(line)
                self._say(
                    f"registered {name}: {int(row['bytes']) / (1 << 20):.0f} MiB "
                    f"in {row['groups']} layer groups"
                )

    def _warm_up(self, client: Client) -> float:
        """Send two requests to each model, keep the answers; return the request rate per second."""
        totals_ms = []
        for name in self._plan.models:
            self._inputs[name] = client.signature(name).random(seed=self._plan.seed)
            np.savez(
                self._folder / f"{name}.inputs.npz",
                **{f"{index:02}": value for index, value in enumerate(self._inputs[name])},
            )
            client.infer(name, self._inputs[name])
            answer = client.infer(name, self._inputs[name])
            totals_ms.append(answer.timing.total_ms)
            self._expected[name] = next(iter(answer.outputs.values()))
            np.save(self._folder / f"{name}.answer.npy", self._expected[name])
        return self._plan.load * 1000.0 / demo_report.mean(totals_ms)

    def _wait_for_first_step(self, client: Client, job: Task) -> None:
        with self._console.status(f'the job "{JOB}" starts'):
            for record in client.events("job.", timeout_s=START_WAIT_S):
                if record["topic"] == "job.progress" and int(record["step"]) > 0:
                    self._say(f'training "{JOB}": a CNN on scikit-learn\'s digits')
                    return
                if record["topic"] == "job.failed":
                    break
        raise TaskFailed(f"the training job made no step: {job.status()['error'] or 'no error'}")

    def _measure_alone(self, job: Task, what: str) -> tuple[float, int]:
        """Return seconds and steps of a window without requests, which this method waits for."""
        begin = _steps(job)
        parts = 20
        with self._bar(f"training {what}", parts) as advance:
            for _ in range(parts):
                time.sleep(self._plan.alone_s / parts)
                advance()
        seconds, steps = _between(begin, _steps(job))
        self._say(f"training {what}: {steps / seconds:.1f} steps/s")
        return seconds, steps

    def _turns(self) -> list[str]:
        """Return the name of the model for each request: all models in turn, then the fast one."""
        names = [*self._plan.models, self._plan.fast + FAST]
        return [names[index % len(names)] for index in range(self._plan.requests)]

    def _send(self, client: Client, due: list[float]) -> list[tuple[str, RequestOutcome]]:
        """Send the requests in an open loop: a slow answer does not delay the next request."""
        sent = []
        with self._bar(
            f"{len(due)} requests, Poisson, alternating over {len(set(self._turns()))} models",
            len(due),
        ) as advance:
            begin_s = time.perf_counter()
            for index, (due_s, name) in enumerate(zip(due, self._turns(), strict=True)):
                time.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
                outcome = RequestOutcome(index)
                at_s = time.perf_counter()
                future = client.submit(name, self._inputs[name.removesuffix(FAST)])
                future.add_done_callback(_keeper(outcome, at_s, advance))
                sent.append((name, outcome, future))
            for _, _, future in sent:
                with contextlib.suppress(PipeSwitchError):  # its outcome has the error
                    future.result()
        return [(name, outcome) for name, outcome, _ in sent]

    def _change(self, name: str, outcome: RequestOutcome) -> float:
        """Return the largest difference from the answer to the same input before the job."""
        if outcome.result is None:
            return 0.0  # reported as an error
        answer = next(iter(outcome.result.outputs.values()))
        return float(np.abs(answer - self._expected[name.removesuffix(FAST)]).max())

    def _error(self, name: str, outcome: RequestOutcome) -> float:
        """Return an answer's error relative to the largest output of the exact model."""
        largest = float(np.abs(self._expected[name.removesuffix(FAST)]).max())
        return self._change(name, outcome) / (largest or 1.0)

    # ---- the baselines -------------------------------------------------------------------------

    def _baselines(
        self, ready: subprocess.Popen[str], schedule: list[tuple[float, str]]
    ) -> dict[str, Any]:
        turns = [(due_s, name.removesuffix(FAST)) for due_s, name in schedule]
        with self._bar("ready model: the same requests, no training", 1) as advance:
            result = _result(ready, json.dumps(turns))
            advance()
        pairs = list(zip(self._turns(), result["latencies_ms"], strict=True))
        fast = [(name, value_ms) for name, value_ms in pairs if name.endswith(FAST)]
        starts_ms: list[tuple[str, float]] = []
        names = list(self._plan.models) * self._plan.start_rounds
        with self._bar("stop-and-start: a new process for each request", len(names)) as advance:
            for name in names:
                began_s = time.perf_counter()
                with _baseline("start", self._plan_file, name) as process:
                    _result(process)
                starts_ms.append((name, (time.perf_counter() - began_s) * 1000.0))
                advance()
        return {
            "ready_model": _latencies([pair for pair in pairs if pair not in fast]),
            "ready_model_in_fast_turns": _latencies(fast),
            "stop_and_start": _latencies(starts_ms),
            "differences": result["differences"],
        }

    # ---- the screen ----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._console.print(f"✔ {text}")

    def _progress(self) -> Progress:
        columns = (TextColumn("▶ {task.description}"), BarColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)

    @contextlib.contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar of ``total`` parts; call the yielded function once for each part."""
        columns = (
            TextColumn("▶ {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            line = progress.add_task(title, total=total)
            yield lambda: progress.advance(line)

    @contextlib.contextmanager
    def _log_on_failure(self, running: RunningServer) -> Iterator[None]:
        try:
            yield
        except Exception:
            lines = running.log().splitlines()[-LOG_LINES:]
            self._console.print(f"--- the last {len(lines)} lines of the server's logs:")
            for line in lines:
                self._console.print(line[:400], markup=False, style="dim")
            raise


def _keeper(
    outcome: RequestOutcome, at_s: float, advance: Callable[[], None]
) -> Callable[[Any], None]:
    """Return a callback for the client's thread, which records the answer of a request."""

    def keep(future: Any) -> None:
        outcome.total_ms = (time.perf_counter() - at_s) * 1000.0
        error = future.exception()
        if error is None:
            outcome.result = future.result()
        elif isinstance(error, PipeSwitchError):
            outcome.error = error
        else:
            outcome.error = PipeSwitchError(f"{type(error).__name__}: {error}")
        advance()

    return keep


def _steps(job: Task) -> tuple[float, int]:
    """Return the time in seconds and the job's finished steps, at most 0.1 s old."""
    return time.monotonic(), int(job.status()["step"])


def _between(begin: tuple[float, int], end: tuple[float, int]) -> tuple[float, int]:
    return end[0] - begin[0], end[1] - begin[1]


def _latencies(pairs: list[tuple[str, float]]) -> dict[str, Any]:
    by_model: dict[str, list[float]] = {}
    for name, value_ms in pairs:
        by_model.setdefault(name, []).append(value_ms)
    return {
        **demo_report.latency([value_ms for _, value_ms in pairs]),
        "by_model": {name: demo_report.latency(values) for name, values in by_model.items()},
    }


def _answers(outcomes: list[tuple[str, RequestOutcome]]) -> dict[str, Any]:
    good = [(name, o) for name, o in outcomes if o.result is not None]
    errors = [str(o.error) for _, o in outcomes if o.error is not None]
    if not good:
        raise TaskFailed(f"no request was answered: {errors[0]}")
    timings = [o.result.timing.as_dict() for _, o in good if o.result is not None]
    latencies = _latencies([(name, o.total_ms) for name, o in good])
    requests = [{"model": name, **o.row()} for name, o in outcomes]
    return {
        "pipeswitch": {**latencies, **demo_report.timing_summary(timings)},
        "errors": errors,
        "requests": requests,
    }


def _training(
    ended: Mapping[str, Any],
    before: tuple[float, int],
    under: tuple[float, int],
    after: tuple[float, int],
    outcomes: list[tuple[str, RequestOutcome]],
) -> dict[str, Any]:
    timings = [o.result.timing for _, o in outcomes if o.result is not None]
    busy_ms = sum(timing.compute_ms + timing.stall_ms for timing in timings)  # time with the turn
    return {
        **demo_report.kept_speed(before, under, after, busy_ms),
        "state": ended["state"],
        "steps": ended["step"],
        "steps_lost": ended["steps_recomputed"],
        "suspensions": ended["suspensions"],
        "evictions": ended["evictions"],
        "error": ended["error"],
    }


def _accuracy_percent(job: Task) -> float:
    """Return the accuracy in percent, from the last line of the script's output."""
    for line in reversed("".join(job.logs()).splitlines()):
        name, _, value = line.strip().rpartition("test_accuracy=")
        if name:
            return round(100.0 * float(value), 2)
    raise TaskFailed("the training job ended without an accuracy")


def _problems(result: Mapping[str, Any]) -> list[str]:
    """Return everything in the result that must not happen in a demo."""
    training = result["training"]
    problems = [f"request failed: {text}" for text in result["errors"]]
    if training["state"] != "done":
        problems.append(f"the training job is {training['state']}: {training['error']}")
    if training["steps_lost"]:
        problems.append(f"{training['steps_lost']} training steps had to be recomputed")
    problems += [f"request failed in precision fast: {text}" for text in result["fast"]["errors"]]
    if not result["fast"]["largest_error"] <= FAST_TOLERANCE:
        problems.append(f"precision fast: the error is {result['fast']['largest_error']}")
    if not result["largest_difference"] <= TOLERANCE:
        problems.append(
            f"an answer differs from the plain model's by {result['largest_difference']}"
        )
    return problems


@contextlib.contextmanager
def _baseline(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start a baseline's process; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeswitch.extras.demo.baselines", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _result(process: subprocess.Popen[str], order: str = "") -> dict[str, Any]:
    """Send ``order`` to a baseline, and wait for its end; return its result.

    Raises:
        PipeSwitchError: it failed; the text has the end of its stderr.
    """
    output, errors = process.communicate(order, timeout=BASELINE_TIMEOUT_S)
    if process.returncode:
        raise PipeSwitchError(f"a baseline failed: {errors.strip()[-500:]}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
