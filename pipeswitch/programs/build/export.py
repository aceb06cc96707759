"""An ``nn.Module`` as a program: exported, checked, its weights in order of first use.

``torch.export`` changes its whole process while it traces; ``one_export_at_a_time`` says what is
kept and what a thread that computes beside it sees (docs/adr/0017).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TextIO

import msgspec
import torch
from torch import nn

from ...errors import PipeSwitchError, RegistrationRefused
from ..bundle import write_bundle
from ..dims import BATCH, MAX_EXTENT, values_of
from ..nesting import Tree
from ..values import dtype_name, nested_outputs, tensor_bytes
from .checking import check_program, resized
from .dynamic import (
    Axes,
    Dynamic,
    NotDynamic,
    asked_axes,
    batch_axes,
    choices,
    names_for,
)
from .encoder import ADVICE, Encoder, Program
from .naming import Example, Flat, named_inputs
from .recurrent import OneCallEach

SYMBOLIC_SHAPES_LOG: Final = "torch.fx.experimental.symbolic_shapes"
MAX_REFUSED: Final = 32  # extents at the low end of a file's range that are tried
ENDLESS: Final = 512  # the largest extent of a dimension whose file gives no upper end

logger = logging.getLogger(__name__)

_alone: Final = threading.RLock()


def _backends() -> dict[str, bool]:
    """The settings of the whole process that ``torch.export`` switches off while it traces."""
    backends: Any = torch.backends
    return {
        "mkldnn": backends.mkldnn.enabled,
        "nnpack": torch._C._get_nnpack_enabled(),  # torch.backends.nnpack can only set it
        "cudnn": backends.cudnn.enabled,
    }


@contextlib.contextmanager
def one_export_at_a_time() -> Iterator[None]:
    """No other export of this module runs meanwhile, and torch's backends end as they began.

    Two traces at once fail, or leave mkldnn, nnpack and cudnn off in this process for ever. A
    thread that computes during an export does so without these: more slowly, and other in the last
    bits. Where that matters, hold this while you compute. A ``torch.export`` that the process calls
    by itself does not wait for it.
    """
    with _alone:
        before = _backends()
        try:
            yield
        finally:
            after = _backends()
            if after != before:
                logger.warning("export changed_backends=%s put_back=%s", after, before)
                backends: Any = torch.backends
                for name, is_enabled in before.items():
                    getattr(backends, name).set_flags(is_enabled)


class _OthersStderr(io.TextIOBase):
    """``sys.stderr`` for every thread but the one that made it, whose own text goes nowhere."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        is_ours = threading.get_ident() == self._thread
        return len(text) if is_ours else self._stderr.write(text)

    def flush(self) -> None:
        self._stderr.flush()


@contextlib.contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Pages of graph dumps beside the one error we raise do not help its reader."""
    noisy = logging.getLogger(logger_name)
    before = noisy.disabled
    noisy.disabled = True
    try:
        with contextlib.redirect_stderr(_OthersStderr(sys.stderr)):
            yield
    finally:
        noisy.disabled = before


Verify = Callable[[Program], None]
OpenDims = dict[str, dict[int, tuple[str, int, int]]]


@one_export_at_a_time()
def export_module(
    module: nn.Module,
    example_inputs: Any,
    *,
    input_names: Sequence[str] | None = None,
    max_batch: int = 64,
    dynamic: Dynamic | None = None,
    is_wish: bool = False,
    verify: Verify | None = None,
) -> Program:
    """Export ``module`` in eval mode; the caller's module is left in the mode it was in.

    Args:
        module: on the host, with data.
        example_inputs: what ``forward`` takes: a tensor, a sequence of arguments, or a mapping of
            them by keyword. An argument is a tensor, or dicts, lists, tuples, dataclasses and None
            around tensors; these are called by where they are (``cache.0.key``).
        input_names: what requests call the arguments; default: the keywords, ``x`` for a single
            one, else the names of ``forward``'s own parameters.
        max_batch: dimension 0 may be 1 … this, when all inputs share it and the model allows.
        dynamic: the other dimensions that requests choose, with their ranges.
        is_wish: leave out of ``dynamic`` what the model does not allow, with a note.
        verify: looks at what was exported; where it raises ``NotDynamic``, fewer dimensions are
            tried.

    Raises:
        RegistrationRefused: the module cannot be a program; says which part and why.
    """
    _check_kind(module)
    example = named_inputs(module, example_inputs, input_names)
    names, inputs = example.names, example.tensors
    modes = [(child, child.training) for child in module.modules()]
    _set_mode(module)
    try:
        flat = Flat(module, example)
        flat.training = False
        returns, outputs = _outputs(flat, inputs)
        shapes = [tuple(value.shape) for value in inputs]
        asked = asked_axes(names, shapes, dynamic or {})
        batch, why_fixed = batch_axes(shapes, max_batch, asked)
        reasons: list[str] = []
        for axes in choices(batch, asked, is_wish=is_wish):
            try:
                program = _export_once(flat, example, list(outputs), axes)
                program.graph = msgspec.structs.replace(
                    program.graph, takes=example.takes, returns=returns
                )
                if verify is not None:
                    verify(program)
                break
            except NotDynamic as error:
                reasons.append(str(error))
        else:
            raise _refused(asked, reasons[-1])
        open_now = {dim.name for dim in program.graph.dims}
        program.notes += [
            f"{name}={value}: a request stands alone" for name, value in flat.fixed.items()
        ]
        wanted = dict.fromkeys([BATCH, *(dim.name for dim in asked.values())])
        program.notes += [
            f"{name} is fixed: {(name == BATCH and why_fixed) or reasons[-1]}"
            for name in wanted
            if name not in open_now
        ]
        return program
    finally:
        for child, training in modes:
            child.training = training


def _refused(asked: Axes, why: str) -> RegistrationRefused:
    if not asked:
        return RegistrationRefused("export", f"{why}; {ADVICE}")
    names = ", ".join(dict.fromkeys(dim.name for dim in asked.values()))
    return RegistrationRefused(
        f"dynamic {names}", why, hint="give a range that the model takes, or leave it out: it is "
        "then what it is in the example"
    )  # fmt: skip


def _check_kind(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise RegistrationRefused("source", f"a {type(module).__name__} is not an nn.Module")
    # Named, not imported: torch.jit does not export it. A traced module, its subclass, exports.
    if type(module).__name__ == "RecursiveScriptModule":
        raise RegistrationRefused(
            "source", "a scripted module does not export", hint="give the module it was made from"
        )


def _set_mode(module: nn.Module) -> None:
    for child in module.modules():  # not .eval(): a module made by export refuses it
        child.training = False


def _outputs(flat: Flat, inputs: list[torch.Tensor]) -> tuple[Tree, dict[str, torch.Tensor]]:
    with torch.no_grad():
        try:
            return nested_outputs(flat.nested([value.clone() for value in inputs]))
        except RegistrationRefused:
            raise
        except Exception as error:
            raise RegistrationRefused(
                "example inputs", f"the module raised {type(error).__name__}: {_first(error)}"
            ) from error


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


_RANGE: Final = re.compile(r"(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_FIXED: Final = re.compile(r"(\w+) = (\d+)")
_RELATED: Final = re.compile(r"(\w+) = (.*[A-Za-z].*)")


def _reason(error: BaseException) -> str:
    """What the model allows of its dimensions, of torch's advice; else torch's first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or not lines[0].startswith("Constraints violated"):
        return f"torch.export: {_first(error)}"
    said = []
    for line in lines:
        if found := _RANGE.fullmatch(line):
            high = f" to {found[3]}" if found[3] else ""
            is_ours = not found[1].startswith("_")
            said += [f"it takes {found[1]} from {found[2] or 1}{high}"] if is_ours else []
        elif found := _FIXED.fullmatch(line):
            said.append(f"the model fixes {found[1]} at {found[2]}")
        elif found := _RELATED.fullmatch(line):
            said.append(f"its {found[1]} must be {found[2].replace('*_', ' times a whole ')}")
    return ", ".join(said)[:300] or " ".join(lines[1:2])[:300] or lines[0][:200]


def _export_once(flat: Flat, example: Example, output_names: list[str], axes: Axes) -> Program:
    inputs = example.tensors
    arguments = [value.clone() for value in inputs]
    dims = {
        dim.name: torch.export.Dim(dim.name, min=dim.low, max=dim.high) for dim in axes.values()
    }
    for (number, axis), dim in axes.items():
        if inputs[number].shape[axis] == 1 and dim.high > 1:  # it would be taken for a constant
            arguments[number] = torch.cat([arguments[number]] * 2, axis)
    shapes = tuple(
        {axis: dims[dim.name] for (of, axis), dim in axes.items() if of == number}
        for number in range(len(inputs))
    )
    with torch.no_grad(), OneCallEach(), warnings.catch_warnings(), _quiet(SYMBOLIC_SHAPES_LOG):
        warnings.simplefilter("ignore")  # export's own chatter about attributes and pytrees
        try:
            exported = torch.export.export(
                flat,
                tuple(arguments),
                dynamic_shapes=(shapes,) if axes else None,  # one entry: forward's *inputs
                prefer_deferred_runtime_asserts_over_guards=bool(axes),
            )
        except RegistrationRefused:
            raise
        except Exception as error:  # torch.export has no base class for "does not export"
            raise NotDynamic(_reason(error)) from error
    return Encoder(exported, example.names, output_names, axes).program()


def write_program(path: str | os.PathLike[str], program: Program) -> None:
    """Write ``program`` as a bundle."""
    write_bundle(
        path,
        program.graph,
        [
            (name, dtype_name(weight.dtype, name), tuple(weight.shape))
            for name, weight in zip(program.graph.weights, program.weights, strict=True)
        ],
        (tensor_bytes(weight) for weight in program.weights),
    )


def _checked_program(
    module: nn.Module,
    example_inputs: Any,
    input_names: Sequence[str] | None,
    max_batch: int,
    dynamic: Dynamic,
) -> Program:
    """Export, and again with fewer open dimensions where other extents have other bits.

    A request must have one answer, the module's own: what counts its calls or draws numbers has
    many, and an exported graph holds Python state as the constant it was.
    """
    _check_kind(module)
    example = named_inputs(module, example_inputs, input_names)
    flat = Flat(module, example)

    def plain(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(flat(*values))

    def verify(program: Program) -> None:
        check_program(program, plain, example.tensors)

    with _served(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export_module(
            module,
            example_inputs,
            input_names=input_names,
            max_batch=max_batch,
            dynamic=dynamic,
            verify=verify,
        )


@contextlib.contextmanager
def _served(module: nn.Module) -> Iterator[None]:
    """The module as it is served: in eval mode, its parameters frozen (products of matrices choose
    their kernel by that too)."""
    modes = [(child, child.training) for child in module.modules()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    _set_mode(module)
    try:
        for parameter in trained:
            parameter.requires_grad = False
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True
        for child, training in modes:
            child.training = training


@one_export_at_a_time()
def export_module_to_bundle(
    module: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    input_names: Sequence[str] | None = None,
    *,
    max_batch: int = 64,
    dynamic: Dynamic | None = None,
) -> dict[str, Any]:
    """Export a module where it lives, and write the bundle that may be sent.

    From any thread: exports wait for one another. Leave the module alone meanwhile (it is in eval
    mode, its parameters frozen); ``one_export_at_a_time`` says what other threads notice.

    Returns:
        What was made: inputs, outputs, ranges of its dimensions, number of nodes, bytes of weights,
        notes.

    Raises:
        RegistrationRefused: it cannot be a program; says which part, why and what to do.
    """
    try:
        program = _checked_program(module, example_inputs, input_names, max_batch, dynamic or {})
    except PipeSwitchError:
        raise
    except Exception as error:  # torch on a module that was never tried
        raise RegistrationRefused(
            "export", f"{type(error).__name__}: {_first(error)}; {ADVICE}"
        ) from error
    write_program(path, program)
    graph = program.graph
    return {
        "inputs": [msgspec.to_builtins(spec) for spec in graph.inputs],
        "outputs": [msgspec.to_builtins(spec) for spec in graph.outputs],
        "dims": {dim.name: [dim.low, dim.high] for dim in graph.dims},
        "node_count": len(graph.nodes),
        "weight_bytes": sum(weight.nbytes for weight in program.weights),
        "notes": program.notes,
    }


@one_export_at_a_time()
def convert_pt2(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Convert a ``.pt2`` file to a bundle, on the machine of the one who trusts the file.

    ``torch.export.load`` unpickles: never call this on a file that came from another user.

    Raises:
        RegistrationRefused: it cannot be loaded, carries no example inputs, or does not export.
    """
    try:
        loaded = torch.export.load(os.fspath(path))
    except Exception as error:
        raise RegistrationRefused(f"{path}", f"torch.export.load: {_first(error)}") from error
    if loaded.example_inputs is None:
        raise RegistrationRefused(f"{path}", "it was saved without its example inputs")
    positional, keywords = loaded.example_inputs
    example: Any = dict(keywords) if keywords and not positional else tuple(positional)
    if keywords and positional:
        raise RegistrationRefused(f"{path}", "it mixes positional and keyword inputs")
    module: Any = loaded.module()
    named = named_inputs(module, example, None)
    names = named.names
    dynamic = _taken(Flat(module, named), names, named.tensors, _open_in(loaded, names))
    return export_module_to_bundle(module, example, out, dynamic=dynamic)


def _taken(
    flat: Flat, names: Sequence[str], inputs: Sequence[torch.Tensor], dynamic: OpenDims
) -> OpenDims:
    """Without the smallest extents that the file's own guards refuse, which its ranges have."""
    shapes = [tuple(value.shape) for value in inputs]
    dims = asked_axes(names, shapes, dynamic)
    specs = [
        tuple(dims[n, axis].name if (n, axis) in dims else extent for axis, extent in enumerate(s))
        for n, s in enumerate(shapes)
    ]
    given = values_of(specs, shapes) or {}
    lows = {}
    for dim in dict.fromkeys(dims.values()):
        tried = range(dim.low, min(dim.low + MAX_REFUSED, given[dim.name]))
        lows[dim.name] = next(
            (n for n in tried if _takes(flat, resized(specs, inputs, {**given, dim.name: n}))),
            given[dim.name],
        )
    return {
        name: {
            axis: (called, lows.get(called, low), high) for axis, (called, low, high) in of.items()
        }
        for name, of in dynamic.items()
    }


def _takes(flat: Flat, inputs: Sequence[torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            flat(*inputs)
    except Exception:  # a guard's AssertionError, or a kernel's own
        return False
    return True


def _open_in(loaded: torch.export.ExportedProgram, names: Sequence[str]) -> OpenDims:
    """The dimensions that a file was exported with, by the names we give them."""
    kept = set(loaded.graph_signature.user_inputs)
    values = [node.meta["val"] for node in loaded.graph.nodes
              if node.op == "placeholder" and node.name in kept
              and node.meta["val"] is not None]  # fmt: skip
    called: dict[Any, str] = {}
    found: OpenDims = {}
    for name, value in zip(names, values, strict=True):
        for axis, extent in enumerate(value.shape):
            if isinstance(extent, torch.SymInt):
                symbol = extent.node.expr
                if symbol not in called:
                    free = (
                        one for one in names_for(value.dim(), axis) if one not in called.values()
                    )
                    called[symbol] = next(free)
                low, high = _ends(loaded, symbol)
                found.setdefault(name, {})[axis] = (called[symbol], low, high)
    return found


def _ends(loaded: torch.export.ExportedProgram, symbol: Any) -> tuple[int, int]:
    """A symbol's range in a file; one without an upper end has ``ENDLESS``."""
    ends: Any = loaded.range_constraints.get(symbol)
    if ends is None:
        raise RegistrationRefused(
            "dynamic_shapes", f"a dimension is {symbol}; only one that stands alone can be served"
        )
    high = int(ends.upper) if ends.upper.is_Integer else ENDLESS
    return max(1, int(ends.lower)), min(high, MAX_EXTENT)
