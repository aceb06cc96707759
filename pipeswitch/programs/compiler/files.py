"""Conversion of torch's files to bundles or safetensors, on their owner's machine.

A bundle from a ``.pt2`` file has the same open dimensions as the file.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from ...base.errors import RegistrationRefused
from ..interface.dims import MAX_EXTENT, values_of
from ..interface.odd_files import AGAIN, check_file, holds_program
from ..running.values import flatten_outputs, is_tensor
from .checking import resized
from .dynamic import ENDLESS, asked_axes, names_for
from .export import export_module_to_bundle, first_line
from .export_lock import one_export_at_a_time
from .model_folder import listed
from .naming import Flat, named_inputs
from .sources import OpenShapes, checked_inputs, example_specs
from .verify import acceptable_inputs

MAX_REFUSED: Final = 32  # number of extents to try at the low end of a file's range

_INNER: Final = ("state_dict", "model_state_dict", "model")  # keys of the weights in a checkpoint

OpenDims = dict[str, dict[int, tuple[str, int, int]]]


def convert(
    path: str,
    out: str | os.PathLike[str],
    inputs: OpenShapes | None = None,
    example_inputs: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert a ``.pt2`` or TorchScript file to a bundle, as ``export_module_to_bundle`` does.

    Raises:
        RegistrationRefused: the file is of neither kind, needs an example, or cannot be exported.
    """
    if path.endswith(".pt2"):
        return convert_pt2(path, out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings are for the file's author
            load: Any = torch.jit.load
            module = load(path, map_location="cpu")
    except Exception as error:  # torch's RuntimeError for a file with other content
        is_program = holds_program(path)
        raise RegistrationRefused(
            path,
            f"its TorchScript cannot be loaded ({first_line(error)[:80]})"
            if is_program
            else "it holds weights or a pickled module, not a program of torch.jit.save",
            hint="register the module that it was made from"
            if is_program
            else "pipeswitch register NAME package.module:function "
            f"--weights {os.path.basename(path)}",
        ) from None
    if example_inputs is None:
        if not inputs:
            raise RegistrationRefused(
                path,
                "a TorchScript file does not contain its input shapes",
                hint=f"pipeswitch register NAME {os.path.basename(path)} --input "
                "1x3x224x224:float32, or example_inputs=(x,)",
            )
        shapes, options["dynamic"] = checked_inputs(inputs)
        specs = example_specs(shapes)

        def plain(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(flatten_outputs(module(*values)).values())

        example_inputs = tuple(acceptable_inputs(specs, {}, plain))
        options["input_names"] = list(shapes)
    return export_module_to_bundle(module, example_inputs, out, **options)


def convert_weights(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Convert a state dict that ``torch.save`` wrote, or the shards of an index, to safetensors.

    Raises:
        RegistrationRefused: the file cannot be read, or contains something else.
        FileNotFoundError: there is no such file.
    """
    part = f"weights {os.fspath(path)!r}"
    hint = "where the module is: torch.save(module.state_dict(), 'weights.pt')"
    check_file(path, part)
    if holds_program(path):
        raise RegistrationRefused(
            part,
            "it is a TorchScript program, not weights",
            hint=f"pipeswitch register NAME {os.path.basename(path)} --input 8x3x224x224:float32",
        )
    try:
        content = _joined(path) if os.fspath(path).endswith(".index.json") else _unpickled(path)
    except RegistrationRefused:
        raise
    except FileNotFoundError:
        raise
    except Exception as error:  # an UnpicklingError, or any error for a damaged file
        reason = f"it contains more than tensors ({first_line(error)[:80]})"
        raise RegistrationRefused(part, reason, hint=hint) from None
    for key in _INNER:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(map(is_tensor, content.values())) or not content:
        reason = "it is not a state dict, and not a dict with one as 'state_dict'"
        raise RegistrationRefused(part, reason, hint=hint)
    sparse = [name for name, value in content.items() if value.layout is not torch.strided]
    if sparse:
        raise RegistrationRefused(
            part,
            f"{', '.join(sparse[:8])} is sparse; weights are dense",
            hint=f"state[{sparse[0]!r}] = state[{sparse[0]!r}].to_dense(), before torch.save",
        )
    save_file({name: value.clone().contiguous() for name, value in content.items()}, out)


def _unpickled(path: str | os.PathLike[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings are about sparse tensors
        return torch.load(path, map_location="cpu", weights_only=True)


def _joined(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensors of all shards that an index names (``model.safetensors.index.json``).

    Raises:
        RegistrationRefused: the index is damaged, or a shard or one of its tensors is missing.
    """
    index, part = Path(path), f"weights {os.fspath(path)!r}"
    try:
        named: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        places = {name: index.parent / os.path.basename(place) for name, place in named.items()}
        if not places:
            raise ValueError("weight_map is empty")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it is not an index of shards ({first_line(error)[:80]})"
        raise RegistrationRefused(part, why, hint="a file with weight_map") from None
    tensors: dict[str, Any] = {}
    for shard in sorted(set(places.values())):
        if not shard.is_file():
            raise RegistrationRefused(part, f"its shard {shard.name} is missing", hint=AGAIN)
        check_file(shard, f"shard {shard.name}")
        try:
            content = load_file(shard) if shard.suffix == ".safetensors" else _unpickled(shard)
            # A tensor may be in other shards too: the index says which one is meant.
            tensors |= {name: one for name, one in content.items() if places.get(name) == shard}
        except Exception as error:  # any error for a damaged file
            why = f"it cannot be read ({first_line(error)[:80]})"
            raise RegistrationRefused(f"shard {shard.name}", why, hint=AGAIN) from None
    if missing := sorted(places.keys() - tensors):
        raise RegistrationRefused(part, listed(missing, "its shards lack "), hint=AGAIN)
    return tensors


@one_export_at_a_time()
def convert_pt2(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Convert a ``.pt2`` file to a bundle, on the machine of a user who trusts the file.

    ``torch.export.load`` unpickles: never call this on a file from another user.

    Raises:
        RegistrationRefused: the file cannot be loaded, has no example inputs, or does not export.
    """
    try:
        loaded = torch.export.load(os.fspath(path))
    except Exception as error:
        raise RegistrationRefused(f"{path}", f"torch.export.load: {first_line(error)}") from error
    if loaded.example_inputs is None:
        raise RegistrationRefused(f"{path}", "it was saved without example inputs")
    positional, keywords = loaded.example_inputs
    example: Any = {**dict(enumerate(positional)), **keywords}
    module: Any = loaded.module()
    named = named_inputs(module, example, None)
    names = named.names
    dynamic = _taken(Flat(module, named), names, named.tensors, _open_in(loaded, names))
    return export_module_to_bundle(module, example, out, dynamic=dynamic)


def _taken(
    flat: Flat, names: Sequence[str], inputs: Sequence[torch.Tensor], dynamic: OpenDims
) -> OpenDims:
    """Return the open dimensions without small extents that the file's own guards refuse."""
    shapes = [tuple(value.shape) for value in inputs]
    dims = asked_axes(names, shapes, dynamic)
    specs = [
        tuple(dims[n, axis].name if (n, axis) in dims else extent for axis, extent in enumerate(s))
        for n, s in enumerate(shapes)
    ]
    own = values_of(specs, shapes) or {}
    lows = {}
    for dim in dict.fromkeys(dims.values()):
        tried = range(dim.low, min(dim.low + MAX_REFUSED, own[dim.name]))
        lows[dim.name] = next(
            (n for n in tried if _takes(flat, resized(specs, inputs, {**own, dim.name: n}))),
            own[dim.name],
        )
    return {
        name: {axis: (label, lows.get(label, low), high) for axis, (label, low, high) in of.items()}
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
    """Return the open dimensions of a file, with names as ``names_for`` gives them."""
    user_inputs = set(loaded.graph_signature.user_inputs)
    values = [
        node.meta["val"]
        for node in loaded.graph.nodes
        if node.op == "placeholder" and node.name in user_inputs and node.meta["val"] is not None
    ]
    dim_names: dict[Any, str] = {}
    dims: OpenDims = {}
    for name, value in zip(names, values, strict=True):
        for axis, extent in enumerate(value.shape):
            if isinstance(extent, torch.SymInt):
                symbol = extent.node.expr
                if symbol not in dim_names:
                    free = (
                        one for one in names_for(value.shape, axis) if one not in dim_names.values()
                    )
                    dim_names[symbol] = next(free)
                low, high = _ends(loaded, symbol)
                dims.setdefault(name, {})[axis] = (dim_names[symbol], low, high)
    return dims


def _ends(loaded: torch.export.ExportedProgram, symbol: Any) -> tuple[int, int]:
    """Return a symbol's range in a file; ``ENDLESS`` replaces a missing upper end."""
    ends: Any = loaded.range_constraints.get(symbol)
    if ends is None:
        raise RegistrationRefused(
            "dynamic_shapes", f"a dimension is {symbol}; only plain symbols are supported"
        )
    high = int(ends.upper) if ends.upper.is_Integer else ENDLESS
    return max(1, int(ends.lower)), min(high, MAX_EXTENT)
