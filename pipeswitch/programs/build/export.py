"""An ``nn.Module`` as a program: exported, checked, its weights in order of first use.

``torch.export`` changes its whole process while it traces; ``one_export_at_a_time`` says what is
kept and what a thread that computes beside it sees (docs/adr/0017).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec
import torch
from torch import nn

from ...errors import PipeSwitchError, RegistrationRefused
from ..bundle import write_bundle
from ..values import dtype_name, tensor_bytes
from .checking import BatchMatters, check_program
from .encoder import ADVICE, Encoder, NotDynamic, Program
from .naming import Flat, named_inputs

SYMBOLIC_SHAPES_LOG: Final = "torch.fx.experimental.symbolic_shapes"


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


@one_export_at_a_time()
def export_module(
    module: nn.Module,
    example_inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor,
    *,
    input_names: Sequence[str] | None = None,
    max_batch: int = 64,
) -> Program:
    """Export ``module`` in eval mode; the caller's module is left in the mode it was in.

    Args:
        module: on the host, with data.
        example_inputs: tensors for ``forward``: one, a sequence, or a mapping passed by keyword.
        input_names: what requests call them; default: the keywords, ``x`` for a single input,
            else the names of ``forward``'s own parameters.
        max_batch: dimension 0 may be 1 … this, when all inputs share it and the model allows.

    Raises:
        RegistrationRefused: the module cannot be a program; says which part and why.
    """
    _check_kind(module)
    names, inputs, keywords = named_inputs(module, example_inputs, input_names)
    modes = [(child, child.training) for child in module.modules()]
    _set_mode(module)
    try:
        flat = Flat(module, keywords)
        flat.training = False
        program = _export_flat(flat, names, inputs, max_batch)
        program.notes += [
            f"{name}={value}: a request stands alone" for name, value in flat.fixed.items()
        ]
        return program
    finally:
        for child, training in modes:
            child.training = training


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


def _export_flat(
    flat: Flat, names: list[str], inputs: list[torch.Tensor], max_batch: int
) -> Program:
    with torch.no_grad():
        try:
            output_names = list(flat.named_outputs([value.clone() for value in inputs]))
        except RegistrationRefused:
            raise
        except Exception as error:
            raise RegistrationRefused(
                "example inputs", f"the module raised {type(error).__name__}: {_first(error)}"
            ) from error
    extents = {value.shape[0] if value.dim() else 0 for value in inputs}
    batch = next(iter(extents)) if len(extents) == 1 else 0
    why_fixed = "the inputs do not share dimension 0" if inputs else "there are no inputs"
    if batch >= 1 and max_batch >= 2:
        try:
            return _export_once(flat, names, inputs, output_names, max(max_batch, batch))
        except NotDynamic as error:
            why_fixed = str(error)
    elif batch >= 1:
        why_fixed = "max_batch is 1"
    try:
        program = _export_once(flat, names, inputs, output_names, None)
    except NotDynamic as error:
        raise RegistrationRefused("export", f"{error}; {ADVICE}") from error
    program.notes.append(f"batch is fixed: {why_fixed}")
    return program


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _export_once(
    flat: Flat,
    names: list[str],
    inputs: list[torch.Tensor],
    output_names: list[str],
    max_batch: int | None,
) -> Program:
    shapes = None
    arguments = tuple(value.clone() for value in inputs)
    if max_batch is not None:
        dimension = torch.export.Dim("batch", min=1, max=max_batch)
        shapes = (tuple({0: dimension} for _ in inputs),)  # one entry: forward's *inputs
        if arguments[0].shape[0] == 1:  # an extent of 1 would be taken for a constant
            arguments = tuple(torch.cat([value, value]) for value in arguments)
    with torch.no_grad(), warnings.catch_warnings(), _quiet(SYMBOLIC_SHAPES_LOG):
        warnings.simplefilter("ignore")  # export's own chatter about attributes and pytrees
        try:
            exported = torch.export.export(flat, arguments, dynamic_shapes=shapes)
        except RegistrationRefused:
            raise
        except Exception as error:  # torch.export has no base class for "does not export"
            raise NotDynamic(f"torch.export: {_first(error)}") from error
    return Encoder(exported, names, output_names, max_batch).program()


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
    module: nn.Module, example_inputs: Any, input_names: Sequence[str] | None, max_batch: int
) -> Program:
    """Export, and once more with a fixed batch where other batches have other bits.

    A request must have one answer, the module's own: what counts its calls or draws numbers has
    many, and an exported graph holds Python state as the constant it was.
    """
    program = export_module(module, example_inputs, input_names=input_names, max_batch=max_batch)
    _, inputs, keywords = named_inputs(module, example_inputs, None)
    flat = Flat(module, keywords)

    def plain(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(flat(*values))

    with _served(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_program(program.graph, program.weights, plain, inputs)
        except BatchMatters as why:
            program = export_module(module, example_inputs, input_names=input_names, max_batch=1)
            program.notes.append(f"batch is fixed: {why}")
            check_program(program.graph, program.weights, plain, inputs)
    return program


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
    example_inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor,
    path: str | os.PathLike[str],
    input_names: Sequence[str] | None = None,
    *,
    max_batch: int = 64,
) -> dict[str, Any]:
    """Export a module where it lives, and write the bundle that may be sent.

    From any thread: exports wait for one another. Leave the module alone meanwhile (it is in eval
    mode, its parameters frozen); ``one_export_at_a_time`` says what other threads notice.

    Returns:
        What was made: inputs, outputs, batch range, number of nodes, bytes of weights, notes.

    Raises:
        RegistrationRefused: it cannot be a program; says which part, why and what to do.
    """
    try:
        program = _checked_program(module, example_inputs, input_names, max_batch)
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
        "batch": [graph.batch_min, graph.batch_max],
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
    return export_module_to_bundle(loaded.module(), example, out)
