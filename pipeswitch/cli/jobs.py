"""The verbs about training jobs."""

from __future__ import annotations

import contextlib

import click

from . import views
from .common import connected, job_argument, json_option, listing, print_done, watch_option


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("entry")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", default="", help="Of the job (default: the script's).")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default=None)
@json_option
def train(
    entry: str, args: tuple[str, ...], name: str, priority: str | None, as_json: bool
) -> None:
    """Start a training script as a background job.

    ENTRY is SCRIPT.py or package.module:main; what follows -- is the script's own.
    """
    with connected() as client:
        task = client.train(entry, name=name, args=args, priority=priority or "")
        row = task.status() if as_json else {}
    print_done(
        row, f"job {task.name} submitted; follow it: pipeswitch jobs logs -f {task.name}", as_json
    )


@click.group(invoke_without_command=True)
@json_option
@watch_option
@click.pass_context
def jobs(ctx: click.Context, as_json: bool, watch: bool) -> None:
    """List and steer training jobs."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(jobs_ls, as_json=as_json, watch=watch)


@jobs.command("ls")
@json_option
@watch_option
def jobs_ls(as_json: bool, watch: bool) -> None:
    """List jobs."""
    listing(lambda c: c.jobs(), lambda r: views.table(r, views.JOB_COLUMNS), as_json, watch)


@jobs.command("show")
@job_argument
@json_option
@watch_option
def jobs_show(name: str, as_json: bool, watch: bool) -> None:
    """Show one job."""
    listing(lambda c: c.task(name).status(), views.details, as_json, watch)


def _job_verb(verb: str, help_text: str) -> None:
    """One of the verbs that steer a job; they differ in nothing else."""

    @jobs.command(verb, help=help_text)
    @job_argument
    @json_option
    def act(name: str, as_json: bool) -> None:
        with connected() as client:
            row = getattr(client.task(name), verb)()
        print_done(row, f"job {name} {row['state']}, step {row.get('step', 0)}", as_json)


_job_verb("pause", "Commit, give the device back, hold until resume.")
_job_verb("resume", "Go on with a paused job.")
_job_verb("cancel", "End a job.")
_job_verb("wait", "Block until a job is over; fails if the job failed.")


@jobs.command("logs")
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@json_option
def jobs_logs(name: str, follow: bool, as_json: bool) -> None:
    """Print a job's log."""
    with connected() as client, contextlib.suppress(KeyboardInterrupt):
        pieces = client.task(name).logs(follow=follow)
        if as_json:
            views.print_json({"name": name, "text": "".join(pieces)})
            return
        for piece in pieces:
            views.echo(piece, nl=False)
