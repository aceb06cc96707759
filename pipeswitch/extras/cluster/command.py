"""``pipeswitch cluster``: many machines as one server, on Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import click

from ...base.config import Config
from ...base.errors import InvalidInput, ModelNotFound
from ...cli import views
from ...cli.common import Group, json_option, print_done
from ...wire.private import check_secret
from .cluster_client import answer_of, connect_ray, need_ray, placement_of

address_option = click.option(
    "--address",
    default="auto",
    show_default=True,
    help="Ray's address, as Ray prints it; auto: this machine's Ray.",
)


@click.group(cls=Group)
def cluster() -> None:
    """Use many machines like one server, with Ray; clients set PIPESWITCH_HOST=cluster.

    Ray starts a server on each machine, watches it and restarts it. No request goes through Ray.
    """


@cluster.command()
@click.option(
    "--local",
    type=click.IntRange(1, 64),
    metavar="N",
    help='Start Ray with N servers on this machine, until Ctrl-C or "cluster down".',
)
@address_option
@click.option("--state-dir", type=click.Path(), help="Folder of the state of all nodes.")
@click.option(
    "--scale",
    type=(click.IntRange(0), click.IntRange(1)),
    metavar="MIN MAX",
    help="Start and stop servers with the load, on machines from Ray (packaging/cluster.yaml).",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- SERVE-OPTION...]")
@json_option
def up(
    local: int | None,
    address: str,
    state_dir: str | None,
    scale: tuple[int, int] | None,
    flags: tuple[str, ...],
    as_json: bool,
) -> None:
    """Start a server on each of Ray's machines, with the options after --.

    Run it again when you add a machine: running servers stay as they are.

    pipeswitch cluster up --local 3 -- --device cpu --arena 256MiB
    """
    if scale and scale[0] > scale[1]:
        raise InvalidInput(f"--scale is MIN MAX: {scale[0]} is more than {scale[1]}")
    if scale and local:
        raise InvalidInput(
            "--scale is for machines that Ray starts, so it excludes --local",
            hint="pipeswitch cluster up --scale 1 4",
        )
    from .placement_actor import start_nodes
    from .ray_nodes import machines

    folder = os.path.abspath(state_dir or Path(Config().server.state_dir) / "cluster")
    if local:
        ray = _start_ray()
        where = ray.get_runtime_context().get_node_id()
        names = {f"node-{index}": where for index in range(local)}
        hosts = dict.fromkeys(names, "127.0.0.1")
    else:
        ray = connect_ray(address)
        names, hosts = machines(ray, only_ours=scale is not None)
    count = start_nodes(ray, names, folder, hosts, flags, scale)
    row = {"nodes": sorted(names), "address": ray.get_runtime_context().gcs_address}
    ready = f"{count} of {len(names)} nodes are ready at {row['address']}: PIPESWITCH_HOST=cluster"
    print_done(row, ready, as_json)
    if local:
        _wait_for_its_end(ray)


def _start_ray() -> Any:
    """Start Ray on this machine, with the user's token, without dashboard and client port."""
    need_ray()
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        _check_token(Path.home() / ".ray" / "auth_token")
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise servers run at a low priority
    import ray

    ray.init(
        address="local",
        namespace="pipeswitch",
        include_dashboard=False,
        num_cpus=1,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    return ray


def _check_token(path: Path) -> None:
    """Create Ray's token file, readable only by this user, as its reader can run code."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        check_secret(path)


def _wait_for_its_end(ray: Any) -> None:
    from .ray_nodes import node_names

    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopped and node_names(ray):
        signal.sigtimedwait((), 0.5)  # returns at a signal, or after the interval
    with contextlib.suppress(Exception):
        _stop(ray, node_names(ray), 10.0)
    ray.shutdown()


@cluster.command()
@address_option
@json_option
def status(address: str, as_json: bool) -> None:
    """Show the nodes, and where each model is served."""
    from .ray_nodes import node_names

    ray = connect_ray(address)
    facts = answer_of(ray, placement_of(ray).status.remote())
    starting = [
        one for one in node_names(ray) if one not in {row["name"] for row in facts["nodes"]}
    ]
    facts["nodes"] += [{"name": one, "state": "starting"} for one in starting]
    if as_json:
        views.print_json(facts)
        return
    columns = (
        "name",
        *(["state"] if starting else []),
        "address",
        "owners",
        "http",
        "grpc",
        "waiting",
        "jobs",
    )
    views.console().print(views.Listing(facts["nodes"], columns))
    rows = [
        {"model": name, "serving": one["serving"], "nodes": ", ".join(one["nodes"])}
        for name, one in facts["models"].items()
    ]
    views.console().print(views.Listing(rows, ("model", "serving", "nodes")))


@cluster.command()
@address_option
@click.option(
    "--drain", default=30.0, show_default=True, help="Seconds to finish accepted requests."
)
@json_option
def down(address: str, drain: float, as_json: bool) -> None:
    """Stop all nodes: each finishes accepted requests; models and jobs stay in their folders."""
    from .ray_nodes import node_names

    ray = connect_ray(address)
    names = node_names(ray)
    _stop(ray, names, drain)
    print_done({"stopped": names}, f"{len(names)} nodes stopped", as_json)


@cluster.command()
@click.argument("node")
@address_option
@json_option
def drain(node: str, address: str, as_json: bool) -> None:
    """Move a node's models and jobs to other nodes, let it finish its requests, and stop it."""
    from .placement_actor import STOP_S
    from .ray_nodes import stop_nodes

    ray = connect_ray(address)
    missed = answer_of(ray, placement_of(ray).drain.remote(node))
    if missed:
        raise ModelNotFound(f"{node} stays: {'; '.join(missed)}", hint="pipeswitch cluster status")
    stop_nodes(ray, [node], STOP_S)
    print_done({"drained": node}, f"{node} is drained and stopped", as_json)


def _stop(ray: Any, names: list[str], drain_s: float) -> None:
    from .ray_nodes import RESOURCE, request_machines, stop_nodes

    with contextlib.suppress(Exception):
        ray.kill(placement_of(ray))
    if any(RESOURCE in node["Resources"] for node in ray.nodes()):
        request_machines(0)
    stop_nodes(ray, names, drain_s)
