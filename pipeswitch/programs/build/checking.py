"""Does what was exported compute the plain module's bits? Asked before it is sent.

A graph can differ from the module it was made from: torch has fused kernels that export does not
see, and what a process has set (its default dtype) does not travel. The server that gets the
graph alone could not tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from ...errors import RegistrationRefused
from ..bundle import Graph
from ..graph import CompiledGraph

Compute = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

_FUSED: Final = (
    "torch computes attention in a fused kernel here, which does not travel: call "
    "torch.backends.mha.set_fastpath_enabled(False), then what you compute is what is served"
)


class BatchMatters(Exception):
    """The program's bits are right at the example's batch, and not at another."""


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so a NaN equals itself, and 0.0 is not -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*flat)


@contextlib.contextmanager
def workers_default_dtype() -> Iterator[None]:
    """A worker computes with torch's own default dtype, whatever this process has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_program(
    graph: Graph, weights: Sequence[torch.Tensor], plain: Compute, inputs: Sequence[torch.Tensor]
) -> None:
    """Compare the program with the module at the example's batch, and at another if it may vary.

    Args:
        graph: what travels.
        weights: its weights, on the host.
        plain: the module, with flat inputs and outputs, in eval mode.
        inputs: what it was exported with.

    Raises:
        RegistrationRefused: two runs of the module differ, or the program's from it.
        BatchMatters: at another batch alone.
    """
    inputs = [value.clone(memory_format=torch.contiguous_format) for value in inputs]
    expected, again = _run(plain, inputs), _run(plain, inputs)
    if not _all_same(expected, again):
        raise RegistrationRefused(
            "module",
            "two runs on the example inputs differ: it keeps state between calls or draws "
            "random numbers",
            hint="make forward depend on its inputs and weights alone",
        )
    if any(value.device.type != "cpu" for value in (*inputs, *expected)):
        return  # computed elsewhere: other bits are no surprise
    program = _program(graph, weights)
    if not _all_same(expected, _run(program, inputs)):
        raise RegistrationRefused(
            "verification",
            "the exported graph does not compute the module's own bits",
            hint=_why(plain, inputs, _run(program, inputs)),
        )
    for other in _at_another_batch(graph, inputs):
        answer = _run_if_it_takes(plain, other)
        if answer is not None and not _all_same(answer, _run(program, other)):
            raise BatchMatters(f"at batch {other[0].shape[0]} it does not compute the same bits")


def _program(graph: Graph, weights: Sequence[torch.Tensor]) -> Compute:
    compiled = CompiledGraph(graph, [(0, len(graph.nodes))], "cpu")
    arguments = tuple(weights[index] for index in compiled.group_weights[0])

    def compute(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode(), workers_default_dtype():
            environment = compiled.start(inputs)
            compiled.calls[0](environment, arguments)
            return compiled.finish(environment, weights)

    return compute


def _run_if_it_takes(plain: Compute, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """None: whatever the model's code raises, it does not take this batch."""
    try:
        return _run(plain, inputs)
    except Exception:
        return None


def _run(compute: Compute, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(compute([value.clone() for value in inputs]))


def _all_same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


def _at_another_batch(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The inputs at batch 1, or 2 if that is theirs: extents of 1 broadcast. None when fixed."""
    if not any(None in spec.shape for spec in graph.inputs):
        return []
    other = 2 if inputs[0].shape[0] == 1 else 1
    if not graph.batch_min <= other <= graph.batch_max:
        return []
    return [[torch.cat([value, value])[:other] for value in inputs]]


def _why(plain: Compute, inputs: Sequence[torch.Tensor], found: list[torch.Tensor]) -> str:
    """What the caller can do about a difference; empty when we do not know."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        is_fused = before and _all_same(_run(plain, inputs), found)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    if is_fused:
        return _FUSED
    if torch.get_default_dtype() is not torch.float32:
        return "it depends on torch.set_default_dtype: name the dtypes in forward"
    return ""
