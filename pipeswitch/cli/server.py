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

from ..base.config import SECTIONS
from ..base.errors import PipeSwitchError, ServerUnavailable
from ..base.settings import rules_of, settings
from . import common, views

PING_AGAIN_S: Final = 0.1  # interval between the attempts of ping --wait
RATE_LOOKS: Final = 10  # number of samples that top keeps
EXIT_WAIT_S: Final = 30.0  # maximum time from a server's last reply to its exit


SETTINGS: Final[Mapping[str, str]] = {
    "--device": "device.name",
    "--listen": "server.listen",
    "--name": "server.name",
    "--arena": "device.arena",
    "--host-store": "host.store",
    "--pool": "server.pool",
    "--models": "server.models",
    "--state-dir": "server.state_dir",
    "--auth": "server.auth",
    "--keys-dir": "server.keys_dir",
    "--tcp-roles": "server.tcp_roles",
    "--standby": "workers.standby",
    "--threads": "workers.threads",
    "--policy": "scheduler.policy",
    "--admission": "scheduler.admission",
    "--default-deadline": "scheduler.default_deadline",
    "--link-gbps": "device.link_gbps",
    "--commit-every": "scheduler.commit_every",
    "--allow-code": "server.allow_code",
    "--http": "gateway.http",
    "--grpc": "gateway.grpc",
    "--gateway-roles": "gateway.roles",
    "--gateway-tokens": "gateway.tokens",
}
"""Options of ``serve``, with the settings that they override."""
REPEATED: Final = ("--device", "--allow-code")


def _settings(command: Any) -> Any:
    """Add the options of ``SETTINGS``; their help is that of the configuration file."""
    for flag, place in reversed([*SETTINGS.items()]):
        section, _, key = place.partition(".")
        item = settings(SECTIONS[section])[key]
        rules, is_repeated = rules_of(item.kind), flag in REPEATED
        command = click.option(
            flag,
            f"{section}__{key}",
            multiple=is_repeated,
            type=click.Choice(rules.choices) if rules.choices else str,
            metavar=None if rules.choices else key.upper(),
            help=item.help[0].upper() + item.help[1:] + " (repeatable)" * is_repeated + ".",
        )(command)
    return command


@click.command()
@click.option("--config", "path", type=click.Path(), help="File (default: pipeswitch.toml).")
@_settings
@click.option("--profiles-dir", type=click.Path(), help="Folder of measured profiles of models.")
@click.option("--no-http", is_flag=True, help="Serve neither HTTP nor gRPC.")
def serve(path: str | None, no_http: bool, **flags: Any) -> None:
    """Run a server until it is told to stop."""
    from ..base.config import load

    if no_http and (flags["gateway__http"] or flags["gateway__grpc"]):
        raise click.UsageError("--no-http excludes --http and --grpc")
    if (listen := flags["server__listen"]) and "://" not in listen:  # as --host takes it
        flags["server__listen"] = f"tcp://{listen}"
    config = load(path, flags=_flag_tree(flags, no_http=no_http))
    common.warn_of_variables()
    if config.server.models and not os.path.isdir(config.server.models):
        views.echo(f"Warning: [server] models: no folder {config.server.models} yet", err=True)
    if ":" in config.scheduler.policy:
        sys.path.append(os.getcwd())  # for a policy of the user's own
    run = common.part("pipeswitch.controller.main", "serve")
    sys.exit(run(config))


def _flag_tree(flags: Mapping[str, Any], *, no_http: bool = False) -> dict[str, Any]:
    """Return flags ``SECTION__KEY`` as a tree like the file's, without those that are None."""
    tree: dict[str, Any] = {"gateway": dict.fromkeys(("http", "grpc"), "off") if no_http else {}}
    for name, value in flags.items():
        section, _, key = name.partition("__")
        setting = ",".join(value) or None if isinstance(value, tuple) else value
        if not key:
            tree[section] = setting
        elif setting is not None:
            tree.setdefault(section, {})[key] = setting
    return tree


@click.command()
@click.option("--drain", default="30s", show_default=True, help="Time to finish accepted requests.")
@common.json_option
def stop(drain: str, as_json: bool) -> None:
    """Stop the server: it finishes accepted requests and commits its jobs."""
    drain_s = common.milliseconds("--drain", drain) / 1000
    with common.connected() as client, contextlib.ExitStack() as stack:
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
    common.print_done({"stopped": pid}, f"server {pid} stopped", as_json)


def _exit_watcher(pid: int, stack: contextlib.ExitStack) -> int | None:
    """Return a descriptor that is readable after the server's exit; None for an unknown pid."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


@click.command()
@common.json_option
@common.watch_option
def ps(as_json: bool, watch: bool) -> None:
    """Show models, jobs and processes, and what they are doing."""
    common.listing(lambda c: c.ps(), views.ps_table, as_json, watch)


@click.command()
@common.json_option
def stats(as_json: bool) -> None:
    """Show the server's counters and sizes."""
    common.listing(lambda c: c.stats(), views.details, as_json, watch=False)


@click.command()
@common.json_option
def top(as_json: bool) -> None:
    """Show a live view of the server (Ctrl-C quits)."""
    samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=RATE_LOOKS)

    def look(client: Any) -> dict[str, Any]:
        about, rows, stats = client.about(), client.ps(), client.stats()
        tokens = {row["name"]: row["tokens"] for row in rows if "tokens" in row}
        samples.append((stats["up_s"], tokens))
        views.add_rates(rows, samples[0][1], stats["up_s"] - samples[0][0])
        rows = [{**row, **stats.get("latency", {}).get(row["name"], {})} for row in rows]
        return {"about": about, "rows": rows, "stats": stats}

    common.listing(look, lambda state: views.dashboard(**state), as_json, watch=sys.stdout.isatty())


@click.command()
@click.option("--deep", is_flag=True, help="Check scheduler, memory daemon and workers, too.")
@click.option(
    "--wait", default="0", metavar="1m", help="Wait until it is ready, at most this long."
)
@common.json_option
def ping(deep: bool, wait: str, as_json: bool) -> None:
    """Check whether the server would serve a request now. Exit status: 0 yes, 1 no, 3 no answer."""
    answer = _ping_until(time.monotonic() + common.milliseconds("--wait", wait) / 1000, deep)
    common.print_done(answer, views.ping_line(answer), as_json)
    sys.exit(common.EXIT_OK if answer["ready"] else common.EXIT_FAILED)


def _ping_until(until_s: float, deep: bool) -> dict[str, Any]:
    """Return the first answer that is ready, or the last one; connect again for each attempt.

    Each change of what it waits for is printed to stderr.
    """
    last_why = ""
    while True:
        is_last = time.monotonic() >= until_s
        try:
            with common.connected() as client:
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

    out = common.suffixed(out, ".json")
    with common.connected() as client:
        timeline = client.trace(seconds)
    Path(out).write_text(json.dumps(timeline), "utf-8")
    views.echo(f"wrote {out}: {len(timeline['traceEvents'])} events (ui.perfetto.dev)")
