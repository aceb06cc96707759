"""The verbs about training jobs."""

from __future__ import annotations

import ast
import contextlib
import csv
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import click

from ..base.errors import InvalidInput
from ..base.units import printed
from ..job import FIXED_VARIABLES, OFFLOADS
from . import common, views

FIRST_LOOK_S: Final = 1.0
MAX_SCRIPT_BYTES: Final = 4 << 20  # no variables are searched in a larger script


class ScriptCommand(click.Command):
    """Command for a script. The script's own options must come after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = f"Options of the script follow --: -- {error.option_name}"
            raise click.UsageError(f"{error.format_message()} {advice}", ctx) from None


@click.command(cls=ScriptCommand)
@click.argument("entry")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", default="", help="Name of the job (default: the script's name).")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default=None)
@click.option(
    "--share",
    metavar="GROUP",
    default="",
    help="Group of jobs that load the input of job.shared once; ENTRY may be several scripts.",
)
@click.option(
    "--offload",
    type=click.Choice(OFFLOADS),
    help="Activations to offload, unless job.steps has offload=.",
)
@click.option(
    "--activation-memory",
    metavar="2GiB",
    help="Device memory for activations, unless job.steps has activation_memory=.",
)
@click.option(
    "--env",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Variable for the script. A local server also gets those that the script names.",
)
@common.devices_option
@common.json_option
def train(
    entry: str,
    args: tuple[str, ...],
    name: str,
    priority: str | None,
    share: str,
    devices: list[str],
    as_json: bool,
    **options: Any,
) -> None:
    """Start a training script as a background job, in the current folder.

    ENTRY is SCRIPT.py or package.module:main; arguments after -- go to the script.
    """
    env = options.pop("env")
    more = list(takewhile(lambda arg: arg.endswith(".py"), args)) if share else []
    if more and name:
        raise InvalidInput(f"--name {name} for {1 + len(more)} jobs", hint="leave out --name")
    with common.connected() as client:
        tasks = []
        for one in (entry, *more):
            is_own = client.address.startswith("ipc://")
            options["env"] = _variables(env, one if is_own else "")
            task = client.train(
                one,
                name=name,
                args=args[len(more) :],
                priority=priority or "",
                share=share,
                devices=devices,
                **options,
            )
            tasks.append(task)
            if options["env"]:
                views.echo(f"variables: {', '.join(sorted(options['env']))}", err=True)
            common.print_done(
                task.status() if as_json else {},
                f"job {task.name} submitted; follow it: pipeswitch jobs logs -f {task.name}",
                as_json,
            )
        for task in tasks:
            with contextlib.suppress(TimeoutError):
                task.wait(FIRST_LOOK_S)  # report a job that fails at once, e.g. without an argument


def _variables(env: Sequence[str], entry: str) -> dict[str, str]:
    """Return the variables of ``--env``, and those of this environment that a script names."""
    if fixed := [one.partition("=")[0] for one in env if one.startswith(FIXED_VARIABLES)]:
        raise InvalidInput(
            f"--env {', '.join(fixed)}: the server reads it when it starts its processes",
            hint="set it for pipeswitch serve",
        )
    named: dict[str, str] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # train refuses the script
        if entry.endswith(".py") and os.path.getsize(entry) <= MAX_SCRIPT_BYTES:
            tree = ast.walk(ast.parse(Path(entry).read_bytes()))
            texts = {one.value for one in tree if isinstance(one, ast.Constant)} - {"PATH", "HOME"}
            own = [one for one in os.environ if one in texts]
            named = {one: os.environ[one] for one in own if not one.startswith(FIXED_VARIABLES)}
            if fixed := sorted({*own} - {*named}):
                views.echo(f"not passed, set for pipeswitch serve: {', '.join(fixed)}", err=True)
    for one in env:
        name, has_value, value = one.partition("=")
        if not name:
            raise InvalidInput(f"--env {one!r} is not of the form NAME or NAME=VALUE")
        if not has_value and name not in os.environ:
            raise InvalidInput(f"--env {name}: it is not set here", hint=f"--env {name}=VALUE")
        named[name] = value if has_value else os.environ[name]
    return named


@click.group(cls=common.Group, invoke_without_command=True)
@common.json_option
@common.watch_option
@click.pass_context
def jobs(ctx: click.Context, as_json: bool, watch: bool) -> None:
    """List and control training jobs."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(jobs_ls, as_json=as_json, watch=watch)


@jobs.command("ls")
@common.json_option
@common.watch_option
def jobs_ls(as_json: bool, watch: bool) -> None:
    """List jobs."""

    def shown(rows: list[dict[str, Any]]) -> Any:
        shown_rows = [
            {**row, "why": _why(row), "bytes": row["lease_bytes"]} for row in views.busy_first(rows)
        ]
        name, *others = views.JOB_COLUMNS
        is_cluster = any("node" in row for row in rows)
        return views.Listing(shown_rows, (name, *["node"] * is_cluster, *others))

    common.listing(lambda c: c.jobs(), shown, as_json, watch)


def _why(row: Mapping[str, Any]) -> str:
    """Return what a job waits for; for a failed job, the cause and what to type next."""
    cause: str = row["error"].partition("\n")[0] or row["why"]
    return f"{cause} (pipeswitch jobs logs {row['name']})" if row["state"] == "failed" else cause


@jobs.command("show")
@common.job_argument
@click.option("--history", "wants_history", is_flag=True, help="Print all that job.log reported.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the history as CSV.")
@click.option("--plot", "plot_path", metavar="OUT.png", help="Draw the history as a picture.")
@common.json_option
@common.watch_option
def jobs_show(
    name: str, wants_history: bool, as_csv: bool, plot_path: str | None, as_json: bool, watch: bool
) -> None:
    """Show one job, or its history."""
    if not (wants_history or as_csv or plot_path):
        common.listing(lambda c: c.task(name).status(), views.details, as_json, watch)
        return
    if plot_path:
        plot_path = common.checked_plot(Path(plot_path))
    with common.connected() as client:
        client.task(name).status()  # raises ModelNotFound for an unknown job
        rows = client.task(name).history()
    columns = tuple(dict.fromkeys(("step", *(key for row in rows for key in row))))
    if plot_path:
        _plot(name, rows, columns[1:], plot_path)
        common.print_done({"name": name, "path": plot_path}, f"wrote {plot_path}", as_json)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([row.get(column, "") for column in columns] for row in rows)
    elif as_json:
        views.print_json(rows)
    else:
        views.console().print(views.Listing(printed(rows), columns))


def _plot(name: str, rows: list[dict[str, Any]], columns: Sequence[str], path: str) -> None:
    """Draw one panel for each value, over the steps."""
    if not rows:
        raise InvalidInput(f'job "{name}" has reported nothing', hint="job.log(loss=loss)")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5 * len(columns)), layout="constrained")
    panels = figure.subplots(len(columns), squeeze=False, sharex=True)
    for panel, column in zip(panels[:, 0], columns, strict=True):
        known = [row for row in rows if column in row]
        panel.plot([row["step"] for row in known], [row[column] for row in known])
        panel.set_ylabel(column)
    panels[-1, 0].set_xlabel("step")
    figure.suptitle(name)
    figure.savefig(path)


def _job_verb(verb: str, help_text: str) -> None:
    """Add a verb that controls a job; these verbs differ only in name and help."""

    @jobs.command(verb, help=help_text)
    @common.job_argument
    @common.json_option
    def act(name: str, as_json: bool) -> None:
        with common.connected() as client:
            row = getattr(client.task(name), verb)()
        common.print_done(row, f"job {name} {row['state']}, step {row.get('step', 0)}", as_json)


_job_verb("pause", "Commit a job and suspend it until resume.")
_job_verb("resume", "Continue a paused job, or start a failed one again from its last commit.")
_job_verb("cancel", "End a job.")
_job_verb("wait", "Wait until a job has ended; fail if the job failed.")


@jobs.command("move")
@common.job_argument
@click.option("--to", required=True, metavar="DEVICE", help="cpu:1, or a node of the cluster.")
@common.json_option
def jobs_move(name: str, to: str, as_json: bool) -> None:
    """Move a job to another device of the server, or to another node of the cluster.

    The job commits its last step, and its script starts again on the target. No step is lost.
    """
    with common.connected() as client:
        row = client.task(name).move(to)
    common.print_done(
        row, f"job {name} {row['state']} on {row.get('on', to)}, step {row['step']}", as_json
    )


@jobs.command("rm")
@common.job_argument
@common.json_option
def jobs_rm(name: str, as_json: bool) -> None:
    """Remove the log and the state of a finished job."""
    with common.connected() as client:
        common.print_done(client.task(name).remove(), f"removed job {name}", as_json)


@jobs.command("export")
@common.job_argument
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--part", default="", metavar="NAME", help="Only this part of the job.")
@common.json_option
def jobs_export(name: str, out: str, part: str, as_json: bool) -> None:
    """Write a job's newest parameters to OUT.safetensors."""
    out = common.suffixed(out, ".safetensors")
    with common.connected() as client:
        row = client.task(name).export(out, part)
    common.print_done(row, f"wrote {out}: {name} at step {row['persisted_step']}", as_json)


@jobs.command("logs")
@common.job_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
@common.json_option
def jobs_logs(name: str, follow: bool, as_json: bool) -> None:
    """Print a job's log."""
    with common.connected() as client, contextlib.suppress(KeyboardInterrupt):
        pieces = client.task(name).logs(follow=follow)
        if as_json:
            views.print_json({"name": name, "text": "".join(pieces)})
            return
        for piece in pieces:
            views.echo(piece, nl=False)
