"""Listing of Ray's machines, and listing, start and stop of our nodes on them."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from .cluster_client import NAMESPACE, NODE, node_of
from .node_actor import NodeActor

RESOURCE: Final = "pipeswitch"  # Ray resource of autoscaled machines, 1 on each; a node occupies it


def node_names(ray: Any) -> list[str]:
    """Return the names of the cluster's nodes."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        one["name"].removeprefix(NODE)
        for one in actors
        if one["namespace"] == NAMESPACE and one["name"].startswith(NODE)
    )


def machines(ray: Any, *, only_ours: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Return two tables of Ray's living nodes: name -> Ray's id, and name -> host to listen on.

    If each machine has one node, names are addresses, which survive a restart of the machine. If
    all nodes are on one machine, their hosts are loopback.

    Args:
        only_ours: only machines that Ray's autoscaler adds and removes; names are then ids.
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
    """Start our node on Ray's node ``where``, unless it runs already; return its actor's handle.
    ``holds``: occupy the machine's ``RESOURCE``, so that Ray does not remove the machine."""
    resources = {RESOURCE: 1} if holds else {}
    actor = detached(ray, NodeActor, NODE + name, where, soft=False, resources=resources)
    return actor.remote(name, folder, host, flags)


def detached(ray: Any, kind: type, name: str, where: str, *, soft: bool, **options: Any) -> Any:
    """Return the class of a named actor that outlives this process, on Ray's node ``where``."""
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
    """Stop these nodes in parallel, and block until they have ended."""
    handles = [node_of(ray, name) for name in names]
    for handle, ended in [(handle, handle.stop.remote(drain_s)) for handle in handles]:
        with contextlib.suppress(Exception):  # the actor may exit before it answers
            ray.get(ended, timeout=drain_s + 30.0)
        ray.kill(handle)
