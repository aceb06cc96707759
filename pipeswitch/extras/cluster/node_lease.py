"""Parts of a cluster in a node's server: the lease of its jobs, and the table of nodes.

If the lease ends, jobs stop before placement may start them on another node.

The node's actor writes the end of the lease to the server's standard input, and renews it while
placement queries the node. If the actor's process dies, the server shuts down normally. If the
lease ends, the server pauses its jobs and continues to serve models.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from ...base.codec import UNREADABLE
from ...base.config import Config
from ...base.errors import InvalidInput, ModelNotFound, ServerUnavailable
from ...client.client import FINAL_JOB_STATES, Client


def watch(jobs: Path) -> None:
    """Pause the server's jobs whenever the lease ends. Runs in a thread of the server.

    If the node's actor has ended or this thread fails, shut the server down, because its jobs must
    not continue.

    Args:
        jobs: folder with the node's record of each job.
    """
    until_s, address = math.inf, ""
    try:
        while True:
            wait_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
            if select.select([0], [], [], wait_s)[0]:
                heard = os.read(0, 1 << 16).decode().split()
                if not heard:
                    break
                until_s, address = float(heard[-2]), heard[-1]
            else:
                until_s = math.inf
                with Client(address) as client:
                    pause_jobs(client, jobs)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def pause_jobs(client: Client, jobs: Path, name: str = "") -> None:
    """Commit and pause the server's jobs, or the named one, until the node resumes them."""
    futures = []
    for row in client.jobs():
        folder = jobs / row["name"]
        is_over_or_paused = row["state"] in {*FINAL_JOB_STATES, "paused"}
        if name in ("", row["name"]) and not is_over_or_paused and folder.is_dir():
            (folder / "held").touch()
            body = {"name": row["name"], "action": "pause"}
            futures.append(client._connection.request("job", body=body))
    for answer in futures:
        with contextlib.suppress(InvalidInput, ModelNotFound):  # the job has ended meanwhile
            answer.result()


def shown_table(config: Config) -> dict[str, Any]:
    """Return the cluster's table for the verb ``nodes``, without the keys of gateways."""
    if not (path := config.gateway.cluster):
        raise InvalidInput("this server is not part of a cluster", hint="pipeswitch models")
    try:
        table = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE):
        text = "this node has no table of the cluster yet"
        raise ServerUnavailable(text, hint="ask again") from None
    for facts in table["nodes"].values():
        del facts["gateway_keys"]
    return table
