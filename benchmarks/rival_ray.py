"""Ray Serve with one model, for ``bench gateway``; it is started like ``rival_kserve.py``.

It has one replica, which reads and writes the measured part of the Open Inference Protocol's JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from typing import Any

os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=64)
class Served:
    """Model in a replica of Ray Serve."""

    def __init__(self, order: dict[str, Any]) -> None:
        sys.path += order["path"]  # folders with torch and this package, after Ray Serve's own path
        from benchmarks.plain import answer, network

        self.answer, self.network = answer, network(order)

    async def __call__(self, request: Request) -> Response:
        outputs = self.answer(self.network, (await request.json())["inputs"])
        return Response(json.dumps({"outputs": outputs}), media_type="application/json")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        log_to_driver=False,
        object_store_memory=256 << 20,
        logging_level="ERROR",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": given["port"]})
    serve.run(Served.bind(given))  # type: ignore[attr-defined]
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()
