"""The verbs about the server itself: run it, stop it, show its state."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from ..base.errors import PipeSwitchError, ServerUnavailable
from . import views
from .common import (
    EXIT_FAILED,
    EXIT_OK,
    connected,
    json_option,
    listing,
    milliseconds,
    part,
    print_done,
    suffixed,
    watch_option,
)

PING_AGAIN_S: Final = 0.1  # interval between the attempts of ping --wait
RATE_LOOKS: Final = 10  # number of samples that top keeps
EXIT_WAIT_S: Final = 30.0  # maximum time from a server's last reply to its exit


def _commas(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> str | None:
    return ",".join(names) or None


@click.command()
@click.option("--config", "path", type=click.Path(), help="File (default: pipeswitch.toml).")
@click.option(
    "--device",
    "device__name",
    multiple=True,
    callback=_commas,
    help="auto, cpu or cuda:0; repeat it for several devices.",
)
@click.option("--listen", "server__listen", help="Address for TCP clients.")
@click.option("--name", "server__name", help="Name of the owner's socket (default: the port).")
@click.option("--arena", "device__arena", help="Device memory: auto, 20GiB or a fraction.")
@click.option(
    "--host-store", "host__store", help="Host memory for models: auto, 32GiB or a fraction."
)
@click.option("--pool", "server__pool", help="Shared memory for waiting requests: 512MiB.")
@click.option(
    "--state-dir", "server__state_dir", type=click.Path(), help="Folder of models, jobs and logs."
)
@click.option(
    "--auth", "server__auth", help="keys: TCP clients need a key on loopback (default: auto)."
)
@click.option("--keys-dir", "server__keys_dir", type=click.Path(), help="Folder of the keys.")
@click.option(
    "--tcp-roles",
    "server__tcp_roles",
    metavar="ROLE,ROLE",
    help="Roles of every TCP client: infer (default), urgent, register, operate, code.",
)
@click.option("--standby", "workers__standby", type=int, help="Number of standby workers.")
@click.option(
    "--threads", "workers__threads", type=int, help="Compute threads of a worker on the cpu device."
)
@click.option(
    "--policy",
    "scheduler__policy",
    help="Order of requests: priority, fifo, edf, sjf, collate, … or your own as module:name.",
)
@click.option(
    "--admission",
    "scheduler__admission",
    type=click.Choice(["off", "deadline"]),
    help="deadline: refuse requests at once if they would miss their deadline (default: off).",
)
@click.option(
    "--default-deadline",
    "scheduler__default_deadline",
    help="Deadline of requests that have none: 2s; 0 (default): no deadline.",
)
@click.option(
    "--link-gbps",
    "device__link_gbps",
    type=float,
    help="cpu device: simulate a host link of this many GB/s.",
)
@click.option("--commit-every", "scheduler__commit_every", help="Time between a job's commits: 5s.")
@click.option("--profiles-dir", type=click.Path(), help="Folder of measured profiles of models.")
@click.option(
    "--allow-code",
    "server__allow_code",
    multiple=True,
    metavar="PATTERN",
    help="Module names and script paths that TCP clients may name (repeatable).",
)
@click.option(
    "--http",
    "gateway__http",
    metavar="HOST:PORT",
    help="Address for HTTP clients, metrics and the web page.",
)
@click.option(
    "--grpc",
    "gateway__grpc",
    metavar="HOST:PORT",
    help="Address for gRPC clients, if grpcio is installed.",
)
@click.option("--no-http", is_flag=True, help="Serve neither HTTP nor gRPC.")
@click.option(
    "--gateway-roles",
    "gateway__roles",
    metavar="ROLE,ROLE",
    help="Roles of every HTTP and gRPC caller.",
)
@click.option(
    "--gateway-tokens",
    "gateway__tokens",
    type=click.Path(),
    help="File with lines NAME TOKEN ROLE,ROLE.",
)
def serve(path: str | None, no_http: bool, **flags: Any) -> None:
    """Run a server until it is told to stop."""
    from ..base.config import load

    if no_http and (flags["gateway__http"] or flags["gateway__grpc"]):
        raise click.UsageError("--no-http excludes --http and --grpc")
    config = load(path, flags=_flag_tree(flags, no_http=no_http))
    run = part("pipeswitch.controller.main", "serve")
    sys.exit(run(config))


def _flag_tree(flags: Mapping[str, Any], *, no_http: bool = False) -> dict[str, Any]:
    """Return flags ``SECTION__KEY`` as a tree like the file's, without those that are None."""
    tree: dict[str, Any] = {"gateway": dict.fromkeys(("http", "grpc"), "off") if no_http else {}}
    for name, value in flags.items():
        section, _, key = name.partition("__")
        setting = list(value) or None if isinstance(value, tuple) else value
        if not key:
            tree[section] = setting
        elif setting is not None:
            tree.setdefault(section, {})[key] = setting
    return tree


@click.command()
@click.option("--drain", default="30s", show_default=True, help="Time to finish accepted requests.")
@json_option
def stop(drain: str, as_json: bool) -> None:
    """Stop the server: it finishes accepted requests and commits its jobs."""
    drain_s = milliseconds("--drain", drain) / 1000
    with connected() as client, contextlib.ExitStack() as stack:
        pid = int(client.about()["pid"])
        exit_of = _exit_watcher(pid, stack) if client.address.startswith("ipc://") else None
        losses = client.stop_server(drain_s)
        if exit_of is not None and not select.select([exit_of], [], [], EXIT_WAIT_S)[0]:
            raise PipeSwitchError(
                f"server {pid} agreed to stop but still runs after {EXIT_WAIT_S:g} s",
                hint=f"see its log; kill {pid}",
            )
    if losses:
        raise PipeSwitchError(
            f"server {pid} stopped, but {'; '.join(losses)}",
            hint="free space on the disk of its state directory before you start it again",
        )
    print_done({"stopped": pid}, f"server {pid} stopped", as_json)


def _exit_watcher(pid: int, stack: contextlib.ExitStack) -> int | None:
    """Return a descriptor that is readable after the server's exit; None for an unknown pid."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


@click.command()
@json_option
@watch_option
def ps(as_json: bool, watch: bool) -> None:
    """Show models, jobs and processes, and what they are doing."""
    listing(lambda c: c.ps(), views.ps_table, as_json, watch)


@click.command()
@json_option
def stats(as_json: bool) -> None:
    """Show the server's counters and sizes."""
    listing(lambda c: c.stats(), views.details, as_json, watch=False)


@click.command()
@json_option
def top(as_json: bool) -> None:
    """Show a live view of the server (Ctrl-C quits)."""
    samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=RATE_LOOKS)

    def look(client: Any) -> dict[str, Any]:
        about, rows, stats = client.about(), client.ps(), client.stats()
        tokens = {row["name"]: row["tokens"] for row in rows if "tokens" in row}
        samples.append((stats["up_s"], tokens))
        views.add_rates(rows, samples[0][1], stats["up_s"] - samples[0][0])
        return {"about": about, "rows": rows, "stats": stats}

    listing(look, lambda state: views.dashboard(**state), as_json, watch=sys.stdout.isatty())


@click.command()
@click.option("--deep", is_flag=True, help="Check scheduler, memory daemon and workers, too.")
@click.option(
    "--wait", default="0", metavar="1m", help="Wait until it is ready, at most this long."
)
@json_option
def ping(deep: bool, wait: str, as_json: bool) -> None:
    """Check whether the server would serve a request now. Exit status: 0 yes, 1 no, 3 no answer."""
    answer = _ping_until(time.monotonic() + milliseconds("--wait", wait) / 1000, deep)
    print_done(answer, views.ping_line(answer), as_json)
    sys.exit(EXIT_OK if answer["ready"] else EXIT_FAILED)


def _ping_until(until_s: float, deep: bool) -> dict[str, Any]:
    """Return the first answer that is ready, or the last one; connect again for each attempt.

    Each change of what it waits for is printed to stderr.
    """
    last_why = ""
    while True:
        is_last = time.monotonic() >= until_s
        try:
            with connected() as client:
                answer: dict[str, Any] = client.ping(deep=deep)
            if is_last or answer["ready"]:
                return answer
            why = answer["why"]
        except ServerUnavailable as error:
            if is_last:
                raise
            why = error.message
        if (now_why := why.rpartition(",")[0] or why) != last_why:  # without the seconds
            views.echo(f"waiting: {why}", err=True)
            last_why = now_why
        time.sleep(PING_AGAIN_S)  # wait for the next attempt


@click.command()
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--seconds", type=float, default=10.0, show_default=True)
def trace(out: str, seconds: float) -> None:
    """Write the last seconds of the server's timeline (opens in ui.perfetto.dev)."""
    import json

    out = suffixed(out, ".json")
    with connected() as client:
        timeline = client.trace(seconds)
    Path(out).write_text(json.dumps(timeline), "utf-8")
    views.echo(f"wrote {out}: {len(timeline['traceEvents'])} events (ui.perfetto.dev)")
