"""Advice for modules that cannot become a graph: a hint for each kind of torch message."""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...base.errors import RegistrationRefused

FACTORY: Final = (
    "put a function that creates it on the server's PYTHONPATH, and as the owner run pipeswitch "
    "register NAME package.module:function --example FILE.npz"
)
DATA: Final = (
    "a shape or a path depends on data (nonzero, torch.where of one argument, a loop over "
    f"experts), so it runs in module mode: {FACTORY}; or compute all and choose with "
    "torch.where(mask, a, b)"
)
PACKED: Final = (
    f"packed sequences have shapes that depend on data, so it runs in module mode: {FACTORY}; or "
    'leave packing out and let requests choose the length: dynamic={"x": {1: (1, 512)}}'
)
EXPERTS: Final = (
    "call model.set_experts_implementation('batched_mm') before you register it, so that your "
    "results equal the server's"
)
QUANTIZED: Final = (
    "register the module before quantization, or with int8 weights only: pip install torchao; "
    "from torchao.quantization import quantize_, Int8WeightOnlyConfig; quantize_(module, "
    "Int8WeightOnlyConfig())"
)
WRITES: Final = (
    "compute into a new tensor (h = torch.zeros_like(self.h), not self.h.zero_()); of an "
    "nn.Embedding set max_norm to None once its rows are scaled"
)
WINDOWS: Final = "compute into a new tensor (x = x.clamp(max=1.0), not x.clamp_(max=1.0))"
SPARSE: Final = (
    'keep it dense, register_buffer("a", a.to_dense()), and use torch.mm in place of '
    "torch.sparse.mm; or, in module mode, keep a.indices() and a.values() of a = a.coalesce() as "
    "two buffers, and call torch.sparse_coo_tensor(self.i, self.v, SHAPE) in forward"
)
NO_DATA: Final = (
    'give its tensors memory and values first: module.to_empty(device="cpu"), then '
    "module.load_state_dict(state)"
)
UNLISTED: Final = (
    f"its kernel is not known to access only its arguments, so it runs in module mode: {FACTORY}"
)
OTHERS: Final = (
    "a module must be traceable: no custom classes or libraries, no autocast inside its forward; "
    f"one that is not runs in module mode: {FACTORY}"
)
_KINDS: Final = (
    (EXPERTS, ("aten.histc", "aten._grouped_mm", "aten.grouped_mm")),
    (
        DATA,
        (
            "data-dependent",
            "depends on data",
            "aten.where.default",
            "aten.nonzero",
            "aten.item",
            "aten.masked_select",
            "aten.unique",
            "aten._unique",
            "aten.bincount",
            "aten._local_scalar_dense",
            "aten.repeat_interleave.Tensor",
            "torchvision.nms",
        ),
    ),
)
_ENGINES: Final = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def advice(reason: str) -> str:
    """Return the advice for a reason given by torch or by the closed operator list."""
    rest = UNLISTED if reason.startswith("aten.") else OTHERS
    return next((hint for hint, words in _KINDS if any(w in reason for w in words)), rest)


def refuse_wrapped(name: str, weight: Any) -> None:
    """Refuse a weight of a library's tensor class, whose bytes are not one contiguous copy."""
    if is_traceable_wrapper_subclass(weight):
        kind = type(weight)
        raise RegistrationRefused(
            f"weight {name!r}",
            f"it is a {kind.__name__} of {kind.__module__.partition('.')[0]}, not a plain tensor",
            hint=QUANTIZED,
        )


def refuse_engines(module: nn.Module) -> None:
    """Refuse a module with weights that are lazy, on meta, or packed by a quantization engine.

    Raises:
        RegistrationRefused: the error names such weights (at most eight) or the first such layer.
    """
    lazy = [name for name, weight in module.named_parameters() if is_lazy(weight)]
    if lazy:
        raise RegistrationRefused(
            f"weights {', '.join(lazy[:8])}",
            "they have no values before the module's first call",
            hint="call the module once before you register it, in a factory before it returns",
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise RegistrationRefused(
            f"weights {', '.join(empty[:8])}", "they are on the meta device: no data", hint=NO_DATA
        )
    for name, child in module.named_modules():
        if type(child).__module__.startswith(_ENGINES):
            raise RegistrationRefused(
                f"module {name!r}",
                "it is quantized for an engine of torch's, which keeps its weights packed where "
                "nothing can stream them",
                hint=QUANTIZED,
            )
