"""The gate's hooks on a script's model: they run, but are not in copies and files of the model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from pipeswitch.devices.worker_device import Pacer
from pipeswitch.workers.training.hooks import hook_modules
from pipeswitch.workers.training.objects import TrainedObjects

CALLS: list[int] = []
X = torch.ones(2, 4)


class Counted(Pacer):
    def look(self) -> None:
        CALLS.append(1)


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    CALLS.clear()
    Pacer.current = Counted()
    yield
    Pacer.current = None


def announce(module: nn.Module, args: object) -> None:
    """Hook that the training script itself registers."""
    CALLS.append(100)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def hooked() -> nn.Sequential:
    model = net()
    hook_modules([model])
    return model


def test_a_call_passes_the_gate_at_each_layer_and_no_more_when_the_hooks_are_gone() -> None:
    model = net()
    handles = hook_modules([model])
    model(X)
    assert CALLS == [1, 1]
    for handle in handles:
        handle.remove()
    model(X)
    assert CALLS == [1, 1]
    hook_modules([model])  # again, like a script's next loop
    model(X)
    assert CALLS == [1, 1, 1, 1]


def test_on_a_gpu_short_layers_have_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    handles = hook_modules([model])
    model(X)
    assert CALLS == [1]
    model(X).sum().backward()
    assert CALLS == [1, 1, 1]
    for handle in handles:
        handle.remove()
    Pacer.current = None
    assert len(hook_modules([model])) == 5, "on the host each of them may compute for long"


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("dump", [pickle.dumps, saved])
def test_a_saved_model_needs_nothing_of_ours(dump: Callable[[nn.Module], bytes]) -> None:
    model = hooked()
    model.register_forward_pre_hook(announce)  # the script's own hook is kept
    data = dump(model)
    assert b"workers.training" not in data
    assert b"announce" in data
    torch.load(io.BytesIO(saved(model)), weights_only=False)(X)
    assert CALLS == [100]


def test_a_script_and_a_trace_of_a_model_compute_the_same() -> None:
    model = hooked()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for traced in (torch.jit.script(model), torch.jit.trace(model, X)):
            file = io.BytesIO()
            torch.jit.save(traced, file)
            file.seek(0)
            assert torch.equal(torch.jit.load(file)(X), model(X))


def test_an_export_and_a_compiled_model_compute_the_same() -> None:
    model = hooked()
    exported = torch.export.export(model, (X,)).module()
    assert torch.equal(exported(X), model(X))
    assert torch.equal(torch.compile(model, backend="eager")(X), model(X))


def test_a_copy_passes_the_gate_too() -> None:
    for copied in (copy.deepcopy(hooked()), copy.deepcopy(copy.deepcopy(hooked()))):
        CALLS.clear()
        copied(X)
        assert CALLS == [1, 1]
        assert b"workers.training" not in saved(copied)


def trained(model: nn.Module) -> TrainedObjects:
    return TrainedObjects({"model": model}, {}, {}, {})


def test_a_weight_that_a_hook_makes_anew_is_no_alias() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU())
        both = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    assert not trained(model).aliased()
    model(X)
    assert not trained(model).aliased()
    view = both[0].weight_orig.data
    assert trained(both).aliased() == ["model.0.weight_orig"]
    del view


def test_a_view_that_nobody_makes_anew_is_an_alias() -> None:
    model = net()
    model.kept = model[0].weight.data
    assert trained(model).aliased() == ["model.0.weight"]
