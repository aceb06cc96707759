"""``simulate``: run the server's own scheduler on a trace, without a server, in virtual time."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ...base.codec import UNREADABLE
from ...base.config import JOB_ORDERS, policy_name
from ...base.errors import InvalidInput
from ...base.quantiles import percentile
from ...base.units import format_bytes, nearest, parse_ms, parse_size, short_bytes
from ...cli import common, views
from ...policies import find_policy
from ...programs.interface.layout import Batching
from ...scheduler.timeline import Timeline
from ...watchdog import PolicyWatchdog
from . import arrivals
from . import profile as profiles
from .costs import MIB, Costs, Link
from .replay import (
    ENDLESS,
    Outcome,
    PaperJob,
    PaperModel,
    Setting,
    link_of,
    paper_model,
    quantile_ms,
    replay,
    serial,
)
from .simulated_cluster import Cluster, place

FUNCTIONS: Final = "azure_functions_2019_100fn_invocations.csv"
SERVICES: Final = ("azure_llm_2023_code_15min.csv", "azure_llm_2023_conv_15min.csv")
SPEED_UPS: Final = {"azure": 20.0}  # factor by which a trace is sped up; others: 1
MAX_NUMBER: Final = 1e9  # no useful value is larger; a product of three such numbers stays finite
MAX_FILE_BYTES: Final = 256 << 20
RANDOM_BYTES: Final = 200 * MIB  # median size of random models
RANDOM_MS: Final = 14.0  # median computing time on a device of factor 1
SPREAD: Final = 0.5  # sigma of the logarithms of size and time
SERIAL: Final = "serial"  # reference without overlap; not a policy of the server
HANGS_AFTER_S: Final = 30.0  # limit for a call of a policy, like ``[server] watchdog``
LAYERS: Final = 8  # number of layer groups of a model without a profile
SHARES: Final = (6, 25)  # default memory, in percent of the models' bytes
OF_REQUESTS: Final = ("policy", "in_slo", "p50_ms", "p99_ms", "refused", "switches", "copied")
OF_JOBS: Final = (
    "training",
    "job",
    "at_ms",
    "jct_ms",
    "share",
    "trained_s",
    "preempted_s",
    "evictions",
)
OF_NODES: Final = ("nodes", "moved_bytes", "failures", "resent")
JOB: Final = "NAME:STEPS:STEP:MEMORY[@AT]"
REQUESTS: Final = 200_000  # default number for a cluster, which takes some minutes


Run = tuple[str, Setting, Outcome, dict[str, Any]]  # str: memory label; dict: placement's counters


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """A model's row in the file of ``--models``."""

    name: str
    bytes: int
    compute_ms: float
    layers: int = LAYERS
    shares_with: str = ""  # the model of which it is a variant; its last layers differ
    shared_bytes: int = 0


@dataclass(frozen=True)
class Hardware:
    """A device's link, and its computing time relative to the device that was measured."""

    name: str
    link: Link
    compute_factor: float
    is_estimate: bool


@click.command()
@click.argument("trace")
@click.option(
    "--models",
    metavar="FILE|random[:COUNT]",
    default="random",
    show_default=True,
    help='A JSON file: [{"name": …, "bytes": …, "compute_ms": …}].',
)
@click.option("--from-server", is_flag=True, help="Take the running server's models and profiles.")
@click.option(
    "--policy",
    "policies",
    default="fifo,priority",
    show_default=True,
    help="Policies to compare: the server's, your own (module:name), or serial.",
)
@click.option(
    "--device",
    default="v100-pcie3",
    show_default=True,
    help="Device: a100-pcie4, h100-pcie5, …, or a profile (pipeswitch profile --json).",
)
@click.option(
    "--memory",
    help="Device memory: sizes, or shares of all models' and jobs' bytes (6%,25%; default with "
    "jobs: 100%).",
)
@click.option(
    "--job",
    "jobs",
    metavar=JOB,
    multiple=True,
    help="A training job: a:400:10ms:1GiB, b:50:5ms:1GiB@2s; repeatable.",
)
@click.option(
    "--training",
    default="rotate",
    show_default=True,
    help=f"Orders of jobs to compare: {', '.join(JOB_ORDERS)}.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Maximum number of requests in a batch.")
@click.option(
    "--batch-delay", default="0", show_default=True, help="How long a request waits for others."
)
@click.option(
    "--batch-row",
    metavar="SHARE",
    help="Computing time of each further row of a batch (default: as measured, else 100%).",
)
@click.option(
    "--tokens", "has_tokens", is_flag=True, help="With azure-llm: generate answers token by token."
)
@click.option(
    "--prompt-token",
    metavar="SHARE",
    default="0.5%",
    show_default=True,
    help="Computing time of each prompt token, as a share of a step's.",
)
@click.option("--slo", default="100ms", show_default=True, help="Allowed delay of a request.")
@click.option("--max-wait", default="2s", show_default=True, help="Like the server's max_wait.")
@click.option(
    "--admission/--no-admission",
    default=False,
    help="Refuse requests at once if they would miss their deadline.",
)
@click.option(
    "--look-ahead/--no-look-ahead",
    default=True,
    help="Copy the next request's model while the device computes.",
)
@click.option(
    "--deadlines/--no-deadlines", default=False, help="Use --slo as the deadline of the requests."
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Simulate a cluster of this many machines.",
)
@click.option("--devices", type=click.IntRange(1, 64), help="Devices of each machine (default: 1).")
@click.option(
    "--tiles",
    type=click.IntRange(1, 100_000),
    help="Number of clients, each with its own models and its own start in the trace "
    "(default: as many as devices).",
)
@click.option("--failures", metavar="SHARE", help="Share of the nodes that die within an hour.")
@click.option(
    "--need",
    metavar="SHARE",
    help="Find the fewest nodes (up to N) that answer this share in time.",
)
@click.option("--speed-up", metavar="NUMBER", help="Speed of the trace (azure: 20, others: 1).")
@click.option("--requests", type=click.IntRange(min=1), help="Number of requests.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--csv", "as_csv", is_flag=True, help="Print a row of CSV for each run.")
@click.option("--plot", type=click.Path(dir_okay=False), help="File for a picture.")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False),
    help="File for a timeline of the last switches, as from `pipeswitch trace`.",
)
@common.json_option
def simulate(trace: str, as_json: bool, **options: Any) -> None:
    """Show how policies, devices or memory sizes would serve a trace of requests and jobs.

    TRACE is azure (49,317 requests of 100 functions), azure-llm, poisson:RATE (per second), a file
    with the lines at_ms,model, or none (only jobs). The scheduler is the server's own, the device
    is simulated.
    """
    with _ends_all_the_same():
        _compare(trace, as_json, options)


@contextlib.contextmanager
def _ends_all_the_same() -> Iterator[None]:
    """Run policies within the block; end the process if one hangs, or at an interrupt."""

    def leave(*_: object) -> None:
        Console(stderr=True).show_cursor()  # the progress bar hides it
        os._exit(common.EXIT_INTERRUPTED)

    watchdog = PolicyWatchdog(HANGS_AFTER_S, (2,))
    default = signal.signal(signal.SIGINT, leave)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
        signal.signal(signal.SIGINT, default)


class _Comparison:
    """Checked options and what they name: a trace, models, jobs, a device or a cluster."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        args: Any = SimpleNamespace(**options)
        self.given = args
        if args.plot is not None:
            args.plot = common.checked_plot(Path(args.plot))
        if args.timeline is not None:
            common.check_folder("--timeline", Path(args.timeline))
            args.timeline = common.suffixed(args.timeline, ".json")
        self.policies = _words(args.policies)
        self.max_wait_ms = _read("--max-wait", args.max_wait, parse_ms)
        is_serial = SERIAL in self.policies
        sys.path.append(os.getcwd())  # for policies of the user's own
        for policy in self.policies:
            if policy != SERIAL:
                _read("--policy", policy, policy_name)
                find_policy(policy, max_wait_ms=self.max_wait_ms)
        self.slo_ms, self.jobs = _read("--slo", args.slo, parse_ms), _jobs(args.jobs)
        self.orders = _orders(args.training)[: None if self.jobs else 1]
        if self.jobs and is_serial:
            raise InvalidInput(f"{SERIAL} does not simulate jobs", hint="leave out that policy")
        speed_up = args.speed_up or str(SPEED_UPS.get(name, 1.0))
        self.speed_up = _read("--speed-up", speed_up, _positive)
        if args.has_tokens and (name != "azure-llm" or is_serial):
            raise InvalidInput("--tokens needs the trace azure-llm, and excludes the policy serial")
        self.prompt_share = _read("--prompt-token", args.prompt_token, _share)
        self.cluster = _cluster(args)
        if self.cluster and (self.jobs or args.timeline or is_serial or name == "none"):
            raise InvalidInput(
                f"--nodes excludes --job, --timeline, {SERIAL} and the trace none",
                hint="pipeswitch simulate azure --nodes 3",
            )
        self._load(name)

    def _load(self, name: str) -> None:
        """Read the trace, and assign a model to each model name in it."""
        args, cluster = self.given, self.cluster
        trace, names = _trace(
            name, self.speed_up, args.seed, args.requests, has_tokens=args.has_tokens
        )
        self.hardware, model_count = _hardware(args.device), trace.model_count
        if cluster:
            trace = arrivals.tiled(trace, cluster.tiles, args.requests or REQUESTS, args.seed)
        self.trace_name, self.requests = trace.name, trace.arrivals[: args.requests]
        if not self.requests and not self.jobs:
            raise InvalidInput(
                "there is nothing to simulate",
                hint="raise --requests" if cluster else f"--job {JOB}",
            )
        if args.plot and not self.requests:
            raise InvalidInput("--plot: no requests to draw", hint="--timeline J.json draws jobs")
        used = []
        if self.requests:
            factor = self.hardware.compute_factor
            known = (
                _served()
                if args.from_server
                else _models(args.models, model_count, factor, args.seed)
            )
            used = _assigned(known, names, model_count)
        self.are_random = bool(used) and args.models.startswith("random") and not args.from_server
        self.models = _joined(used, args.batch, args.batch_delay, args.batch_row)
        self.sizes = {model.name: model.size_bytes for model in self.models}

    def settings(self) -> list[tuple[str, Setting]]:
        """Return each combination of memory, policy and order of jobs, with the memory's label."""
        args, link = self.given, self.hardware.link
        needed = {**self.sizes, **{f"job {job.name}": job.memory_bytes for job in self.jobs}}
        if args.memory is None:
            percents = (100,) if self.jobs else SHARES[bool(self.cluster) :]
            memories = _shares(percents, needed)
        else:
            memories = _words(args.memory)
        return [
            (
                label,
                Setting(
                    memory_bytes=size_bytes,
                    costs=Costs(to_device=link, to_host=link),
                    training=order,
                    policy=policy,
                    slo_ms=self.slo_ms,
                    look_ahead=args.look_ahead,
                    own=partial(find_policy, policy, max_wait_ms=self.max_wait_ms),
                    has_deadlines=args.deadlines or args.admission,
                    admission="deadline" if args.admission else "off",
                    max_wait_ms=self.max_wait_ms,
                    prompt_share=self.prompt_share if args.has_tokens else 0.0,
                ),
            )
            for label, size_bytes in _fitting(memories, needed)
            for policy in (self.policies if self.requests else self.policies[:1])
            for order in self.orders
        ]

    def facts(self) -> dict[str, Any]:
        cluster, hardware = self.cluster, self.hardware
        device_count = cluster.nodes * cluster.devices if cluster else 1
        token_count = sum(one.tokens for one in self.requests) if self.given.has_tokens else 0
        return {
            "trace": self.trace_name,
            "speed_up": self.speed_up,
            "requests": len(self.requests),
            "models": len(self.sizes),
            "models_bytes": sum(self.sizes.values()),
            "are_sizes_random": self.are_random,
            "slo_ms": self.slo_ms,
            "device": hardware.name,
            "is_estimate": hardware.is_estimate,
            "seed": self.given.seed,
            "compute_load": _load(self.models, self.requests) / device_count,
            **(dataclasses.asdict(cluster) if cluster else {}),
            "jobs": len(self.jobs),
            "tokens": token_count,
        }

    def show(self, rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Print the result tables."""
        cluster, has_requests, args = self.cluster, bool(self.requests), self.given
        views.console().print(_headline(facts))
        table = _table(
            rows, has_requests=has_requests, has_jobs=bool(self.jobs), has_tokens=args.has_tokens
        )
        views.console().print(table)
        for row in rows:
            if cluster and row["in_slo"] < cluster.need:
                nodes = f"{cluster.nodes} nodes suffice; --nodes {2 * cluster.nodes}"
                where = f"{row['policy']}, memory {row['memory']}"
                views.echo(f"{where}: not even {nodes} --tiles {cluster.tiles}")
        if self.jobs:
            views.console().print()
            views.console().print(_jobs_table(rows, has_requests=has_requests))
        for path in filter(None, (args.plot, args.timeline)):
            views.echo(f"wrote {path}")


def _compare(name: str, as_json: bool, options: Mapping[str, Any]) -> None:
    compared = _Comparison(name, options)
    timeline, plot = compared.given.timeline, compared.given.plot
    drawn = Timeline() if timeline else None
    runs = _replayed(compared, drawn, is_watched=not as_json)
    if drawn is not None:
        Path(timeline).write_text(json.dumps(drawn.chrome_trace(0.0)), "utf-8")
    facts = compared.facts()
    sound = [run for run in runs if not run[2].failure]
    if plot is not None and sound:
        _draw(Path(plot), sound, facts)
    for text in dict.fromkeys(text for run in sound for text in run[2].warnings):
        views.echo(f"Warning: {text}", err=True)
    rows = [_row(*run) for run in runs]
    if as_json:
        views.print_json({**facts, "runs": rows})
    elif compared.given.as_csv:
        names = dict.fromkeys(name for row in rows for name in row if name != "jobs")
        writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif sound:
        compared.show([_row(*run) for run in sound], facts)
    failures = {setting.policy: outcome.failure for _, setting, outcome, _ in runs}
    for policy, failure in failures.items():
        if failure:
            views.echo(f'Error: policy "{policy}" has no result: {failure}', err=True)
    if any(failures.values()):
        sys.exit(common.EXIT_FAILED)


def _replayed(of: _Comparison, drawn: Timeline | None, *, is_watched: bool) -> list[Run]:
    """Run the same arrivals with each setting; return the runs with their memory labels."""
    settings, models, requests = of.settings(), of.models, of.requests
    runs: list[Run] = []
    with views.progress_bar(is_watched, f"{len(requests)} requests") as bar:
        for number, (label, setting) in enumerate(settings):

            def watch(count: int, what: str = f"{setting.policy} {label}", n: int = number) -> None:
                if bar is not None:
                    bar(what, (n + count / len(requests)) / len(settings))

            take_span = drawn.add if drawn is not None else None
            placed: dict[str, Any] = {}
            if of.cluster is not None:
                result = place(of.cluster, setting, models, requests, watch)
                outcome = result.outcome
                placed = {name: getattr(result, name) for name in OF_NODES}
            elif setting.policy == SERIAL:
                outcome = serial(setting, models, requests)
            else:
                outcome = replay(
                    setting, models, requests, of.jobs, watch=watch, take_span=take_span
                )
            runs.append((label, setting, outcome, placed))
    return runs


def _cluster(args: Any) -> Cluster | None:
    """Return the checked options of a cluster, or None if there is no ``--nodes``."""
    nodes, devices, tiles = args.nodes, args.devices, args.tiles
    if nodes is None and (devices or tiles or args.failures or args.need):
        raise InvalidInput(
            "--devices, --tiles, --failures and --need need --nodes", hint="add --nodes 1"
        )
    dying = _read("--failures", args.failures or "0%", _share)
    if dying == 1.0:
        raise InvalidInput("--failures must be less than 100%", hint="--failures 1%")
    return (
        None
        if nodes is None
        else Cluster(
            nodes,
            devices or 1,
            tiles or nodes * (devices or 1),
            dying,
            _read("--need", args.need or "0%", _share),
            args.seed,
        )
    )


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidInput("nothing was named", hint="pipeswitch simulate --help")
    return words


def _read(option: str, text: str, read: Callable[[object], Any]) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise InvalidInput(f"{option} {text}: {error}") from None


def _file(path: str) -> str:
    file = Path(path)
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} is larger than {format_bytes(MAX_FILE_BYTES)}")
    return file.read_text("utf-8", errors="replace")


def _data(name: str) -> str:
    return (files("pipeswitch.extras.lab") / "data" / name).read_text("utf-8")


def _trace(
    name: str, speed_up: float, seed: int, requests: int | None, *, has_tokens: bool
) -> tuple[arrivals.Trace, list[str]]:
    """Return the trace, and the names of its models if it has names."""
    kind, _, rate = name.partition(":")
    if name == "none":
        return arrivals.Trace(name, (), 0), []
    if name == "azure":
        return arrivals.of_functions(_data(FUNCTIONS), speed_up=speed_up, seed=seed), []
    if name == "azure-llm":
        texts = [_data(one) for one in SERVICES]
        return arrivals.of_services(texts, speed_up=speed_up, has_tokens=has_tokens), []
    if kind == "poisson":
        try:
            rate_per_s = _positive(rate) * speed_up
        except ValueError:
            raise InvalidInput(
                f"{name} is not of the form poisson:RATE: requests a second, above 0",
                hint="pipeswitch simulate poisson:50",
            ) from None
        count = requests or 10_000
        return arrivals.poisson(rate_per_s, count=count, model_count=20, seed=seed), []
    if not Path(name).is_file():
        raise InvalidInput(
            f"no trace {name!r}: it is neither a file nor a known name",
            hint="azure, azure-llm, poisson:RATE, none, or a file of at_ms,model",
        )
    try:
        return arrivals.of_rows(_file(name), name=Path(name).name, speed_up=speed_up)
    except arrivals.TraceError as error:
        raise InvalidInput(f"{name}: {error}") from None


def _number(text: str) -> float:
    """Return the text as a number, or as NaN, which lies in no range."""
    with contextlib.suppress(ValueError):
        return float(text)
    return math.nan


def _positive(text: object) -> float:
    number = _number(str(text))
    if not 1 / MAX_NUMBER <= number <= MAX_NUMBER:
        raise ValueError(f"a number above 0, at most {MAX_NUMBER:g}, is expected")
    return number


def _hardware(name: str) -> Hardware:
    known = json.loads(_data("devices.json"))["devices"]
    if name in known:
        row = known[name]
        link = Link(bytes_per_ms=row["link_gb_per_s"] * 1e6, fixed_ms=row["copy_us"] / 1e3)
        return Hardware(name, link, row["compute_factor"], is_estimate=True)
    if not Path(name).is_file():
        raise InvalidInput(
            f"no device {name!r}{nearest(name, known)}",
            hint=f"{', '.join(known)}, or a file that `pipeswitch profile MODEL --json` wrote",
        )
    try:
        profile = profiles.decode(_file(name).encode())
    except profiles.ProfileError as error:
        raise InvalidInput(f"{name} is not a profile: {error}") from None
    return Hardware(profile.identity.name, link_of(profile), 1.0, is_estimate=False)


def _models(text: str, count: int, factor: float, seed: int) -> list[PaperModel]:
    kind, _, number = text.partition(":")
    if kind == "random":
        amount = _number(number) if number else count
        if not 1 <= amount <= 10_000 or amount % 1:
            raise InvalidInput(f"--models {text}: from 1 to 10000 models")
        chance = random.Random(f"models {seed}")
        return [
            _equal(
                f"m{i:02d}",
                int(RANDOM_BYTES * math.exp(chance.gauss(0.0, SPREAD))),
                factor * RANDOM_MS * math.exp(chance.gauss(0.0, SPREAD)),
                LAYERS,
            )
            for i in range(int(amount))
        ]
    try:
        rows = msgspec.json.decode(_file(text), type=list[_Row])
    except UNREADABLE as error:
        raise InvalidInput(
            f"{text}: {error}", hint='[{"name": "a", "bytes": 1000000, "compute_ms": 2.5}]'
        ) from None
    bases = {"", *(row.name for row in rows if not row.shares_with)}
    for row in rows:
        is_possible = row.name and row.bytes >= row.layers >= 1 and row.compute_ms >= 0
        if not (is_possible and 0 <= row.shared_bytes <= row.bytes):
            raise InvalidInput(f"{text}: {row.name!r} has invalid sizes or times")
        if row.shares_with not in bases:
            why = f"{row.name!r} shares with {row.shares_with!r}"
            raise InvalidInput(f"{text}: {why}: not a model of the file, or itself a variant")
    models = [_equal(row.name, row.bytes, factor * row.compute_ms, row.layers) for row in rows]
    return _related(models, [msgspec.structs.asdict(row) for row in rows])


def _related(models: Sequence[PaperModel], rows: Sequence[Mapping[str, Any]]) -> list[PaperModel]:
    """Return the models, with the bytes that they share according to their rows."""
    variants = {
        row["name"]: (row["shares_with"], row["shared_bytes"])
        for row in rows
        if row.get("shares_with")
    }
    bases = {base: (base, ENDLESS) for base, _ in variants.values()}
    return [
        dataclasses.replace(model, family=family, shared_bytes=shared_bytes)
        for model in models
        for family, shared_bytes in [(bases | variants).get(model.name, ("", 0))]
    ]


def _equal(name: str, size_bytes: int, compute_ms: float, layers: int) -> PaperModel:
    return PaperModel(
        name=name,
        layer_bytes=(size_bytes // layers,) * layers,
        layer_ms=(compute_ms / layers,) * layers,
        plan=tuple(range(layers)),
    )


def _served() -> list[PaperModel]:
    """Return the running server's models that have a profile."""
    with common.connected() as client:
        rows = client.plan()["models"]
    models = [
        paper_model(row["name"], msgspec.convert(row["profile"], profiles.Profile))
        for row in rows
        if row["profile"] is not None
    ]
    if not models:
        raise InvalidInput("no model of the server has a profile", hint="pipeswitch profile --all")
    return _related(models, rows)


def _assigned(known: Sequence[PaperModel], names: Sequence[str], count: int) -> list[PaperModel]:
    """Return a model for each model of the trace: by name if the trace has names, else in turn."""
    by_name = {model.name: model for model in known}
    if names and any(name in by_name for name in names):
        for name in names:
            if name not in by_name:
                raise InvalidInput(
                    f"the trace names {name!r}, which is not a model{nearest(name, by_name)}"
                )
        return [by_name[name] for name in names]
    if not known:
        raise InvalidInput("there are no models to simulate")
    return [known[i % len(known)] for i in range(count)]


def _jobs(texts: Sequence[str]) -> list[PaperJob]:
    jobs_by_name: dict[str, PaperJob] = {}
    for text in texts:
        what, _, at = text.partition("@")
        try:
            if what.count(":") != 3:
                raise ValueError("four parts are expected")
            name, steps, step, memory = what.split(":")
            size_bytes = parse_size(memory)
            if not name or name in jobs_by_name:
                raise ValueError("each job needs a different name")
            if not steps.isdecimal() or not 1 <= float(steps) <= MAX_NUMBER or not size_bytes:
                raise ValueError("a number of steps and some memory are expected")
            jobs_by_name[name] = PaperJob(
                name=name,
                steps=int(steps),
                step_ms=parse_ms(step),
                memory_bytes=size_bytes,
                at_ms=parse_ms(at or 0),
            )
        except ValueError as error:
            raise InvalidInput(
                f"--job {text}: {error}", hint=f"{JOB}, as in long:400:10ms:1GiB@2s"
            ) from None
    return list(jobs_by_name.values())


def _orders(text: str) -> list[str]:
    words = _words(text)
    for word in words:
        if word not in JOB_ORDERS:
            raise InvalidInput(
                f"--training {word}{nearest(word, JOB_ORDERS)}", hint=", ".join(JOB_ORDERS)
            )
    return words


def _joined(
    models: Sequence[PaperModel], batch: int | None, delay: str, row: str | None
) -> list[PaperModel]:
    """Return the models, with batching if ``batch`` is set."""
    delay_ms = _read("--batch-delay", delay, parse_ms)
    if batch is None:
        if delay_ms or row is not None:
            raise InvalidInput("--batch-delay and --batch-row need --batch", hint="add --batch 8")
        return list(models)
    batching = Batching(limit=batch, delay_ms=delay_ms, is_exact=True)
    share = None if row is None else _read("--batch-row", row, _share)
    return [
        dataclasses.replace(
            model, batching=batching, row_share=model.row_share if share is None else share
        )
        for model in models
    ]


def _share(text: object) -> float:
    number = str(text)
    share = _number(number[:-1]) / 100.0 if number.endswith("%") else math.nan
    if not 0.0 <= share <= 1.0:
        raise ValueError("from 0% to 100% is expected")
    return share


def _shares(percents: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """Return the shares for ``--memory``; raise small ones to the smallest valid one."""
    largest, least = _least(sizes)
    for percent in percents:
        if percent < least:
            detail = f'"{largest}" has {format_bytes(sizes[largest])}'
            views.echo(f"memory is {least}% instead of {percent}%: {detail}", err=True)
    return list(dict.fromkeys(f"{max(percent, least)}%" for percent in percents))


def _least(sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the largest model, and the smallest percentage of all bytes into which it fits."""
    largest = max(sizes, key=lambda name: sizes[name])
    return largest, -(-100 * sizes[largest] // sum(sizes.values()))


def _memory(text: str, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the label and the size in bytes of a ``--memory`` text."""
    if text.endswith("%"):
        share = _read("--memory", text, lambda text: _positive(str(text)[:-1])) / 100.0
        size_bytes, label = round(share * sum(sizes.values())), text
    else:
        size_bytes = _read("--memory", text, parse_size)
        label = format_bytes(size_bytes)
    largest, least = _least(sizes)
    if size_bytes < sizes[largest]:
        raise InvalidInput(
            f'"{largest}" has {format_bytes(sizes[largest])}, --memory {text} is '
            f"{format_bytes(size_bytes)}",
            hint=f"--memory {least}% at least",
        )
    return label, size_bytes


def _fitting(texts: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return labels and sizes; name those that are too small, and raise if all are."""
    pairs = []
    for text in texts:
        try:
            pairs.append(_memory(text, sizes))
        except InvalidInput as error:
            if not error.hint or (text == texts[-1] and not pairs):
                raise
            views.echo(f"left out: {error.message}; {error.hint}", err=True)
    return pairs


def _load(models: Sequence[PaperModel], requests: Sequence[arrivals.Arrival]) -> float:
    """Return the total computing time of the requests, without prompts, per ms of the trace."""
    length_ms = requests[-1].at_ms - requests[0].at_ms if requests else 0.0
    took_ms = sum(models[a.model % len(models)].compute_ms * a.tokens for a in requests)
    return took_ms / length_ms if length_ms else math.inf


def _row(memory: str, setting: Setting, outcome: Outcome, placed: dict[str, Any]) -> dict[str, Any]:
    if outcome.failure:  # ``priority`` decided the rest
        return {"memory": memory, "policy": setting.policy, "failed": outcome.failure}
    jobs = [
        {
            "job": job.name,
            "at_ms": job.at_ms,
            "jct_ms": job.jct_ms,
            "share": job.share,
            "trained_s": job.trained_ms / 1000.0,
            "preempted_s": job.preempted_ms / 1000.0,
            "evictions": job.evictions,
        }
        for job in outcome.jobs
    ]
    between = outcome.between_ms
    of_tokens = {
        f"between_{name}_ms": percentile(between, share)
        for name, share in (("p50", 0.5), ("p99", 0.99))
        if between
    }
    of_jobs = {"training": setting.training, "jct_ms": outcome.jct_ms, "jobs": jobs}
    return {
        "memory": memory,
        "policy": setting.policy,
        "in_slo": outcome.share_in_slo,
        "p50_ms": quantile_ms(outcome, 0.5),
        "p99_ms": quantile_ms(outcome, 0.99),
        "refused": sum(outcome.refused.values()),
        "switches": outcome.switches,
        "copied_bytes": outcome.copied_bytes,
        "idle": outcome.idle_share,
        "makespan_ms": outcome.makespan_ms,
        **of_tokens,
        **(of_jobs if jobs else {}),
        **placed,
    }


def _headline(facts: dict[str, Any]) -> Text:
    estimate = " (an estimate)" if facts["is_estimate"] else ""
    where = f"on {facts['device']}{estimate}"
    if "nodes" in facts:
        where = f"on {facts['nodes']} nodes of {facts['devices']} x {facts['device']}{estimate}"
        where += f", or the fewest for {facts['need']:.2%} in time" if facts["need"] else ""
    jobs = f"; jobs: {facts['jobs']}" if facts["jobs"] else ""
    if not facts["requests"]:
        return Text(f"no requests{jobs}; {where}\n")
    tokens = f", {facts['tokens']} tokens" if facts["tokens"] else ""
    clients = f", of each of {facts['tiles']} clients" if "tiles" in facts else ""
    random_sizes = " (random sizes; real ones: --models FILE)" if facts["are_sizes_random"] else ""
    sizes = f"{short_bytes(facts['models_bytes'])}{random_sizes}"
    return Text(
        f"{facts['trace']} x {facts['speed_up']:g}: {facts['requests']} requests{tokens} of "
        f"{facts['models']} models, {sizes}{clients}{jobs}; {where}; "
        f"computing takes {facts['compute_load']:.0%} of the time; in time: "
        f"within {facts['slo_ms']:g} ms beyond a request's own computing\n"
    )


def _table(
    rows: Sequence[dict[str, Any]], *, has_requests: bool, has_jobs: bool, has_tokens: bool
) -> views.Listing:
    shown = [
        {
            **row,
            "in_slo": f"{row['in_slo']:.1%}",
            "idle": f"{row['idle']:.1%}",
            "copied": short_bytes(row["copied_bytes"]),
            "moved_bytes": short_bytes(row.get("moved_bytes", 0)),
        }
        for row in rows
    ]
    of_jobs = ("training", "jct_ms") if has_jobs else ()
    of_requests = OF_REQUESTS if has_requests else ()
    of_tokens = ("between_p50_ms", "between_p99_ms") if has_tokens else ()
    of_nodes = [name for name in OF_NODES if name in rows[0]]
    columns = ("memory", *of_requests, *of_tokens, *of_jobs, "idle", *of_nodes)
    first = {"p50_ms": "FIRST P50 MS", "p99_ms": "FIRST P99 MS"} if has_tokens else {}
    names = {"in_slo": "IN TIME", "jct_ms": "MEAN JCT MS", "moved_bytes": "MOVED", **first}
    return views.Listing(shown, columns, names)


def _jobs_table(rows: Sequence[dict[str, Any]], *, has_requests: bool) -> views.Listing:
    shown = [{**row, **job, "share": f"{job['share']:.1%}"} for row in rows for job in row["jobs"]]
    return views.Listing(shown, ("memory", *(("policy",) if has_requests else ()), *OF_JOBS))


def _draw(path: Path, runs: Sequence[Run], facts: dict[str, Any]) -> None:
    """Draw the share of requests that have ended within each latency."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for label, *_ in runs))
    figure, axes = pyplot.subplots(
        1, len(labels), figsize=(5.2 * len(labels), 3.8), squeeze=False, sharey=True
    )
    for axis, label in zip(axes[0], labels, strict=True):
        for where, setting, outcome, _ in runs:
            if where == label:
                ordered = sorted(outcome.latency_ms)
                shares = [(i + 1) / outcome.requests for i in range(len(ordered))]
                order = f", {setting.training}" if outcome.jobs else ""
                axis.plot(ordered, shares, label=setting.policy + order)
        axis.axvline(facts["slo_ms"], color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=f"memory {label}", xlabel="latency, ms", xscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of all requests")
    axes[0][0].legend()
    figure.suptitle(f"{facts['trace']} x {facts['speed_up']:g} on {facts['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
