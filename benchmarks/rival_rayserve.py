"""Ray Serve with model multiplexing, for ``bench fleet``: ``PYTHON -P rival_rayserve.py ORDER``.

One replica that keeps one model, mapped from its file as stop-and-start maps it (``child.once``).
It says when it serves over HTTP; then for each line, which names a model, it asks once through
Serve's own handle. An answer is a byte, 1 if the model was loaded for it, and the output.
"""

from __future__ import annotations

import base64
import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=8)
class Models:
    """All models of the order; ``order["models"]`` are orders for ``benchmarks.plain``."""

    def __init__(self, order: dict[str, Any]) -> None:
        sys.path += order["path"]  # behind Serve's own: torch, and this package
        import torch

        self.models, self.torch, self.loads = order["models"], torch, 0
        self.shapes = {name: one_input(one).shape for name, one in self.models.items()}
        torch.set_num_threads(order["threads"])
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    @serve.multiplexed(max_num_models_per_replica=1)  # type: ignore[untyped-decorator]
    async def get_model(self, name: str) -> Any:
        from safetensors.torch import load_file

        from benchmarks import child, plain

        self.loads += 1
        module = plain.structure(self.models[name])
        child._assign(module, load_file(self.models[name]["weights_path"]))
        return module

    async def answer(self, x: Any) -> bytes:
        loads, name = self.loads, serve.get_multiplexed_model_id()
        model = await self.get_model(name)
        with self.torch.inference_mode():
            y = model(self.torch.from_numpy(x).reshape(self.shapes[name])).numpy()
        return bytes([self.loads > loads]) + bytes(y.tobytes())

    async def __call__(self, request: Request) -> Response:
        return Response(await self.answer(np.frombuffer(await request.body(), np.float32)))


def one_input(order: dict[str, Any]) -> Any:
    return next(iter(np.load(order["inputs_path"]).values()))


def main(order: dict[str, Any]) -> None:
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False,
             object_store_memory=256 << 20, logging_level="ERROR")  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": order["port"]})
    handle = serve.run(Models.bind(order))  # type: ignore[attr-defined]
    inputs = {name: one_input(one).ravel() for name, one in order["models"].items()}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        began_s = time.monotonic()
        asked = handle.options(method_name="answer", multiplexed_model_id=name)
        found = asked.remote(inputs[name]).result()
        took_ms = (time.monotonic() - began_s) * 1000.0
        answer = base64.b64encode(found).decode()
        print(json.dumps({"total_ms": took_ms, "answer": answer}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
