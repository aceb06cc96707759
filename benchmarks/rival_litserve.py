"""``litserve.LitServer`` with one model, for ``bench gateway``; started like ``rival_kserve.py``.

It has one worker, because in our server, too, one worker computes at a time.
"""

# This file does not import annotations from __future__, because litserve inspects annotations.
import json
import sys
from typing import Any

import litserve
from fastapi import Request


class Served(litserve.LitAPI):  # type: ignore[misc]
    """Model that reads and writes the measured part of the Open Inference Protocol's JSON."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.order = order

    def setup(self, device: str) -> None:
        from benchmarks.plain import network

        self.network = network(self.order)

    def decode_request(self, request: Request) -> Any:
        return request["inputs"]

    def predict(self, tensors: Any) -> Any:
        from benchmarks.plain import answer

        return answer(self.network, tensors)

    def encode_response(self, output: Any) -> Any:
        return {"outputs": output}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.path += given["path"]
    server = litserve.LitServer(Served(given), accelerator="cpu", workers_per_device=1)
    server.run(port=given["port"], host="127.0.0.1", generate_client_file=False)
