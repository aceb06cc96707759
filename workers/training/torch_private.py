"""Private names of PyTorch and Python that training relies on, each with its fallback.

Nothing else under ``workers/training*.py`` touches an underscore of torch. Tested on torch 2.15;
where a name is gone, the fallback is slower or loses nothing but a warning.
"""

from __future__ import annotations

import copy
import dis
from collections import OrderedDict
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

RAISING: Final = (
    "CALL",
    "PRECALL",
    "RAISE",
    "RERAISE",
    "BINARY",
    "COMPARE",
    "CONTAINS",
    "LOAD",
    "STORE",
    "UNARY",
    "UNPACK",
    "DELETE",
    "IMPORT",
    "FORMAT",
    "FOR_ITER",
    "GET_ITER",
    "BEFORE_WITH",
)
"""Prefixes of the names of Python's instructions that may raise."""


def advance_sampler(iterator: Any, batches: int) -> bool:
    """Draw ``batches`` index lists from a DataLoader iterator without fetching any data.

    Returns:
        False when this iterator has no such way in (worker processes, iterable datasets, another
        torch): the caller fetches and drops instead, which is public, exact and slow.

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


def is_plain_map_loader(loader: Any) -> bool:
    """Return True for a DataLoader without worker processes over a map-style dataset.

    Only public attributes are read.
    """
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def bytes_of_their_own(memory: torch.Tensor, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """Bytes of a device's uint8 ``memory`` as a storage of just their size; nothing is copied.

    A view would share the storage of the whole arena: ``torch.save`` of a parameter would write
    all of it, ``copy.deepcopy`` of a buffer copy it. Falls back to the view. ``memory`` must be
    contiguous, bounds are the caller's, and it must outlive the result.
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
    """Return a module's own buffers, including None; without these where the attribute is gone."""
    buffers = getattr(module, "_buffers", None)
    if buffers is None:
        return list(module.named_buffers(recurse=False))
    return list(buffers.items())


class _HookTable(OrderedDict[int, Any]):
    """Forward pre-hooks of a module; ``hidden`` runs, but pickle and TorchScript do not see it."""

    hidden: Any = None

    def values(self) -> Any:  # what torch.jit.script compiles; a call goes by ``items``
        return [hook for hook in super().values() if hook is not self.hidden]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hooks = [(key, hook) for key, hook in self.items() if hook is not self.hidden]
        return OrderedDict, (hooks,)

    def __deepcopy__(self, copies: dict[int, Any]) -> _HookTable:
        table = type(self)((key, copy.deepcopy(hook, copies)) for key, hook in self.items())
        table.hidden = self.hidden
        return table


def hook_unseen(module: torch.nn.Module, hook: Any) -> RemovableHandle:
    """Register a forward pre-hook that is not part of the module where it is saved or scripted."""
    table = getattr(module, "_forward_pre_hooks", None)
    if type(table) is OrderedDict and not isinstance(module, torch.jit.ScriptModule):
        hooks = _HookTable(table)
        hooks.hidden = hook
        module._forward_pre_hooks = hooks
    return module.register_forward_pre_hook(hook)


def made_in_forward(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the attributes that a module's forward pre-hooks make anew, as spectral_norm does."""
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    tensors = [vars(module).get(getattr(hook, "name", None) or "") for hook in hooks]
    return [one for one in tensors if isinstance(one, torch.Tensor)]


def has_aliases(tensor: torch.Tensor, known: int = 0) -> bool:
    """Return whether other tensors than the ``known`` number lie in this one's storage: views,
    ``.data``, a ``state_dict()``.

    False where this torch cannot tell.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # The tensor and ``storage`` are two.
    return count is not None and int(count(storage._cdata)) > 2 + known


def is_left_by_error(frame: Any) -> bool:
    """Return whether an error, not ``break``, ended a ``for`` loop's body and closed its generator.

    An error leaves the frame at the instruction that raised; ``break`` and ``return`` pop the
    iterator by an instruction of their own. Return False if this Python has other instructions.

    Args:
        frame: of the loop, or of a generator around it that is closed as well.
    """
    while frame is not None:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if not name.startswith(("YIELD", "RESUME", "SEND")):
            return bool(name.startswith(RAISING))
        frame = frame.f_back
    return False


def version(tensor: torch.Tensor) -> int:
    """Return the count of in-place writes (autograd's own counter); not those through ``.data``."""
    return tensor._version


def root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this is a view of, or itself: all views share its version."""
    return tensor if tensor._base is None else tensor._base


def optimizer_was_called(optimizer: torch.optim.Optimizer) -> bool:
    """Return the flag that shows a scheduler if ``optimizer.step()`` was called first."""
    return bool(getattr(optimizer, "_opt_called", False))


def mark_optimizer_called(optimizer: torch.optim.Optimizer) -> None:
    """Spare a resumed script that warning: the call was made before the preemption."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
