"""Other servers with one model, for ``bench gateway``: ``PYTHON -P rivals.py NAME ORDER``.

PYTHON is of a folder where ``kserve``, ``litserve`` or ``ray[serve]`` is installed; torch and this
package are found behind it. Each speaks the Open Inference Protocol's JSON, as far as it is asked
for, and has one worker: as many as compute here.
"""

# No annotation may be a text here: litserve looks at them.
import json
import os
import secrets
import signal
import sys
from typing import Any


def kserve(order: dict[str, Any]) -> None:
    from kserve import InferOutput, InferResponse, Model, ModelServer

    class Served(Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(order["name"])
            self.answer = answer_of(order)
            self.ready = True

        def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
            import torch

            y = self.answer(torch.from_numpy(payload.inputs[0].as_numpy())).numpy()
            output = InferOutput(name="y", shape=list(y.shape), datatype="FP32")
            output.set_data_from_numpy(y, binary_data=False)
            return InferResponse(payload.id or "0", self.name, [output])

    ModelServer(http_port=order["port"], enable_grpc=False).start([Served()])


def litserve(order: dict[str, Any]) -> None:
    import litserve
    from fastapi import Request

    class Served(litserve.LitAPI):  # type: ignore[misc]
        def setup(self, device: str) -> None:
            self.answer = answer_of(order)

        def decode_request(self, request: Request) -> Any:
            return tensor_of(request)

        def predict(self, x: Any) -> Any:
            return self.answer(x)

        def encode_response(self, output: Any) -> Any:
            return row_of(output)

    server = litserve.LitServer(Served(), accelerator="cpu", workers_per_device=1)
    server.run(port=order["port"], host="127.0.0.1", generate_client_file=False)


def ray(order: dict[str, Any]) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    @serve.deployment(max_ongoing_requests=64)
    class Served:
        def __init__(self) -> None:
            sys.path += order["path"]
            self.answer = answer_of(order)

        async def __call__(self, request: Request) -> Response:
            found = row_of(self.answer(tensor_of(await request.json())))
            return Response(json.dumps(found), media_type="application/json")

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False,
             object_store_memory=256 << 20, logging_level="ERROR")  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": order["port"]})
    serve.run(Served.bind())  # type: ignore[attr-defined]
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()


def answer_of(order: dict[str, Any]) -> Any:
    """Return the model as a function of its input."""
    import torch

    from benchmarks.plain import network

    module = network(order)

    @torch.inference_mode()
    def answer(x: Any) -> Any:
        return module(x)

    return answer


def tensor_of(request: Any) -> Any:
    import torch

    (x,) = request["inputs"]
    return torch.tensor(x["data"], dtype=torch.float32).reshape(x["shape"])


def row_of(y: Any) -> dict[str, Any]:
    return {"outputs": [{"name": "y", "shape": list(y.shape), "data": y.flatten().tolist()}]}


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    sys.path += given["path"]
    {"kserve": kserve, "litserve": litserve, "ray": ray}[sys.argv[1]](given)
