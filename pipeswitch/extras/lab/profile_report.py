"""Commands ``profile`` and ``plan``: a measurement's summary, and predictions for an arena."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import click
import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...base.errors import InvalidInput, ModelNotFound, PipeSwitchError
from ...base.units import nearest, parse_ms, printed, short_bytes
from ...cli import common, views
from ..offload import dry_run
from .costs import MIB, LayerCosts, bound, makespan, pass_ms
from .planner import costs_of, plan_groups
from .profile import Profile

PROFILE_COLUMNS: Final = ("plan", "groups", "predicted_ms", "measured_ms", "spread_ms", "trials")
BATCH_COLUMNS: Final = ("batch", "switch_compute_ms", "resident_compute_ms", "trials")
PLAN_COLUMNS: Final = (
    "model",
    "size",
    "shared",
    "groups",
    "switch_ms",
    "variant_ms",
    "resident_ms",
    "bound_ms",
    "deadline_ms",
    "holds",
    "why",
)
JOB_COLUMNS: Final = ("job", "size", "saved", "memory", "offloaded", "planned_step_ms", "step_ms")


def profile_view(row: Mapping[str, Any]) -> RenderableType:
    """Return a profile on one screen: link, overheads, batches, and accuracy of the predictions."""
    profile = msgspec.convert(row, Profile)
    link, overheads, ours = profile.link, profile.overheads, profile.identity
    sizes = sum(layer.size_bytes for layer in profile.layers)
    gb_per_s = f"{MIB / 1e6 / link.beta_ms_per_mib:.2f} GB/s" if link.beta_ms_per_mib else "∞"
    head = Text(
        f"{profile.model}: {len(profile.layers)} layers, {short_bytes(sizes)}, on {ours.device} "
        f"({ours.name}, {ours.threads} of {ours.cores} cores compute), torch {ours.torch}\n"
        f"link {link.alpha_ms:.3f} ms + {link.beta_ms_per_mib:.4f} ms/MiB ({gb_per_s}), off by "
        f"{link.residual_p50:.1%} (p50) and {link.residual_p90:.1%} (p90) over "
        f"{link.samples} sizes\n"
        f"a group costs {overheads.sigma_ms:.4f} ms + {overheads.launch_ms:.4f} ms to call; "
        f"waking up takes {overheads.wake_ms:.4f} ms\n"
    )
    batches = [
        {
            "batch": batch.batch,
            "switch_compute_ms": sum(batch.switch_ms),
            "resident_compute_ms": sum(batch.resident_ms),
            "trials": batch.trials,
        }
        for batch in profile.batches
    ]
    checks = [
        {
            **msgspec.structs.asdict(check),
            "plan": _name(check.plan, profile),
            "groups": len(check.plan),
        }
        for check in profile.checks
    ]
    return Group(
        head,
        views.Listing(batches, BATCH_COLUMNS),
        Text(""),
        views.Listing(checks, PROFILE_COLUMNS),
    )


def _name(plan: Sequence[int], profile: Profile) -> str:
    if tuple(plan) == profile.checks[-1].plan:
        return "planned"
    if len(plan) == len(profile.layers):
        return "per layer"
    return "one shot" if len(plan) == 1 else "buckets"


def parse_deadlines(texts: Sequence[str]) -> dict[str, float]:
    """Return deadlines in ms by model: ``50ms`` is for all models (key ""), ``NAME=50ms`` for one.

    Raises:
        InvalidInput: a text does not have this form.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            limits[name] = parse_ms(value)
        except ValueError as error:
            raise InvalidInput(f"deadline {text!r}: {error}", hint="50ms or NAME=50ms") from None
    return limits


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model, its costs and its deadline.

    Attributes:
        name: the model's name.
        costs: costs of the model's layers, from its profile.
        total_bytes: size of the model's region in the arena: its layers, and padding for alignment.
        deadline_ms: maximum time from the start of a switch to its end; None: no deadline.
        pass_ms: time of a cold run of a model that is larger than the arena; 0 for other models.
        shared_bytes: bytes that it shares with a variant in the host store.
    """

    name: str
    costs: LayerCosts
    total_bytes: int
    deadline_ms: float | None = None
    pass_ms: float = 0.0
    shared_bytes: int = 0


def capacity_report(models: Sequence[ModelDemand], arena_bytes: int) -> dict[str, Any]:
    """Return the predicted times of the models, and how many of them fit in the arena together."""
    used_bytes = [*accumulate(sorted(model.total_bytes for model in models))]
    total_bytes = used_bytes[-1] if used_bytes else 0
    return {
        "arena_bytes": arena_bytes,
        "total_bytes": total_bytes,
        "fits_all": total_bytes <= arena_bytes,
        "fit_count": sum(one <= arena_bytes for one in used_bytes),  # counted from the smallest
        "models": [_model_report(model, arena_bytes) for model in models],
    }


def _model_report(model: ModelDemand, arena_bytes: int) -> dict[str, Any]:
    """Return a model's row; times are predictions, from the start of the switch."""
    costs = model.costs
    plan = plan_groups(costs)
    cold_ms = model.pass_ms or makespan(plan, costs)
    fits = model.total_bytes <= arena_bytes
    copied = costs.scaled(1.0 - model.shared_bytes / max(1, model.total_bytes), 1.0)
    holds: bool | None = None
    if model.deadline_ms is not None:
        holds = (fits or model.pass_ms > 0) and cold_ms <= model.deadline_ms
    return {
        "name": model.name,
        "total_bytes": model.total_bytes,
        "fits": fits,  # the arena can hold it without other models
        "layer_count": costs.layer_count,
        "group_count": len(plan),
        "groups": plan,  # index of the first layer of each group in the best plan for a cold model
        "bound_ms": bound(costs),  # M*, a lower bound of the cold time of every plan
        "resident_ms": costs.resident_ms,
        "cold_ms": cold_ms,
        "variant_ms": makespan(plan, copied) if model.shared_bytes else 0.0,  # in another's place
        "overhead_ms": cold_ms - costs.resident_ms,
        "deadline_ms": model.deadline_ms,
        "holds_cold": holds,  # whether a cold run meets the deadline; None: there is none
        "shared_bytes": model.shared_bytes,
    }


def report(
    answer: Mapping[str, Any], deadlines: Mapping[str, float], only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the capacity report of a server's profiles, and the models that have none.

    Args:
        only: names of the models to report; empty: all.

    Raises:
        ModelNotFound: ``deadlines`` or ``only`` names an unknown model.
    """
    names = [model["name"] for model in answer["models"]]
    for name in (*only, *deadlines):
        if name and name not in names:
            raise ModelNotFound(
                f'no model "{name}"{nearest(name, names)}', hint="pipeswitch models"
            )
    if only:
        chosen = [model for model in answer["models"] if model["name"] in only]
        answer = {**answer, "models": chosen}
    demands, unknown = [], []
    streams = {one["name"]: one["streams"] for one in answer["models"] if one.get("streams")}
    for model in answer["models"]:
        if model["profile"] is None:
            row = {key: model[key] for key in ("name", "bytes", "grouping", "grouping_why")}
            unknown.append(row)
            continue
        profile = msgspec.convert(model["profile"], Profile)
        demands.append(
            ModelDemand(
                name=model["name"],
                costs=costs_of(profile),
                total_bytes=model["bytes"],
                deadline_ms=deadlines.get(model["name"], deadlines.get("")),
                pass_ms=_pass_ms(profile, model["staging"]),
                shared_bytes=model.get("shared_bytes", 0),
            )
        )
    capacity = capacity_report(demands, answer["arena_bytes"])
    texts = {name: one["text"] for name, one in streams.items()}
    return {**capacity, "without_profile": unknown, "streams": texts}


def _pass_ms(profile: Profile, staging: Mapping[str, Any] | None) -> float:
    """Return the predicted time of a pass of a model that is larger than the arena; else 0."""
    if staging is None:
        return 0.0
    passed_ms = pass_ms(
        tuple(staging["plan"]), costs_of(profile), staging["waits"], staging["resident"]
    )
    return passed_ms + profile.overheads.wake_ms


def jobs_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each job's lease, with predicted and measured costs of its activation budget."""
    return [
        {"job": row["name"], "lease_bytes": row["lease_bytes"], **row.get("activations", {})}
        for row in rows
        if row["lease_bytes"]
    ]


def _job_row(job: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        "size": "lease_bytes",
        "saved": "saved_bytes",
        "memory": "budget_bytes",
        "offloaded": "offloaded_bytes",
    }
    known = {name: short_bytes(job[key]) for name, key in sizes.items() if job.get(key)}
    return {**job, **known}


def report_view(figures: Mapping[str, Any]) -> RenderableType:
    """Return the report as a table, with the models without a profile and what to do below it."""
    streams, models = figures["streams"], figures["models"]
    rows = [_row(model, streams.get(model["name"], "")) for model in models]
    rows += [
        {
            "model": row["name"],
            "size": short_bytes(row["bytes"]),
            "groups": "",
            "why": streams.get(row["name"]) or row["grouping_why"],
        }
        for row in figures["without_profile"]
    ]
    jobs = [_job_row(job) for job in figures.get("jobs", ())]
    below: list[RenderableType] = [Text(), views.Listing(jobs, JOB_COLUMNS)] if jobs else []
    if not rows:
        return Group(Text("no models (pipeswitch register)"), *below)
    columns = [name for name in PLAN_COLUMNS if any(row.get(name) for row in rows)]
    lines = [f"arena {short_bytes(figures['arena_bytes'])}"]
    if models:
        lines.append(
            f"{figures['fit_count']} of {len(models)} profiled models are resident together "
            f"({short_bytes(figures['total_bytes'])} in all)"
        )
    if unknown := [row["name"] for row in figures["without_profile"]]:
        named = unknown[0] if len(unknown) == 1 else "--all"
        lines.append(f"to predict times, measure: pipeswitch profile {named}")
    return Group(views.Listing(rows, columns), Text("\n" + "\n".join(lines)), *below)


def _row(model: Mapping[str, Any], streams: str) -> dict[str, Any]:
    return {
        **model,
        "model": model["name"],
        "size": short_bytes(model["total_bytes"]),
        "shared": short_bytes(model["shared_bytes"]) if model["shared_bytes"] else "",
        "groups": model["group_count"],
        "switch_ms": model["cold_ms"],
        "variant_ms": model["variant_ms"],
        "holds": {True: "yes", False: "no", None: ""}[model["holds_cold"]],
        "why": "" if model["fits"] else streams or "it does not fit into the arena",
    }


@click.command()
@common.names_argument
@click.option(
    "--all", "is_all", is_flag=True, help="Measure every model that is ready, one after the other."
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1),
    multiple=True,
    help="Batch size to measure (repeatable); layer groups are planned for the first.",
)
@common.json_option
def profile(names: tuple[str, ...], is_all: bool, batches: tuple[int, ...], as_json: bool) -> None:
    """Measure models layer by layer on an idle device, and plan their layer groups."""
    if bool(names) == is_all:
        raise click.UsageError("give NAMES, or --all")
    failed: list[PipeSwitchError] = []
    rows = []
    with common.connected() as client:
        if is_all:
            names = tuple(
                row["name"]
                for row in client.models()
                if row["state"] == "ready" and "steps" not in row
            )
        for name in names:
            try:
                rows.append(_profiled(client, name, batches, as_json))
            except PipeSwitchError as error:
                if len(names) == 1:
                    raise
                failed.append(error)
                views.echo(f"{name}: {error.message}", err=True)
    if as_json:
        views.print_json(rows if is_all or len(names) > 1 else rows[0])
    if failed:
        sys.exit(failed[0].exit_code)


def _profiled(client: Any, name: str, batches: tuple[int, ...], as_json: bool) -> dict[str, Any]:
    with views.progress_bar(not as_json and sys.stderr.isatty(), name) as report:
        row: dict[str, Any] = client.profile(name, batches, progress=report)
    if not as_json:
        views.console().print(profile_view(printed(row)))
    return row


@click.command()
@click.argument(
    "args",
    metavar="[MODEL]...",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=common.complete_models,
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="[NAME=]50ms",
    help="Check whether a deadline can be met, for one model or for all (repeatable).",
)
@click.option(
    "--train",
    "script",
    metavar="SCRIPT.py",
    help="Plan a training script instead: run its first steps here, and print the cost "
    "of several limits.",
)
@click.option(
    "--memory",
    metavar="2GiB",
    help="With --train: limit for activations (default: several shares).",
)
@common.json_option
@common.watch_option
def plan(
    args: tuple[str, ...],
    deadlines: tuple[str, ...],
    script: str | None,
    memory: str | None,
    as_json: bool,
    watch: bool,
) -> None:
    """Predict switch times and groups of all models, or of those that you name.

    With --train the arguments after -- go to the script, and no server is needed.
    """
    if script is None and memory:
        raise click.UsageError("--memory needs --train SCRIPT.py")
    if script is not None:
        if deadlines or watch:
            raise click.UsageError("--deadline and --watch exclude --train")
        dry_run.show(script, args, common.size_option("--memory", memory), as_json)
        return
    try:
        limits = parse_deadlines(deadlines)
    except InvalidInput as error:
        raise click.BadParameter(error.message, param_hint="--deadline") from None

    def fetch(client: Any) -> dict[str, Any]:
        jobs = [] if args else jobs_of(client.jobs())
        return {**report(client.plan(), limits, args), "jobs": jobs}

    common.listing(fetch, report_view, as_json, watch)
