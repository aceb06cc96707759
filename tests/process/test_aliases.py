"""An alias of a model in the running server: every protocol, every verb, and a restart."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import checked_server, command, eager, is_bit_equal, mlp

from pipeswitch.base.errors import AlreadyExists, ModelNotFound

MODULE, X = mlp(16, 2, 1), torch.linspace(-1, 1, 16).reshape(1, 16)


def test_an_alias_is_a_model_on_every_protocol_and_after_a_restart(tmp_path: Path) -> None:
    expected = eager(MODULE, X)
    state: Any = {"state_dir": tmp_path / "state"}
    with checked_server(http=True, **state) as checked:
        client, running = checked.client, checked.running
        client.register("m", MODULE, example_inputs=(X,), aliases=["gpt-4o", "gpt-4"])
        client.register("m", MODULE, example_inputs=(X,), aliases=["o1"])
        other = mlp(16, 2, 2)
        for name, more in (("gpt-4o", []), ("n", ["m"]), ("n", ["gpt-4"])):
            with pytest.raises(AlreadyExists):
                client.register(name, other, example_inputs=(X,), aliases=more)
        assert is_bit_equal(client.infer("gpt-4o", X)["y"], expected)
        with pytest.raises(ModelNotFound) as caught:
            client.infer("gpt-4oo", X)
        assert caught.value.data["nearest"] == "gpt-4o"
        assert client.show("o1")["name"] == client.load("gpt-4")["model"] == "m"
        client.prefetch("o1")
        client.register_chain("c", ["gpt-4"])
        assert is_bit_equal(client.infer("c", X)["y"], expected)

        input_tensor = {
            "name": "x",
            "shape": [1, 16],
            "datatype": "FP32",
            "data": X.flatten().tolist(),
        }
        url = f"http://{running.http_address}"
        body = json.dumps({"inputs": [input_tensor]}).encode()
        with urllib.request.urlopen(f"{url}/v2/models/gpt-4o/infer", body, timeout=30) as answer:
            output = np.array(json.load(answer)["outputs"][0]["data"], np.float32)
        assert np.array_equal(output, expected.flatten().numpy())
        with urllib.request.urlopen(f"{url}/v2/models/gpt-4o/stats", timeout=30) as answer:
            rows = {row["name"]: row["inference_count"] for row in json.load(answer)["model_stats"]}
        assert rows == {"m": 0, "gpt-4o": 1, "gpt-4": 0, "o1": 0}
        remote = pytest.importorskip("tritonclient.grpc")
        with remote.InferenceServerClient(running.grpc_address) as triton:
            tensor = remote.InferInput("x", [1, 16], "FP32")
            tensor.set_data_from_numpy(X.numpy())
            assert np.array_equal(triton.infer("o1", [tensor]).as_numpy("y"), expected.numpy())

    with checked_server(**state) as checked:
        client, host = checked.client, ("--host", checked.running.ipc_address)
        assert is_bit_equal(client.infer("gpt-4o", X)["y"], expected)
        assert "gpt-4o" in command(*host, "models").stdout
        assert command(*host, "unregister", "gpt-4o").returncode == 0
        with pytest.raises(ModelNotFound):
            client.infer("gpt-4o", X)
        assert [row["aliases"] for row in client.models()] == [["gpt-4", "o1"], []]
        client.unregister("c")
        client.unregister("m")
        with pytest.raises(ModelNotFound):
            client.infer("o1", X)
        client.register("o1", MODULE, example_inputs=(X,))
