"""Checks that an exported graph computes the plain module's bits, before the graph is sent.

A graph can differ from its module: torch has fused kernels that cannot be exported, and a graph
does not contain settings of the process, such as the default dtype. The server has only the graph,
so it cannot detect such a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from ...base.errors import RegistrationRefused
from ..graphs.bundle import Graph
from ..graphs.graph import CompiledGraph, check_on_meta
from ..interface.dims import BATCH, Dim, Shape, Values, corners, shape_at, values_of, values_text
from ..interface.layout import ValueSpec
from ..interface.synthetic_inputs import random_inputs
from ..running.values import bytes_of
from .dynamic import NotDynamic, working_end

if TYPE_CHECKING:  # workers import this module, but not the exporter
    from .encoder import EncodedProgram

Compute = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

KEEPS_STATE: Final = (
    "make forward depend only on its inputs and weights; if the first call initializes something, "
    "call the module before you register it"
)
_FUSED: Final = (
    "torch computes attention in a fused kernel here, which cannot be exported: call "
    "torch.backends.mha.set_fastpath_enabled(False), then your results equal the server's"
)


ALIGNED_BYTES: Final = 64  # alignment of torch's own tensors; the arena uses a multiple


def align(module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copy weights that are not aligned like torch's own tensors, for example mapped weights.

    Kernels may compute other last bits from unaligned weights.

    Returns:
        The copied weights, each with its former memory.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    pairs = []
    for weight in (*module.parameters(), *module.buffers()):
        former = weight.data
        is_usual = type(former) is torch.Tensor and former.layout is torch.strided
        if is_usual and former.device.type == "cpu" and former.data_ptr() % ALIGNED_BYTES:
            key = (former.data_ptr(), former.shape, former.stride(), former.dtype)  # tied: equal
            if key not in copies:
                copies[key] = former.clone()
            weight.data = copies[key]
            pairs.append((weight, former))
    return pairs


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and all bits are equal (NaN equals itself, 0.0 is not -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(bytes_of(tensor.contiguous()) for tensor in (left, right)))


ROUNDING: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
"""Dtype -> accepted difference of an output between batch sizes, relative to its largest number."""


SUM_MASK: Final = 1e6  # a number this large may be the sum of a mask and a number
MASK: Final = 1e3  # least magnitude of a mask in an output, such as -1e4, -1e9 or 1e30


def largest_number(values: torch.Tensor) -> float:
    """Return the largest magnitude, or 0.0 if there is none. Infinities and the ends of the dtype
    do not count: they are masks, beside which any difference would be small."""
    sizes = values.abs()
    numbers = sizes[sizes < torch.finfo(values.dtype).max]
    return float(numbers.max()) if numbers.numel() else 0.0


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the differences of the finite numbers, and the largest number of ``theirs``.

    Masks do not count, since any difference is small beside them. Large numbers are masks if both
    sides agree on them, and the rest is less than a quarter as large.
    """
    is_real = ours.isfinite() & theirs.isfinite()
    sizes = theirs[is_real].double().abs()
    difference = (ours[is_real].double() - theirs[is_real].double()).abs()
    rounding = 2 * torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
    is_same = difference <= torch.where(sizes < SUM_MASK, rounding, max(rounding, 1e-4)) * sizes
    rest = float(sizes[~is_same].max()) if not bool(is_same.all()) else 0.0
    is_mask = is_same & (sizes >= max(MASK, 4 * rest))
    sizes, difference = sizes[~is_mask], difference[~is_mask]
    return difference, float(sizes.max()) if sizes.numel() else 0.0


def is_rounded(actual: torch.Tensor, own: torch.Tensor, least: float = 0.0) -> bool:
    """Return whether two tensors differ by rounding only: by ``ROUNDING``, or ``least`` if larger.
    Both limits are relative to the largest number of ``own`` (``differences``)."""
    if actual.shape != own.shape or actual.dtype is not own.dtype or actual.dtype not in ROUNDING:
        return False
    odd, own_odd = (torch.where(one.isfinite(), 0.0, one) for one in (actual, own))
    if not torch.allclose(odd, own_odd, equal_nan=True):
        return False
    difference, scale = differences(actual, own)
    most = max(ROUNDING[own.dtype], least) * scale
    return not difference.numel() or float(difference.max()) <= most


@contextlib.contextmanager
def workers_default_dtype() -> Iterator[None]:
    """Set the default dtype of a worker, float32, for the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def keeps_state(what: str) -> RegistrationRefused:
    """Return the refusal of a module whose answers depend on its earlier calls."""
    reason = f"{what}: it keeps state between calls"
    return RegistrationRefused("module", reason, hint=KEEPS_STATE)


def check_program(
    program: EncodedProgram, plain: Compute, fresh: Compute, inputs: Sequence[torch.Tensor]
) -> None:
    """Compare the program with the module, at the example's extents and at other valid extents.

    Args:
        program: the exported program, with its weights on the host.
        plain: the module, with flat inputs and outputs, in eval mode.
        fresh: the module in its state before the first call.
        inputs: the inputs of the export.

    Raises:
        RegistrationRefused: two runs of the module differ, or program and module differ.
        NotDynamic: program and module differ only at other extents than the example's.
    """
    graph, weights = program.graph, program.weights
    inputs = [value.clone(memory_format=torch.contiguous_format) for value in inputs]
    expected, again = on_clones(plain, inputs), on_clones(plain, inputs)
    if not all_same(expected, again):
        raise RegistrationRefused(
            "module",
            "two runs on the example inputs differ: it keeps state between calls or draws "
            "random numbers",
            hint="make forward depend only on its inputs and weights",
        )
    if any(value.device.type != "cpu" for value in (*inputs, *expected)):
        return  # another device may compute other bits
    compute = program_on_cpu(graph, weights)
    own = values_of((spec.shape for spec in graph.inputs), (value.shape for value in inputs))
    assert own is not None
    if not all_same(expected, on_clones(compute, inputs)):
        hint = _why(plain, inputs, on_clones(compute, inputs))
        if not hint and 1 in own.values():  # it was exported with another extent
            raise NotDynamic(f"at {values_text(own)} the module takes another path")
        reason = "the exported graph does not compute the module's own bits"
        raise RegistrationRefused("verification", reason, hint=hint)

    def compare(at: Values) -> None:
        compare_at(at, own, plain, fresh, compute, graph.inputs, inputs)

    for values in shapes_to_try(graph.dims, own, program.suspects):
        try:
            compare(values)
        except NotDynamic as error:

            def is_same(at: Values) -> bool:
                try:
                    compare(at)
                except NotDynamic:
                    return False
                return True

            raise NotDynamic(str(error), working_end(values, own, is_same)) from None
    if graph.dims:
        dry_run_ends(graph, weights)


def dry_run_ends(graph: Graph, weights: Sequence[torch.Tensor]) -> None:
    """Run a graph without data at the ends of its dimensions' ranges.

    Raises:
        NotDynamic: the graph fails at such an end.
    """
    try:
        check_on_meta(graph, weights, corners(graph.dims))
    except RegistrationRefused as error:
        raise NotDynamic(f"{error.part}: {error.reason}") from None


def shapes_to_try(
    dims: Sequence[Dim], own: Values, suspects: Sequence[Values]
) -> list[dict[str, int]]:
    """Return the extents, besides ``own``, at which a program is compared with its module.

    Dimensions vary one at a time. A batch of 1 (or 2 if the example's is 1) is tried because
    extents of 1 broadcast. Other ranges are tried at their ends and middle. ``suspects`` are added.
    """
    small = {
        dim.name: min(max(1, dim.low), dim.high) if dim.name == BATCH else own[dim.name]
        for dim in dims
    }
    tries: list[dict[str, int]] = []
    for dim in dims:
        is_batch = dim.name == BATCH
        inside = (dim.low + dim.high) // 2
        others = [2 if own[BATCH] == 1 else 1] if is_batch else [dim.low, dim.high, inside]
        base = own if is_batch else small
        tries += [{**base, dim.name: n} for n in others if dim.low <= n <= dim.high]
    tries += [{**small, **values} for values in suspects]
    return [values for n, values in enumerate(tries) if values != own and values not in tries[:n]]


def compare_at(
    values: Values,
    own: Values,
    plain: Compute,
    fresh: Compute,
    compute: Compute,
    specs: Sequence[ValueSpec],
    examples: Sequence[torch.Tensor],
) -> None:
    """Compare the program with the fresh module at other extents than ``own``.

    Raises:
        NotDynamic: they differ, or the module refuses these extents. If only the batch differs
            from ``own``, a refusal is accepted: requests with such a batch get the module's error.
        RegistrationRefused: an earlier call has changed the module's answer.
    """
    try:
        inputs, answer = on_other_values(fresh, specs, values, examples)
    except Exception as error:  # whatever the model's code raises
        if all(values[name] == number for name, number in own.items() if name != BATCH):
            return
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise NotDynamic(f"at {values_text(values)} the module raised {text}") from None
    try:
        again = on_clones(compute, inputs)
    except Exception as error:
        raise NotDynamic(f"at {values_text(values)} its graph fails: {str(error)[:200]}") from None
    if not all_same(answer, again):
        refuse_state(plain, inputs, again, values)
        raise NotDynamic(f"at {values_text(values)} it does not compute the same bits")


def refuse_state(
    now: Compute, inputs: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], values: Values
) -> None:
    """Refuse a module whose kept state explains why the program differs from the fresh module.

    Raises:
        RegistrationRefused: the used module (``now``) gives the same answer as the program.
    """
    try:
        is_explained = all_same(on_clones(now, inputs), actual)
    except Exception:  # the module's own code
        is_explained = False
    if is_explained:
        raise keeps_state(f"at {values_text(values)} its answer depends on its earlier calls")


def on_what_it_takes(
    plain: Compute, inputs: list[torch.Tensor], values: Values
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return inputs that the module accepts, and its answer.

    An example's integers may be indices into another dimension (edges refer to nodes) or its size
    (lengths). If the module refuses them because that dimension is smaller, they are reduced.
    """
    try:
        return inputs, on_clones(plain, inputs)
    except Exception:
        most = min((n for name, n in values.items() if name != BATCH), default=0)
        for is_place in (True, False) if most else ():
            smaller = [
                v if not _is_integer(v) else v % most if is_place else v.clamp(max=most)
                for v in inputs
            ]
            with contextlib.suppress(Exception):
                return smaller, on_clones(plain, smaller)
        raise


def program_on_cpu(graph: Graph, weights: Sequence[torch.Tensor]) -> Compute:
    """Return a function that computes a graph on the CPU."""
    compiled = CompiledGraph(graph, [(0, len(graph.nodes))], "cpu")
    arguments = tuple(weights[index] for index in compiled.group_weights[0])

    def compute(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode(), workers_default_dtype():
            environment = compiled.start(inputs)
            compiled.calls[0](environment, arguments)
            return compiled.finish(environment, weights)

    return compute


def on_clones(compute: Compute, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute on copies of the inputs, without gradients."""
    with torch.no_grad():
        return list(compute([value.clone() for value in inputs]))


def all_same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return len(left) == len(right) and all(map(same_bits, left, right))


def resized(
    shapes: Sequence[Shape], inputs: Sequence[torch.Tensor], values: Values
) -> list[torch.Tensor]:
    """Return the inputs at other extents, repeated and cut to fit."""
    parts = []
    for shape, value in zip(shapes, inputs, strict=True):
        for axis, extent in enumerate(shape_at(shape, values)):
            repeated = torch.cat([value] * max(1, -(-extent // max(1, value.shape[axis]))), axis)
            value = repeated.narrow(axis, 0, extent)
        parts.append(value.contiguous())
    return parts


def on_other_values(
    plain: Compute, specs: Sequence[ValueSpec], values: Values, examples: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return inputs that ``plain`` accepts, with other values than the example's, and its answer.

    A signature does not say what an integer means (an index, a length). If the example's integers
    differ from each other, new ones are within their range. Otherwise smaller and smaller ranges
    are tried. The last attempts use the example's own integers.

    Raises:
        Exception: the module's own exception, if it refuses these extents.
    """
    tensors = to_tensors(specs, values, seed=1)
    sized = resized([spec.shape for spec in specs], examples, values)
    own = None
    for way in (*range(3 if any(map(_is_integer, tensors)) else 1), None):
        inputs = [
            moved(old) if way is None else _like(new, example, way) if _is_integer(new) else new
            for new, old, example in zip(tensors, sized, examples, strict=True)
        ]
        try:
            return inputs, on_clones(plain, inputs)
        except Exception:  # the module's code refuses an index or another number
            own = own or on_what_it_takes(plain, sized, values)
    assert own is not None
    return own


def _is_integer(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and value.dtype is not torch.bool and value.numel() > 0


def _like(tensor: torch.Tensor, example: torch.Tensor, way: int) -> torch.Tensor:
    """Return integers in the example's range.
    If all its integers are n, ``way`` selects the new range: 0: any; 1: 0 to n; 2: n and n + 1."""
    low, high = int(example.min()), int(example.max())
    if low == high:
        low, high = ((0, int(tensor.max())), (min(0, low), high), (low, high + 1))[way]
    return (low + tensor.abs() % (high - low + 1)).to(tensor.dtype)


def moved(value: torch.Tensor) -> torch.Tensor:
    """Return the values, rotated by one position and, if they are floats, halved."""
    rolled = value.flatten().roll(1).reshape(value.shape)
    return rolled * 0.5 if value.is_floating_point() else rolled


def to_tensors(specs: Sequence[ValueSpec], values: Values, seed: int = 0) -> list[torch.Tensor]:
    """Return random inputs as torch tensors."""
    tensors = []
    for spec, value in zip(specs, random_inputs(specs, values, seed), strict=True):
        tensor = torch.from_numpy(np.array(value, order="C"))
        is_bfloat16 = spec.dtype == "bfloat16"
        tensors.append(tensor.view(torch.bfloat16) if is_bfloat16 else tensor)
    return tensors


def _why(plain: Compute, inputs: Sequence[torch.Tensor], actual: list[torch.Tensor]) -> str:
    """Return a hint for a graph that differs from its module; empty if the cause is unknown."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        is_fused = before and all_same(on_clones(plain, inputs), actual)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    if is_fused:
        return _FUSED
    if torch.get_default_dtype() is not torch.float32:
        return "it depends on torch.set_default_dtype: name the dtypes in forward"
    return ""
