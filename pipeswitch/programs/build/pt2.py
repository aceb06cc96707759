"""A ``.pt2`` file as a bundle, its dimensions as open as the file has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import torch

from ...errors import RegistrationRefused
from ..dims import MAX_EXTENT, values_of
from .alone import one_export_at_a_time
from .checking import resized
from .dynamic import asked_axes, names_for
from .export import export_module_to_bundle, first_line
from .naming import Flat, named_inputs

MAX_REFUSED: Final = 32  # extents at the low end of a file's range that are tried
ENDLESS: Final = 512  # the largest extent of a dimension whose file gives no upper end

OpenDims = dict[str, dict[int, tuple[str, int, int]]]


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
        raise RegistrationRefused(f"{path}", f"torch.export.load: {first_line(error)}") from error
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
