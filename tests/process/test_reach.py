"""A kernel that reads past its arguments, simulated by ``as_strided`` in the operator's module.

The call may address the whole arena and the whole pool, like a kernel with a wrong contract. No
check before the kernel prevents such a read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, write_script
from torch import nn

from pipeswitch.base.errors import WorkerLost

PEEKERS = """
    import torch
    from torch import nn

    def items_at(tensor, x, own):
        where = float(x[0, 0])  # a number: this is no graph
        place = int(where) if where >= 0 else own
        return tensor.as_strided((4,), (1,), place).clone(), torch.tensor([float(own)])

    class Weights(nn.Module):
        '''Four floats of the arena, and where its own weights lie; x says which.'''
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            nn.init.constant_(self.layer.weight, 7.0)

        def forward(self, x):
            weight = self.layer.weight
            self.layer(x)
            return items_at(weight, x, weight.storage_offset())

    class Inputs(Weights):
        '''The same of the request pool.'''
        def forward(self, x):
            self.layer(x)
            return items_at(x, x, x.storage_offset())
"""
FLOATS_PER_PAGE, FLOATS_PER_REGION = 1024, (2 << 20) // 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("peekers")
    write_script(folder, "peekers.py", PEEKERS)
    sys.path.insert(0, str(folder))
    try:
        path = f"{folder}:{Path(__file__).parents[2]}"
        with checked_server(arena="32MiB", environment={"PYTHONPATH": path}) as checked:
            checked.client.register("secret", constant(42.0), example_inputs=-torch.ones(1, 4))
            yield checked
    finally:
        sys.path.remove(str(folder))


def register(running: Checked, name: str) -> None:
    running.client.register(
        name.lower(), f"peekers:{name}", weights="random:5", inputs={"x": ((1, 4), "float32")}
    )


def constant(value: float) -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    return layer


def items(running: Checked, model: str, place: int) -> tuple[list[float], int]:
    answer = running.client.infer(model, torch.full((1, 4), float(place)))
    output, own = answer.outputs.values()
    return output.reshape(-1).tolist(), int(own.reshape(-1)[0])


@pytest.mark.parametrize("beyond", [-FLOATS_PER_REGION, FLOATS_PER_PAGE, FLOATS_PER_REGION])
def test_of_the_arena_a_kernel_reads_its_own_model_and_no_other(
    running: Checked, beyond: int
) -> None:
    running.client.infer("secret", torch.ones(1, 4))  # puts "secret" on the device, too
    register(running, "Weights")
    values, own = items(running, "weights", -1)
    assert values == [7.0] * 4
    assert items(running, "weights", own + 4)[0] == [7.0] * 4
    with pytest.raises(WorkerLost):
        items(running, "weights", own + beyond)
    running.client.unregister("weights")
    assert running.client.infer("secret", torch.ones(1, 4)).timing.resident


def test_of_the_pool_a_kernel_reads_its_own_request_and_no_more(running: Checked) -> None:
    register(running, "Inputs")
    _, own = items(running, "inputs", -1)
    slack, _ = items(running, "inputs", own + 4)
    assert slack == [0.0] * 4, "what lay behind the request was another's"
    with pytest.raises(WorkerLost):
        items(running, "inputs", own + FLOATS_PER_PAGE)  # its reply or another request is there
