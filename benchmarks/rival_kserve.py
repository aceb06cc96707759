"""``kserve``'s Python server with one model, for ``bench gateway``.

Usage: ``PYTHON -P rival_kserve.py ORDER``, where PYTHON's environment has ``kserve``. torch and
this package are imported from the folders in the order's ``path``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kserve import InferOutput, InferResponse, Model, ModelServer


class Served(Model):  # type: ignore[misc]
    """Model that ``kserve`` serves with the Open Inference Protocol."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order["name"])
        from benchmarks.plain import network

        self.network = network(order)
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        from benchmarks.plain import answer

        tensors = [
            {"data": one.data, "datatype": one.datatype, "shape": one.shape}
            for one in payload.inputs
        ]
        outputs = [
            InferOutput(one["name"], one["shape"], one["datatype"], data=one["data"])
            for one in answer(self.network, tensors)
        ]
        return InferResponse(payload.id or "0", self.name, outputs)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.path += given["path"]
    ModelServer(http_port=given["port"], enable_grpc=False).start([Served(given)])
