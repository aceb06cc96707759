"""Export of an ``nn.Module`` as a checked program, with its weights in order of first use."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...base.errors import PipeSwitchError, RegistrationRefused
from ...base.extras import BUILDERS
from ...base.units import format_bytes
from ..graphs.bundle import EXAMPLE, write_bundle
from ..interface.dims import BATCH, Dim, batch_range, values_of
from ..interface.layout import KindSettings
from ..interface.pytree import Tree
from ..running.factories import split_arguments
from ..running.values import dtype_name, nested_outputs, tensor_bytes
from ..spec import DEFAULT_SEQUENCES, BuildSpec
from .checking import align, check_program, resized
from .dynamic import Axes, Dynamic, NotDynamic, asked_axes, batch_axes, choices, narrowed
from .encoder import EncodedProgram, Encoder
from .export_hints import OTHERS, advice, refuse_engines
from .export_lock import one_export_at_a_time, quiet
from .naming import Example, Flat, named_inputs
from .recurrent import OneCallEach
from .statefulness import Fresh, check_keeps_nothing

MAX_NARROWED: Final = 4  # maximum repeated exports of a registration, with narrower ranges
MAX_EXAMPLE_ROWS: Final = 16  # a comparison of more rows takes long and shows nothing new
MAX_EXAMPLE_BYTES: Final = 32 << 20
SYMBOLIC_SHAPES_LOG: Final = "torch.fx.experimental.symbolic_shapes"

Verify = Callable[[EncodedProgram], None]


@dataclass(frozen=True)
class WrappedModel:
    """A module that computes like a model, but with the inputs and outputs of its kind."""

    module: nn.Module
    example: dict[str, torch.Tensor]  # inputs for the export
    dynamic: Dynamic
    notes: list[str]
    settings: Callable[[Any], KindSettings]  # from the model's tokenizer, or None


class Builder(Protocol):
    """Preparation of models for an option, by an extra (``BUILDERS``)."""

    def auto_class(self, config: Any) -> Any:
        """Return the class of transformers that chooses a model's class by its configuration;
        refuse a configuration whose models cannot have the option."""

    def wrap(self, model: Any) -> WrappedModel:
        """Wrap a model that has its weights; refuse one that cannot have the option."""

    def read_folder(self, wrapped: WrappedModel, spec: BuildSpec) -> tuple[KindSettings, list[str]]:
        """Return the settings, with the tokenizer of the model's folder, and notes on its files."""


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
) -> EncodedProgram:
    """Export ``module`` in eval mode; afterwards the module has its former mode.

    Args:
        module: on the host, with data.
        example_inputs: a tensor, a sequence of arguments, or a mapping by keyword (by position if
            a key is a number). Nested tensors are named by path (``cache.0.key``).
        input_names: default: the keywords, else ``forward``'s own names or ``x``.
        max_batch: limit of dimension 0, if all inputs share it and the model allows it to vary.
        dynamic: the other dimensions that requests choose, with their ranges.
        is_wish: drop dimensions of ``dynamic`` that the model does not allow, with a note.
        verify: checks the program; if it raises ``NotDynamic``, fewer dimensions are tried.

    Raises:
        RegistrationRefused: the module cannot be a program; the error says which part and why.
    """
    _check_kind(module)
    example = named_inputs(module, example_inputs, input_names)
    inputs = example.tensors
    with _evaluated(module):
        flat = Flat(module, example)
        flat.training = False
        fresh, (returns, outputs) = Fresh(flat), _outputs(flat, inputs)
        shapes = [tuple(value.shape) for value in inputs]
        asked_dims = asked_axes(example.names, shapes, dynamic or {})
        batch, why_fixed = batch_axes(shapes, max_batch, asked_dims)
        reasons, narrower = [""], list[str]()
        tried = deque(choices(batch, asked_dims, is_wish=is_wish))
        while tried:
            axes = tried.popleft()
            try:
                program = _export_once(flat, example, list(outputs), axes)
                nesting = {"takes": example.takes, "returns": returns}
                program.graph = msgspec.structs.replace(program.graph, **nesting)
                if verify is not None:
                    verify(program)
                check_keeps_nothing(program, fresh, inputs)
                break
            except NotDynamic as error:
                reasons.append(str(error))
                again = narrowed(axes, shapes, error.works)
                if again != axes and len(narrower) < MAX_NARROWED:
                    narrower.append(str(error))
                    tried.appendleft(again)
        else:
            raise _refused(asked_dims, reasons[-1])
        wider = {dim.name: dim for dim in (*batch.values(), *asked_dims.values())}
        fixed = {BATCH: why_fixed or reasons[-1]}
        fixed |= {dim.name: reasons[-1] for dim in asked_dims.values()}
        program.notes += _notes(program, flat.fixed, wider, narrower, fixed)
        return program


def _notes(
    program: EncodedProgram,
    alone: Mapping[str, Any],
    wider: Mapping[str, Dim],
    narrower: Sequence[str],
    fixed: Mapping[str, str],
) -> list[str]:
    """Return notes on fixed arguments, on ranges that were narrowed, and on fixed dimensions."""
    dims = {dim.name: dim for dim in program.graph.dims}
    return [
        *(f"{name}={value}: each request is computed alone" for name, value in alone.items()),
        *(
            f"{name} is {dim.low}..{dim.high}, not {wider[name].low}.."
            f"{wider[name].high}: {'; '.join(narrower)}"
            for name, dim in dims.items()
            if dim != wider[name]
        ),
        *(f"{name} is fixed: {why}" for name, why in fixed.items() if name not in dims),
    ]


def _refused(axes: Axes, why: str) -> RegistrationRefused:
    if not axes:
        return RegistrationRefused("export", why, hint=advice(why))
    names = ", ".join(dict.fromkeys(dim.name for dim in axes.values()))
    hint = advice(why)
    if hint == OTHERS:  # the reason is probably the range
        hint = "give a range that the model supports, or leave it out to use the example's size"
    return RegistrationRefused(f"dynamic {names}", why, hint=hint)


def _check_kind(module: Any) -> None:
    if not isinstance(module, nn.Module):
        hint = "a class M(nn.Module) whose forward calls it, then M()"
        if isinstance(module, torch.export.ExportedProgram):
            hint = 'torch.export.save(program, "m.pt2"), then "m.pt2" in its place'
        what = type(module).__name__
        raise RegistrationRefused("source", f"{what} is not an nn.Module", hint=hint)
    refuse_engines(module)


@contextlib.contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Set the module to eval mode; restore the mode of each part afterwards."""
    modes = _modes(module)
    _set_mode(module)
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the mode of each submodule; submodules of frozen TorchScript have no mode."""
    return [(one, one.training) for one in module.modules() if hasattr(one, "training")]


def _set_mode(module: nn.Module) -> None:
    for child, _ in _modes(module):  # not .eval(): a module from torch.export refuses it
        child.training = False


def _outputs(flat: Flat, inputs: list[torch.Tensor]) -> tuple[Tree, dict[str, torch.Tensor]]:
    with torch.no_grad():
        try:
            return nested_outputs(flat.nested([value.clone() for value in inputs]))
        except RegistrationRefused:
            raise
        except Exception as error:
            why = f"the module raised {type(error).__name__}: {first_line(error)}"
            hint = _other_example(flat, inputs)
            raise RegistrationRefused("example inputs", why, hint=hint) from error


def _other_example(flat: Flat, inputs: Sequence[torch.Tensor]) -> str:
    """Return advice for a module that refuses its example."""
    if all(value.shape[:1] == (1,) for value in inputs):
        with contextlib.suppress(Exception):
            flat.nested([torch.cat([value] * 2) for value in inputs])
            return "it takes two rows and not one: --input 2..64x4:float32, or an example of two"
    return "give an example that its forward takes: other shapes, dtypes or values"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


_RANGE: Final = re.compile(r"(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_FIXED: Final = re.compile(r"(\w+) = (\d+)")
_RELATED: Final = re.compile(r"(\w+) = (.*[A-Za-z].*)")


def _not_dynamic(error: BaseException) -> NotDynamic:
    """Build a NotDynamic from the ranges that torch suggests, or from the error's first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or not lines[0].startswith("Constraints violated"):
        return NotDynamic(f"torch.export: {first_line(error)}")
    findings, works = [], {}
    for line in lines:
        if match := _RANGE.fullmatch(line):
            high = f" to {match[3]}" if match[3] else ""
            is_ours = not match[1].startswith("_")
            findings += [f"it takes {match[1]} from {match[2] or 1}{high}"] if is_ours else []
            works[match[1]] = (int(match[2] or 1), int(match[3]) if match[3] else None)
        elif match := _FIXED.fullmatch(line):
            findings.append(f"the model fixes {match[1]} at {match[2]}")
        elif match := _RELATED.fullmatch(line):
            findings.append(f"its {match[1]} must be {match[2].replace('*_', ' times a whole ')}")
    why = ", ".join(findings)[:300] or " ".join(lines[1:2])[:300] or lines[0][:200]
    return NotDynamic(why, works)


def _export_once(
    flat: Flat, example: Example, output_names: list[str], axes: Axes
) -> EncodedProgram:
    inputs = example.tensors
    arguments = [value.clone() for value in inputs]
    dims = {
        dim.name: torch.export.Dim(dim.name, min=dim.low, max=dim.high) for dim in axes.values()
    }
    for (number, axis), dim in axes.items():
        if inputs[number].shape[axis] == 1 and dim.high > 1:  # export treats 1 as a constant
            arguments[number] = torch.cat([arguments[number]] * 2, axis)
    shapes = tuple(
        {axis: dims[dim.name] for (of, axis), dim in axes.items() if of == number}
        for number in range(len(inputs))
    )
    with torch.no_grad(), OneCallEach(), warnings.catch_warnings(), quiet(SYMBOLIC_SHAPES_LOG):
        warnings.simplefilter("ignore")  # warnings of export about attributes and pytrees
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
            raise _not_dynamic(error) from error
    program = Encoder(exported, example.names, output_names, axes).program()
    saved = flat.module.state_dict().keys()
    program.unsaved = [name for name in program.graph.weights if name not in saved]
    return program


def _kept_examples(program: EncodedProgram) -> list[torch.Tensor]:
    """Return the example inputs that a bundle keeps: few rows, or none if they are too large."""
    shapes = [spec.shape for spec in program.graph.inputs]
    if not program.examples:
        return []
    values = values_of(shapes, (value.shape for value in program.examples))
    assert values is not None
    if BATCH in values:
        low, _ = batch_range(program.graph.dims)
        values[BATCH] = min(values[BATCH], max(low, MAX_EXAMPLE_ROWS))
    examples = resized(shapes, [one.detach().cpu() for one in program.examples], values)
    size_bytes = sum(one.nbytes for one in examples)
    if size_bytes <= MAX_EXAMPLE_BYTES:
        return examples
    note = f"its example of {format_bytes(size_bytes)} is not kept: precisions use random inputs"
    program.notes += [note] if note not in program.notes else []
    return []


def write_program(path: str | os.PathLike[str], program: EncodedProgram) -> None:
    """Write ``program`` as a bundle."""
    examples = _kept_examples(program)
    names = [*program.graph.weights, *(f"{EXAMPLE}{at}" for at in range(len(examples)))]
    tensors = [*program.weights, *examples]
    write_bundle(
        path,
        program.graph,
        [
            (name, dtype_name(tensor.dtype, name), tuple(tensor.shape))
            for name, tensor in zip(names, tensors, strict=True)
        ],
        (tensor_bytes(tensor) for tensor in tensors),
        program.settings,
        program.notes,
        program.unsaved,
    )


def _checked_program(
    module: nn.Module,
    example_inputs: Any,
    input_names: Sequence[str] | None,
    max_batch: int,
    dynamic: Dynamic,
) -> EncodedProgram:
    """Export a module; open fewer dimensions if the graph's bits differ at other extents.

    A request must have one answer, the module's own. A module that counts its calls or draws random
    numbers has several answers, and an exported graph contains its Python state as a constant.
    """
    _check_kind(module)
    input_names = input_names or _scripted_names(module)
    example = named_inputs(module, example_inputs, input_names)
    flat = Flat(module, example)

    def plain(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(flat(*values))

    def verify(program: EncodedProgram) -> None:
        check_program(program, plain, fresh, example.tensors)

    with _served(module) as notes, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # State of TorchScript is not in Python attributes, so ``Fresh`` cannot restore it.
        fresh = Fresh(nn.Module(), plain) if _is_scripted(module) else Fresh(flat)
        program = export_module(
            _traceable(module, example),
            example_inputs,
            input_names=input_names,
            max_batch=max_batch,
            dynamic=dynamic,
            verify=verify,
        )
        program.notes += notes
        program.examples = list(example.tensors)
        return program


def _is_scripted(module: nn.Module) -> bool:
    """Return True for a scripted module; compare the name, because torch.jit hides the class.

    A traced module has another class, and torch can export it.
    """
    return type(module).__name__ == "RecursiveScriptModule"


def _scripted_names(module: Any) -> list[str] | None:
    """Return the argument names of a scripted module, which Python cannot inspect, else None."""
    if not _is_scripted(module):
        return None
    return [one.name for one in module.forward.schema.arguments][1:]


def _traceable(module: Any, example: Example) -> Any:
    """Return the module, or a graph that torch can export if the module is scripted."""
    if not _is_scripted(module):
        return module
    from torch._export.converter import TS2EPConverter  # a slow import

    arguments = example.arguments
    if {value.shape[:1] for value in example.tensors} == {(1,)}:  # export treats 1 as a constant
        arguments = tree_map_only(torch.Tensor, lambda value: torch.cat([value] * 2), arguments)
    places, named = split_arguments(arguments, example.keywords)
    try:
        with torch.no_grad(), quiet(SYMBOLIC_SHAPES_LOG):
            return TS2EPConverter(module, tuple(places), named).convert().module()
    except Exception as error:  # the converter does not support all of TorchScript
        raise RegistrationRefused(
            "source",
            f"its TorchScript does not export: {first_line(error)}",
            hint="register the module that it was made from",
        ) from None


@contextlib.contextmanager
def _served(module: nn.Module) -> Iterator[list[str]]:
    """Put the module in its served state for the block, and yield notes for people.

    In this state the module is in eval mode, its weights are aligned, and its parameters need no
    gradients, which affects the choice of matmul kernels. Afterwards its weights stay aligned, so
    that it computes the served bits, unless other tensors share their former memory.
    """
    modes = _modes(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    _set_mode(module)
    moved = align(module)
    text = "copied to aligned memory, on which the last bits of an answer may depend"
    try:
        for parameter in trained:
            parameter.requires_grad = False
        yield [f"{len(moved)} weights that were mapped from a file are {text}"] if moved else []
    finally:
        for parameter in trained:
            parameter.requires_grad = True
        for weight, former in moved:
            is_whole = former.untyped_storage().nbytes() == former.nbytes
            if former.untyped_storage().is_shared() or not is_whole:
                weight.data = former
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
    """Export a module in this process, and write it as a bundle.

    Any thread may call it. It blocks while another export runs. Do not use the module meanwhile: it
    is in eval mode with frozen parameters. ``one_export_at_a_time`` says how other threads are
    affected.

    Returns:
        The bundle's inputs, outputs, ranges of dimensions, node count, bytes of weights, notes.

    Raises:
        RegistrationRefused: the module cannot be a program; the error says why and what to do.
    """
    return _written(
        path,
        lambda: _checked_program(module, example_inputs, input_names, max_batch, dynamic or {}),
    )


@one_export_at_a_time()
def export_wrapped_to_bundle(
    model: Any,
    path: str | os.PathLike[str],
    option: str,
    tokenizer: Any = None,
    *,
    max_batch: int = DEFAULT_SEQUENCES,
) -> dict[str, Any]:
    """Export a model as the extra with an option wraps it (``BUILDERS``).

    Threads, result and errors are those of ``export_module_to_bundle``. ``tokenizer`` is the
    model's own fast tokenizer; without it, requests and answers are ids.

    Raises:
        ConfigError: no installed extra has the option.
    """
    builder: Builder = BUILDERS.load(option)()

    def program_of() -> EncodedProgram:
        with _served(model):
            wrapped = builder.wrap(model)
            program = _checked_program(
                wrapped.module, wrapped.example, None, max_batch, wrapped.dynamic
            )
        program.settings = wrapped.settings(tokenizer)
        program.examples = []  # a state of arbitrary numbers
        program.notes[:0] = wrapped.notes
        return program

    return _written(path, program_of)


def _written(path: str | os.PathLike[str], make: Callable[[], EncodedProgram]) -> dict[str, Any]:
    try:
        program = make()
    except PipeSwitchError:
        raise
    except Exception as error:  # torch may raise anything for an unknown module
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RegistrationRefused("export", why, hint=advice(why)) from error
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
