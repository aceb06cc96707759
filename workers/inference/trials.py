"""Trials: runs that are only measured. Their inputs are made up here, their outputs go nowhere."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeswitch.devices.view import PoolView
from pipeswitch.errors import Cancelled
from pipeswitch.ipc.messages import ModelName, RunInference
from pipeswitch.programs.build.checking import resized
from pipeswitch.programs.build.verify import to_tensors
from pipeswitch.programs.dims import Values, at_batch
from pipeswitch.programs.executor import BoundProgram
from pipeswitch.programs.layout import Manifest

Key = tuple[ModelName, str, int]  # model, digest, batch


class MadeUpInputs:
    """Inputs of trials. The same for the same program and batch, so that trials compare."""

    def __init__(self, *, zero_integers: bool = False) -> None:
        """``zero_integers``: do not try random ones first."""
        self._zero_integers = zero_integers
        self._inputs: dict[Key, list[torch.Tensor]] = {}

    def of(self, message: RunInference, manifest: Manifest) -> list[torch.Tensor]:
        key = (message.model, message.digest, message.trial_batch)
        if key not in self._inputs:
            values = at_batch(manifest.dims, message.trial_batch)
            made = to_tensors(manifest.inputs, values)
            if manifest.mode == "module":  # its owner's own example
                made = _with_integers(made, manifest, values)
            self._inputs = {key: made}  # one is kept
            if self._zero_integers:
                self.be_zeros()
        return self._inputs[key]

    def be_zeros(self) -> bool:
        """Integers that a model could not take become zeros; False when they were already.

        A signature does not say what an integer means: where random ones are no valid indices,
        zeros usually are.
        """
        for key, inputs in self._inputs.items():
            zeros = [
                v if v.is_floating_point() or v.dtype is torch.bool else torch.zeros_like(v)
                for v in inputs
            ]
            if all(torch.equal(old, new) for old, new in zip(inputs, zeros, strict=True)):
                continue
            self._inputs[key] = zeros
            return True
        return False


def _with_integers(
    made: list[torch.Tensor], manifest: Manifest, values: Values
) -> list[torch.Tensor]:
    """Integers of the example, repeated and cut to the extents of the trial."""
    kept = manifest.extra.get("integers", {})
    given = [
        torch.tensor(kept[spec.name], dtype=value.dtype) if spec.name in kept else value
        for spec, value in zip(manifest.inputs, made, strict=True)
    ]
    return resized([spec.shape for spec in manifest.inputs], given, values)


def run_trial(
    bound: BoundProgram,
    message: RunInference,
    inputs: MadeUpInputs,
    before_group: Callable[[int], None],
    view: PoolView,
    slot: int,
) -> None:
    """Run once, until the board says stop.

    Raises:
        Cancelled: it was stopped between two groups because a request waits, or the model did
            not take the inputs that were guessed; it can be tried again.
    """

    def look(index: int) -> None:
        if view.board.stop(slot) == message.epoch:
            raise Cancelled("a request needs the device")
        view.quiesce()  # a group's time is that of its computation, not of its call
        before_group(index)

    values = inputs.of(message, bound.manifest)
    try:
        bound.run(values, look)
    except Cancelled:
        raise
    except Exception:  # the model's own, of inputs that were only guessed
        if inputs.be_zeros():
            raise Cancelled("the made-up inputs did not fit; the next ones are zeros") from None
        raise
