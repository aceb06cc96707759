"""Private names of PyTorch and Python that training uses, each with a fallback.

Under ``workers/training``, only ``persistent_loaders`` uses further private names of torch. Tested
with torch 2.15. If a name is gone, the fallback is slower or loses only a warning.
"""

from __future__ import annotations

import copy
import dis
import re
import sys
from collections import OrderedDict
from collections.abc import Collection
from types import MethodType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

Buffers = dict[str, torch.Tensor | None]

RAISING: Final = re.compile(
    "CALL|PRECALL|RAISE|RERAISE|BINARY|COMPARE|CONTAINS|LOAD|STORE|UNARY|UNPACK|DELETE|IMPORT|"
    "FORMAT|FOR_ITER|GET_ITER|BEFORE_WITH"
)
"""Prefixes of names of Python instructions that may raise."""


def advance_sampler(iterator: Any, batches: int) -> bool:
    """Draw ``batches`` index lists from a DataLoader iterator without fetching any data.

    Returns:
        False if this iterator cannot do that (worker processes, iterable dataset, other torch).
        The caller then fetches and drops batches, which is exact and public but slow.

    Raises:
        StopIteration: the sampler has fewer batches.
    """
    if type(iterator).__name__ != "_SingleProcessDataLoaderIter":
        return False
    next_index = getattr(iterator, "_next_index", None)
    if next_index is None:
        return False
    for _ in range(batches):
        next_index()
    if hasattr(iterator, "_num_yielded"):
        iterator._num_yielded += batches
    return True


class Drawn:
    """Iterator of a DataLoader's sampler that keeps the last indices; in place of the sampler's."""

    def __init__(self, iterator: Any) -> None:
        self._inner: Any = getattr(iterator, "_sampler_iter", None)
        self.last: Any = None
        if type(iterator).__name__ == "_SingleProcessDataLoaderIter" and self._inner is not None:
            iterator._sampler_iter = self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.last = next(self._inner)
        return self.last


def is_plain_map_loader(loader: Any) -> bool:
    """Return True for a DataLoader without worker processes over a map-style dataset.

    It reads only public attributes.
    """
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def bytes_of_their_own(memory: torch.Tensor, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """Return bytes of a device's uint8 ``memory`` as a tensor with a storage of only that size.

    A view would share the storage of the whole arena, and ``torch.save`` of a parameter, or
    ``copy.deepcopy`` of a buffer, would copy all of it. Nothing is copied here; the fallback is the
    view. ``memory`` must be contiguous and outlive the result; the caller checks the bounds.
    """
    storage_at = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    tensor_at = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if storage_at is None or tensor_at is None or memory.device.type != "cuda":
        return memory[offset_bytes : offset_bytes + size_bytes]
    storage = storage_at(memory.data_ptr() + offset_bytes, memory.device, size_bytes)
    tensor: torch.Tensor = tensor_at(
        {"size": (size_bytes,), "stride": (1,), "dtype": torch.uint8, "storage_offset": 0}, storage
    )
    return tensor


def registered_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    """Return a module's own buffers by name; None entries only if torch has ``_buffers``."""
    buffers = getattr(module, "_buffers", None)
    if buffers is None:
        return list(module.named_buffers(recurse=False))
    return list(buffers.items())


def live_buffers(module: torch.nn.Module) -> Buffers:
    """Return the mapping in which a module keeps its own buffers; it stays current."""
    buffers: Buffers = getattr(module, "_buffers", vars(module))
    return buffers


class _HookTable(OrderedDict[int, Any]):
    """Forward pre-hooks of a module. ``hidden`` runs, but pickle and TorchScript do not see it."""

    hidden: Any = None

    def values(self) -> Any:  # torch.jit.script reads ``values``, a call reads ``items``
        return [hook for hook in super().values() if hook is not self.hidden]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hooks = [(key, hook) for key, hook in self.items() if hook is not self.hidden]
        return OrderedDict, (hooks,)

    def __deepcopy__(self, copies: dict[int, Any]) -> _HookTable:
        table = type(self)((key, copy.deepcopy(hook, copies)) for key, hook in self.items())
        table.hidden = self.hidden
        return table


def hook_unseen(module: torch.nn.Module, hook: Any) -> RemovableHandle:
    """Register a forward pre-hook that is left out when the module is saved or scripted."""
    table = getattr(module, "_forward_pre_hooks", None)
    if type(table) is OrderedDict and not isinstance(module, torch.jit.ScriptModule):
        hooks = _HookTable(table)
        hooks.hidden = hook
        module._forward_pre_hooks = hooks
    return module.register_forward_pre_hook(hook)


def made_in_forward(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return tensors that a module's forward pre-hooks make at each call, like spectral_norm."""
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    tensors = [vars(module).get(getattr(hook, "name", None) or "") for hook in hooks]
    return [one for one in tensors if isinstance(one, torch.Tensor)]


def has_aliases(tensor: torch.Tensor, known: int = 0) -> bool:
    """Return True if more than ``known`` other tensors share this tensor's storage.

    Such tensors are views, ``.data`` and the values of a ``state_dict()``. Return False if this
    torch cannot count the tensors that use a storage.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # The tensor itself and ``storage`` count as two.
    return count is not None and int(count(storage._cdata)) > 2 + known


def is_left_by_error(frame: Any, loops: Collection[int] | None = None) -> bool:
    """Return True if an error, not ``break``, ended a ``for`` loop's body and closed its generator.

    After an error the frame is at the instruction that raised; ``break`` and ``return`` remove the
    iterator with another instruction. Return False if this Python has other instructions.

    Args:
        frame: the frame that closed the generator: the loop's, or that of another generator between
            the loop and ours, which is being closed, too.
        loops: ids of the frames that may have the loop, see ``consumers.loops_of``; its function
            has returned if ``frame`` is another one.
    """
    while frame is not None and (loops is None or id(frame) in loops):
        code, at = frame.f_code.co_code, frame.f_lasti
        while dis.opname[code[at]] == "CACHE":  # Python 3.11: behind a call of a Python function
            at -= 2
        name = dis.opname[code[at]]
        if name == "FOR_ITER" and "islice" in frame.f_code.co_names:
            return sys.exc_info()[0] is not GeneratorExit  # ``islice`` closes what it has used up
        if not name.startswith(("YIELD", "RESUME", "SEND")):
            return RAISING.match(name) is not None
        frame, loops = frame.f_back, None
    return False


def version(tensor: torch.Tensor) -> int:
    """Return autograd's count of visible in-place writes; 0 for ``inference_mode``."""
    return 0 if tensor.is_inference() else tensor._version


def root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or the tensor itself; a base and its views share one version."""
    return tensor if tensor._base is None else tensor._base


def wrapped_by(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that an optimizer keeps in attributes, or in lists and dicts there."""
    inner: dict[str, torch.optim.Optimizer] = {}
    for name, value in getattr(optimizer, "__dict__", {}).items():
        many = value.values() if isinstance(value, dict) else value
        if isinstance(value, torch.optim.Optimizer):
            inner[name] = value
        elif isinstance(value, (dict, list, tuple)):
            each = enumerate(many)
            inner |= {f"{name}.{i}": x for i, x in each if isinstance(x, torch.optim.Optimizer)}
    return inner


def hook_steps(optimizer: Any) -> None:
    """Give ``step`` its hooks if a wrapper's class did not: not an Optimizer, or no ``__init__``.

    Only this object is changed, because other objects of its class have no hooks to call.
    """
    kind = torch.optim.Optimizer
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False) and "step" not in vars(optimizer):
        step = MethodType(kind.profile_hook_step(type(optimizer).step), optimizer)
        before, after = kind.register_step_pre_hook, kind.register_step_post_hook
        code = getattr(optimizer, "_optimizer_step_code", type(None))  # called for profilers
        vars(optimizer).update(
            step=step,
            _optimizer_step_code=code,
            register_step_pre_hook=MethodType(before, optimizer),
            register_step_post_hook=MethodType(after, optimizer),
        )


def optimizer_was_called(optimizer: torch.optim.Optimizer) -> bool:
    """Return the flag by which schedulers detect whether ``optimizer.step()`` was called first."""
    return bool(getattr(optimizer, "_opt_called", False))


def mark_optimizer_called(optimizer: torch.optim.Optimizer) -> None:
    """Set the flag of ``optimizer_was_called``: the call was made before the preemption."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
