"""The command line. It never imports torch; what needs torch runs in a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import io
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from click.shell_completion import get_completion_class

from ..errors import InvalidInput, PipeSwitchError, RegistrationRefused, ServerUnavailable
from ..units import format_bytes
from ..wire.addresses import full_address
from . import views
from .keys import keys

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
PING_AGAIN_S: Final = 0.1  # of ping --wait
EXIT_WAIT_S: Final = 30.0  # from a server's last answer to its end
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
CONVERT: Final = (
    "import sys; from pipeswitch.programs.build.export import convert_pt2; "
    "convert_pt2(*sys.argv[1:])"
)


class Cli(click.Group):
    """Every PipeSwitchError becomes ``Error: text`` and a hint, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a locale without ✔, a name without a letter
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False})
        except PipeSwitchError as error:
            _die(error)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            if error.filename is None and error.errno != errno.ENOSPC:
                raise  # nothing that a user named: a bug here
            where = f"{error.filename}: " if error.filename is not None else ""
            _die(PipeSwitchError(f"{where}{error.strerror}"))
        except (KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else EXIT_OK)


def _die(error: PipeSwitchError) -> NoReturn:
    click.echo(f"Error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint:  {error.hint}", err=True)
    sys.exit(error.exit_code)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"pipeswitch {__version__}")
        ctx.exit()


@click.group(
    cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False,
              callback=_print_version, help="Show the version.")  # fmt: skip
@click.option("--host", metavar="ADDRESS", help="Server to talk to (default: $PIPESWITCH_HOST).")
@click.option(
    "--key", type=click.Path(), help="This client's .key_secret (default: $PIPESWITCH_KEY)."
)
@click.option("--server-key", help="The server's public key (default: $PIPESWITCH_SERVER_KEY).")
@click.pass_context
def main(ctx: click.Context, host: str | None, key: str | None, server_key: str | None) -> None:
    """One GPU, many models, and a training job that keeps it whenever nobody asks."""
    ctx.obj = {
        "address": full_address(host) if host else None,
        "key": key,
        "server_key": server_key,
    }


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
watch_option = click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """A client of the server that was named, or of the default one."""
    from ..client.client import Client

    with Client(**click.get_current_context().obj) as client:
        yield client


def _completing(ctx: click.Context) -> Any:
    from ..client.client import Client

    given = ctx.find_root().params
    keys = {name: given.get(name) for name in ("key", "server_key")}
    host = given.get("host")
    return Client(full_address(host) if host else None, timeout_s=0.5, **keys)


def _model_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion; silent when there is no server."""
    try:
        with _completing(ctx) as client:
            return [r["name"] for r in client.models() if r["name"].startswith(incomplete)]
    except PipeSwitchError:
        return []


def _job_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    try:
        with _completing(ctx) as client:
            return [r["name"] for r in client.jobs() if r["name"].startswith(incomplete)]
    except PipeSwitchError:
        return []


name_argument = click.argument("name", shell_complete=_model_names)


def _listing(
    fetch: Callable[[Any], Any], render: Callable[[Any], Any], as_json: bool, watch: bool
) -> None:
    """Rows as JSON or as a table, once or again and again."""
    with connected() as client:
        if as_json:
            views.print_json(fetch(client))
        else:
            views.show(lambda: render(fetch(client)), watch=watch)


def _done(row: Any, text: str, as_json: bool) -> None:
    if as_json:
        views.print_json(row)
    else:
        click.echo(text)


# ---- the server --------------------------------------------------------------------------------


@main.command()
@click.option("--config", "path", type=click.Path(), help="pipeswitch.toml of this folder if any.")
@click.option("--device", help="auto, cpu or cuda:0.")
@click.option("--listen", help="tcp://127.0.0.1:5555")
@click.option("--name", help="Of the owner's ipc socket (default: the port).")
@click.option("--arena", help="Device memory: auto, 20GiB or a fraction.")
@click.option("--host-store", help="Host memory for models: auto, 32GiB or a fraction.")
@click.option("--pool", help="Shared memory for waiting requests: 512MiB.")
@click.option("--state-dir", type=click.Path(), help="Bundles, commits, journal, logs.")
@click.option("--auth", help="keys: TCP clients need a key on loopback too (default: auto).")
@click.option("--keys-dir", type=click.Path(), help="Made by pipeswitch keys.")
@click.option("--standby", type=int, help="Warm workers beside the active one.")
@click.option("--threads", type=int, help="Compute threads of a worker on the cpu device.")
@click.option("--policy", help="fifo or priority.")
@click.option("--link-gbps", type=float, help="cpu device: model a link of this many GB/s.")
@click.option("--commit-every", help="How often a job's state is kept: 5s.")
@click.option("--profiles-dir", type=click.Path(), help="Measured profiles of models.")
@click.option("--allow-code", multiple=True, metavar="PATTERN",
              help="Module names and script paths TCP clients may name (repeatable).")  # fmt: skip
def serve(path: str | None, **flags: Any) -> None:
    """Run a server until it is told to stop."""
    from ..config import load

    config = load(path, flags=_flag_tree(flags))
    run = _part("pipeswitch.controller.main", "serve")
    sys.exit(run(config))


def _flag_tree(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags in the shape of the file; None means not given."""
    return {
        "server": {
            "listen": flags["listen"],
            "name": flags["name"],
            "pool": flags["pool"],
            "state_dir": flags["state_dir"],
            "auth": flags["auth"],
            "keys_dir": flags["keys_dir"],
            "allow_code": list(flags["allow_code"]) or None,
        },
        "device": {
            "name": flags["device"],
            "arena": flags["arena"],
            "link_gbps": flags["link_gbps"],
        },
        "host": {"store": flags["host_store"]},
        "workers": {"standby": flags["standby"], "threads": flags["threads"]},
        "scheduler": {"policy": flags["policy"], "commit_every": flags["commit_every"]},
        "profiles_dir": flags["profiles_dir"],
    }


def _part(module: str, name: str) -> Any:
    """A function of a part that only some commands need."""
    return getattr(importlib.import_module(module), name)


@main.command()
@click.option("--drain", default="30s", show_default=True, help="Time to finish what was accepted.")
@json_option
def stop(drain: str, as_json: bool) -> None:
    """Stop the server: it finishes what it accepted and commits its jobs."""
    drain_s = _ms("--drain", drain) / 1000
    with connected() as client, contextlib.ExitStack() as stack:
        pid = int(client.about()["pid"])
        exit_of = _exit_watcher(pid, stack) if client.address.startswith("ipc://") else None
        client.stop_server(drain_s)
        if exit_of is not None and not select.select([exit_of], [], [], EXIT_WAIT_S)[0]:
            raise PipeSwitchError(
                f"server {pid} agreed to stop and has not left after {EXIT_WAIT_S:g} s",
                hint=f"see its log; kill {pid}",
            )
    _done({"stopped": pid}, f"server {pid} stopped", as_json)


def _exit_watcher(pid: int, stack: contextlib.ExitStack) -> int | None:
    """A descriptor that is readable when the server has left; None: its pid is not of here."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _ms(option: str, text: str) -> float:
    from ..units import parse_ms

    try:
        return parse_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


# ---- models ------------------------------------------------------------------------------------


@main.command()
@click.argument("name")
@click.argument("source")
@click.option("--weights", default="", help="FILE.safetensors, pretrained or random:SEED.")
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]8x3x224x224:float32",
              help="Shape and dtype where the source does not know them (repeatable).")  # fmt: skip
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal")
@click.option("--pin", is_flag=True, help="Keep it on the device.")
@click.option("--max-batch", type=int, default=0, help="Largest dynamic batch.")
@json_option
def register(
    name: str, source: str, inputs: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Make a model servable.

    SOURCE is torchvision:resnet152, hf:bert-base-uncased, FILE.bundle, FILE.pt2 or
    package.module:factory.
    """
    signature = _signature(inputs)
    is_shown = not as_json and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(views.progress_bar(is_shown, name))
        if source.endswith(".pt2"):
            source = _converted(source, stack)
        client = stack.enter_context(connected())
        row = client.register(name, source, inputs=signature, progress=report, **options)
    size = f", {format_bytes(row['bytes'])}" if row.get("bytes") else ""
    why = f" ({row['mode_reason']})" if row.get("mode_reason") else ""
    groups = f", {row['groups']} groups" if row.get("groups") else ""
    _done(row, f"registered {name}{size}{groups}, {row.get('mode', 'graph')} mode{why}", as_json)


def _signature(texts: tuple[str, ...]) -> dict[str, tuple[list[int], str]]:
    """What ``--input`` says, in the SDK's form."""
    from ..programs.signature import parse_input

    found = {}
    for number, text in enumerate(texts):
        try:
            name, (shape, dtype) = parse_input(text, number)
        except InvalidInput as error:
            raise click.BadParameter(error.message, param_hint="--input") from None
        found[name] = (shape, dtype)
    return found


def _converted(source: str, stack: contextlib.ExitStack) -> str:
    """A .pt2 file as a bundle; torch.export.load is torch's, so a child does it."""
    if not Path(source).is_file():
        raise InvalidInput(f"no file {source!r}")
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeswitch-convert-"))
    bundle = str(Path(folder, "program.bundle"))
    command = [sys.executable, "-P", "-c", CONVERT, source, bundle]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        reason = lines[-1].removeprefix(f"{RegistrationRefused.__module__}.RegistrationRefused: ")
        raise RegistrationRefused(source, reason.removeprefix(f"{source}: "))
    return bundle


@main.command()
@name_argument
@json_option
def unregister(name: str, as_json: bool) -> None:
    """Drop a model."""
    with connected() as client:
        _done(client.unregister(name), f"unregistered {name}", as_json)


@main.command()
@name_argument
@json_option
def load(name: str, as_json: bool) -> None:
    """Pin a model on the device (and give a quarantined one another chance)."""
    with connected() as client:
        _done(client.load(name), f"pinned {name}", as_json)


@main.command()
@name_argument
@json_option
def unload(name: str, as_json: bool) -> None:
    """Unpin a model: the server decides again what is resident."""
    with connected() as client:
        _done(client.unload(name), f"unpinned {name}", as_json)


@main.command()
@json_option
@watch_option
def models(as_json: bool, watch: bool) -> None:
    """List registered models."""
    _listing(lambda c: c.models(), lambda r: views.table(r, views.MODEL_COLUMNS), as_json, watch)


@main.command()
@name_argument
@json_option
@watch_option
def show(name: str, as_json: bool, watch: bool) -> None:
    """Show one model in full, its signature included."""
    _listing(lambda c: c.show(name), views.details, as_json, watch)


@main.command()
@name_argument
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True,
              help="Sizes to time (repeatable); groups are made for the first.")  # fmt: skip
@json_option
def profile(name: str, batches: tuple[int, ...], as_json: bool) -> None:
    """Measure a model layer by layer, when no request waits, and group its layers by that."""
    from . import profile as cli_profile

    is_shown = not as_json and sys.stderr.isatty()
    with views.progress_bar(is_shown, name) as report, connected() as client:
        row = client.profile(name, batches, progress=report)
    if as_json:
        views.print_json(row)
    else:
        views.console().print(cli_profile.profile_view(row))


@main.command()
@click.option("--deadline", "deadlines", multiple=True, metavar="[NAME=]50ms",
              help="Say whether it holds, for one model or for all (repeatable).")  # fmt: skip
@json_option
@watch_option
def plan(deadlines: tuple[str, ...], as_json: bool, watch: bool) -> None:
    """Predict switch times, groups and prefixes, and say what the arena holds."""
    from . import profile as cli_profile

    try:
        wanted = cli_profile.parse_deadlines(deadlines)
    except InvalidInput as error:
        raise click.BadParameter(error.message, param_hint="--deadline") from None
    _listing(
        lambda c: cli_profile.report(c.plan(), wanted), cli_profile.report_view, as_json, watch
    )


# ---- inference ---------------------------------------------------------------------------------


@main.command()
@name_argument
@click.option("--input", "path", type=click.Path(), help="x.npy, inputs.npz or photo.jpg.")
@click.option("--random", "is_random", is_flag=True, help="Made-up inputs (the default).")
@click.option("--output", type=click.Path(), help="Write the last result: y.npy or y.npz.")
@click.option("-n", "count", type=click.IntRange(1), default=1, help="Number of requests.")
@click.option("--rate", help="poisson:50 or constant:50 requests a second.")
@click.option("--deadline", help="50ms, from sending; who waits longer is not computed.")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default=None)
@click.option("--seed", type=int, default=0, help="Of made-up inputs and arrivals.")
@json_option
def infer(
    name: str,
    path: str | None,
    is_random: bool,
    output: str | None,
    count: int,
    rate: str | None,
    deadline: str | None,
    priority: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Send requests and print each one's bill."""
    from . import infer as cli_infer

    if path and is_random:
        raise click.UsageError("--input and --random exclude each other")
    if output:
        _check_output(output)
    try:
        pace = cli_infer.parse_rate(rate) if rate is not None else None
    except InvalidInput as error:
        raise click.BadParameter(error.message, param_hint="--rate") from None
    options: dict[str, Any] = {"priority": priority or ""}
    if deadline is not None:
        options["deadline_ms"] = _ms("--deadline", deadline)
    with connected() as client:
        inputs = cli_infer.load_inputs(path, client.signature(name), seed)
        on_done = (lambda outcome: None) if as_json else _bill_printer(count)
        outcomes = cli_infer.run_requests(client, name, inputs, count, pace, options, seed, on_done)
    results = [outcome.result for outcome in outcomes if outcome.result]
    if output and results:
        output = _save(output, results[-1].outputs)
    summary = _summary(outcomes)
    if as_json:
        views.print_json({"requests": [o.row() for o in outcomes], "summary": summary})
    else:
        if count > 1:
            _print_summary(summary)
        if output and results:
            click.echo(f"wrote {output}")
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        _die(errors[0])


def _bill_printer(count: int) -> Callable[[Any], None]:
    width = len(str(count))
    titles = "".join(f"{title.removesuffix('_ms'):>10}" for title in views.BILL_COLUMNS)
    click.echo(f"{'n':>{width}}{titles}    client   (ms)")

    def show_bill(outcome: Any) -> None:
        number = f"{outcome.number + 1:>{width}}"
        if outcome.error is not None:
            click.echo(f"{number}  {type(outcome.error).__name__}: {outcome.error.message}")
            return
        bill = outcome.result.timing
        numbers = "".join(f"{getattr(bill, column):10.2f}" for column in views.BILL_COLUMNS)
        notes = ("resident " if bill.resident else "") + (
            f"preempted {bill.preempted}" if bill.preempted else ""
        )
        if outcome.is_late:
            notes += f" late: {outcome.deadline_ms:g} ms were given"
        click.echo(f"{number}{numbers}{outcome.total_ms:10.2f}   {notes}")

    return show_bill


def _summary(outcomes: list[Any]) -> dict[str, Any]:
    """Counts, and p50 and p99 of the client's own clock and of the bill."""
    good = [outcome for outcome in outcomes if outcome.result]
    summary: dict[str, Any] = {"ok": len(good), "failed": len(outcomes) - len(good)}
    if any(outcome.deadline_ms is not None for outcome in outcomes):
        summary["late"] = sum(outcome.is_late for outcome in good)
    columns = {"client_ms": [outcome.total_ms for outcome in good]}
    for column in views.BILL_COLUMNS:
        columns[column] = [getattr(outcome.result.timing, column) for outcome in good]
    for column, values in columns.items():
        if values:
            p50, p99 = views.percentile(values, 0.5), views.percentile(values, 0.99)
            summary[column] = {"p50": round(p50, 3), "p99": round(p99, 3)}
    return summary


def _print_summary(summary: dict[str, Any]) -> None:
    rows = [
        {"time": column.removesuffix("_ms"), "p50_ms": both["p50"], "p99_ms": both["p99"]}
        for column, both in summary.items()
        if isinstance(both, dict)
    ]
    late = f", {summary['late']} late" if "late" in summary else ""
    click.echo(f"\n{summary['ok']} answered{late}, {summary['failed']} failed")
    views.console().print(views.table(rows, ("time", "p50_ms", "p99_ms")))


def _check_output(path: str) -> None:
    """Before anything is asked: a result that cannot be written is lost."""
    folder = Path(path).absolute().parent
    if not path.endswith((".npy", ".npz")):
        raise click.BadParameter(f"{path!r} is neither .npy nor .npz", param_hint="--output")
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise click.BadParameter(f"{path!r} cannot be written", param_hint="--output")


def _save(path: str, outputs: dict[str, Any]) -> str:
    """Write a result; where it is. An .npy file has room for one output."""
    import numpy as np

    if len(outputs) > 1:
        path = str(Path(path).with_suffix(".npz"))
    if path.endswith(".npz"):
        np.savez(path, **outputs)
    else:
        np.save(path, next(iter(outputs.values())))
    return path


# ---- jobs --------------------------------------------------------------------------------------


@main.command(context_settings={"ignore_unknown_options": True})
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
    _done(
        row, f"job {task.name} submitted; follow it: pipeswitch jobs logs -f {task.name}", as_json
    )


@main.group(invoke_without_command=True)
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
    _listing(lambda c: c.jobs(), lambda r: views.table(r, views.JOB_COLUMNS), as_json, watch)


job_argument = click.argument("name", shell_complete=_job_names)


@jobs.command("show")
@job_argument
@json_option
@watch_option
def jobs_show(name: str, as_json: bool, watch: bool) -> None:
    """Show one job."""
    _listing(lambda c: c.task(name).status(), views.details, as_json, watch)


def _job_verb(verb: str, help_text: str) -> None:
    """One of the verbs that steer a job; they differ in nothing else."""

    @jobs.command(verb, help=help_text)
    @job_argument
    @json_option
    def act(name: str, as_json: bool) -> None:
        with connected() as client:
            row = getattr(client.task(name), verb)()
        _done(row, f"job {name} {row['state']}, step {row.get('step', 0)}", as_json)


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
            click.echo(piece, nl=False)


# ---- looking -----------------------------------------------------------------------------------


@main.command()
@json_option
@watch_option
def ps(as_json: bool, watch: bool) -> None:
    """Models, jobs and processes, and what they do now."""
    _listing(
        lambda c: c.ps(),
        lambda rows: views.table(rows, views.PS_COLUMNS, views.PS_TITLES),
        as_json,
        watch,
    )


@main.command()
@json_option
def stats(as_json: bool) -> None:
    """Counters and sizes of the server."""
    _listing(lambda c: c.stats(), views.details, as_json, watch=False)


@main.command()
@json_option
def top(as_json: bool) -> None:
    """A live view of the server (Ctrl-C leaves)."""

    def look(client: Any) -> dict[str, Any]:
        return {"about": client.about(), "rows": client.ps(), "stats": client.stats()}

    _listing(look, lambda found: views.dashboard(**found), as_json, watch=True)


@main.command()
@click.option("--deep", is_flag=True, help="Through scheduler, memory daemon and workers.")
@click.option("--wait", default="0", metavar="1m", help="Ask for so long, until it would.")
@json_option
def ping(deep: bool, wait: str, as_json: bool) -> None:
    """Whether the server would serve a request now: exit 0, else 1; 3 when nobody answers."""
    answer = _ping_until(time.monotonic() + _ms("--wait", wait) / 1000, deep)
    _done(answer, views.ping_line(answer), as_json)
    sys.exit(EXIT_OK if answer["ready"] else EXIT_FAILED)


def _ping_until(until_s: float, deep: bool) -> dict[str, Any]:
    """The first answer that says ready, or the last one; each try looks for the server anew."""
    while True:
        is_last = time.monotonic() >= until_s
        try:
            with connected() as client:
                answer: dict[str, Any] = client.ping(deep=deep)
            if is_last or answer["ready"]:
                return answer
        except ServerUnavailable:
            if is_last:
                raise
        time.sleep(PING_AGAIN_S)  # a server that is not there yet can tell nobody


@main.command()
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--seconds", type=float, default=10.0, show_default=True)
def trace(out: str, seconds: float) -> None:
    """Write the last seconds of the server's timeline (opens in ui.perfetto.dev)."""
    import json

    with connected() as client:
        timeline = client.trace(seconds)
    Path(out).write_text(json.dumps(timeline), "utf-8")
    click.echo(f"wrote {out}: {len(timeline['traceEvents'])} events (ui.perfetto.dev)")


# ---- this machine ------------------------------------------------------------------------------


@main.command()
@click.option(
    "--out", type=click.Path(file_okay=False), default=".", help="Where the timeline goes."
)
@json_option
def demo(out: str, as_json: bool) -> None:
    """Serve three models and train a fourth, then print what it cost (two minutes)."""
    sys.exit(_part("pipeswitch.demo.run", "run")(Path(out), as_json=as_json))


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--models", default="", help="Such as resnet152,inception_v3,bert-base,mlp.")
@click.option("--quick", is_flag=True, help="Under two minutes each, few trials.")
@click.option("--trials", type=click.IntRange(min=0), default=0, help="Rounds of each case.")
@click.option("--out", type=click.Path(file_okay=False), help="A folder for the reports.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def bench(
    names: tuple[str, ...],
    models: str,
    quick: bool,
    trials: int,
    out: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure this machine (none named: all).

    switch, throughput, pipeline, memory, workers, state, interference, request-path, training
    """
    run = _part("pipeswitch.cli.bench", "run")
    chosen = [model for model in models.split(",") if model]
    folder = Path(out) if out else None
    options = {"is_quick": quick, "trials": trials, "as_json": as_json, "seed": seed}
    sys.exit(run(names, models=chosen, out=folder, **options))


@main.command()
@click.option("--config", "path", type=click.Path(), help="The server's configuration file.")
@json_option
def doctor(path: str | None, as_json: bool) -> None:
    """Check whether this machine can serve, and say what to do."""
    from ..config import load
    from .doctor import examine

    findings = examine(load(path))
    if as_json:
        views.print_json([finding.row() for finding in findings])
    else:
        marks = {"ok": "✔", "warn": "!", "fail": "✘"}
        for finding in findings:
            click.echo(f"{marks[finding.status]} {finding.name:<16} {finding.text}")
            if finding.advice:
                click.echo(f"  {'':<16} → {finding.advice}")
    sys.exit(EXIT_FAILED if any(f.status == "fail" for f in findings) else EXIT_OK)


@main.group()
def config() -> None:
    """The configuration file."""


@config.command("init")
@click.argument("path", type=click.Path(dir_okay=False), required=False)
def config_init(path: str | None) -> None:
    """Write a commented file with every setting's default (to PATH, or to the screen)."""
    from ..config import example

    if path is None:
        click.echo(example(), nl=False)
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise InvalidInput(f"{path} is there already, it is not overwritten") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(example())
    click.echo(f"wrote {path}")


@config.command("check")
@click.argument("path", type=click.Path(), required=False)
@json_option
def config_check(path: str | None, as_json: bool) -> None:
    """Read the file and the environment; say everything that is wrong."""
    from ..config import load

    loaded = load(path)
    _done(dataclasses.asdict(loaded), "the configuration is good", as_json)


@config.command("schema")
def config_schema() -> None:
    """Print the file's JSON Schema."""
    from ..config import schema

    views.print_json(schema())


main.add_command(keys)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(pipeswitch completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "pipeswitch", "_PIPESWITCH_COMPLETE").source())
