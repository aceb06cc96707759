"""Ray's machines and our nodes on them: list, start, stop."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from ..client.cluster_client import NAMESPACE, NODE, node_of
from .node_actor import NodeActor

RESOURCE: Final = "pipeswitch"  # 1 of each machine that Ray brings for us; a node holds it


def node_names(ray: Any) -> list[str]:
    """Return the names of the cluster's nodes."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        one["name"].removeprefix(NODE)
        for one in actors
        if one["namespace"] == NAMESPACE and one["name"].startswith(NODE)
    )


def machines(ray: Any, *, only_ours: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Ray's living nodes by a name that stays, and where each one's server listens: on loopback if
    they are all one machine, and no other is to come.

    Args:
        only_ours: of those that Ray brings and takes away; no name stays there.
    """
    alive = [
        node
        for node in ray.nodes()
        if node["Alive"] and (not only_ours or RESOURCE in node["Resources"])
    ]
    addresses = {node["NodeManagerAddress"] for node in alive}
    names, hosts = {}, {}
    for node in alive:
        host = node["NodeManagerAddress"]
        alone = len(addresses) == len(alive) and not only_ours
        name = host.replace(":", "-") if alone else node["NodeID"][-8:]
        names[name] = node["NodeID"]
        hosts[name] = host if len(addresses) > 1 or only_ours else "127.0.0.1"
    return names, hosts


def request_machines(count: int) -> None:
    """Request machines from Ray's autoscaler; the request holds until the next one."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{RESOURCE: 1}] * count)


def start_node(
    ray: Any,
    name: str,
    where: str,
    host: str,
    folder: str,
    flags: tuple[str, ...],
    *,
    holds: bool = False,
) -> Any:
    """On Ray's node of that id; it is there already, or its machine ``holds``: Ray keeps it."""
    resources = {RESOURCE: 1} if holds else {}
    actor = detached(ray, NodeActor, NODE + name, where, soft=False, resources=resources)
    return actor.remote(name, folder, host, flags)


def detached(ray: Any, kind: type, name: str, where: str, *, soft: bool, **options: Any) -> Any:
    """Start an actor that outlives this process, on a machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        get_if_exists=True,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(where, soft=soft),
        **options,
    )


def stop_nodes(ray: Any, names: list[str], drain_s: float) -> None:
    """Stop these nodes side by side, and wait for their ends."""
    handles = [node_of(ray, name) for name in names]
    for handle, ended in [(handle, handle.stop.remote(drain_s)) for handle in handles]:
        with contextlib.suppress(Exception):  # its process ends with its server
            ray.get(ended, timeout=drain_s + 30.0)
        ray.kill(handle)
