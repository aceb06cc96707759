"""A model larger than the arena, on a GPU. Its own module: another server would hold the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeswitch.testing import server
from tests.gpu.test_cuda_server import RUNGS, module_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rung", ["lowest", "highest"])
def test_a_model_larger_than_the_arena_answers_as_plain_torch_does(rung: str) -> None:
    environment = {f"PIPESWITCH_DEVICE__{key}": value for key, value in RUNGS[rung].items()}
    with (
        server(arena="24MiB", devices=("cuda:0",), environment=environment) as streaming,
        streaming.client() as client,
    ):
        x, module = torch.randn(2, 3, 96, 96), module_of(5)
        client.register("larger", module, example_inputs=(x,))
        assert client.show("larger")["bytes"] > 24 << 20
        with torch.inference_mode():
            expected = module.cuda()(x.cuda()).cpu().numpy()
        for _ in range(6):
            output = next(iter(client.infer("larger", x.numpy()).outputs.values()))
            np.testing.assert_allclose(output, expected, rtol=2e-3, atol=2e-3)
