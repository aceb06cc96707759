"""Places of tensors in a training job's slice, and estimates of how many bytes they need."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pipeswitch.base.errors import OutOfDeviceMemory
from pipeswitch.programs.interface.layout import aligned

from .torch_private import wrapped_by

TENSOR_BYTES: Final = 512  # alignment like torch's on cuda: cuBLASLt chooses kernels by it
HISTORY_ENTRY_BYTES: Final = 2048  # scalars of one LBFGS update, and the JSON that names them
FALLBACK_STATE_FACTOR: Final = 2  # if an optimizer fails on meta: two moments, like Adam


@dataclass
class SlicePlace:
    """One tensor's place in the slice."""

    name: str
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def entry(self) -> dict[str, Any]:
        """Return the place as an entry of the image's JSON."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "stride": list(self.stride),
            "offset": self.offset_bytes,
            "size": self.size_bytes,
        }

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has this place's dtype and shape."""
        return self.dtype == tensor.dtype and self.shape == tuple(tensor.shape)


class Area:
    """A contiguous range of the slice that is filled from front to back."""

    def __init__(self, name: str, offset_bytes: int, capacity_bytes: int) -> None:
        self.name = name
        self.offset_bytes = offset_bytes
        self.capacity_bytes = aligned(capacity_bytes, TENSOR_BYTES)
        self.used_bytes = 0

    @property
    def end_bytes(self) -> int:
        """Offset at which the area ends and the next one begins."""
        return self.offset_bytes + self.capacity_bytes

    def place(self, name: str, tensor: torch.Tensor) -> SlicePlace:
        """Reserve the next place for a tensor of this size, dtype and shape.

        Raises:
            OutOfDeviceMemory: the area is full.
        """
        size = tensor.numel() * tensor.element_size()
        start = self.used_bytes
        if start + aligned(size, TENSOR_BYTES) > self.capacity_bytes:
            raise OutOfDeviceMemory(
                f"{name}: the job's {self.name} needs more than the {self.capacity_bytes} bytes "
                "measured when its first loop began",
                hint="pass all models and optimizers to the first job.steps",
                requested_bytes=start + size,
                largest_free_bytes=self.capacity_bytes,
            )
        self.used_bytes = start + aligned(size, TENSOR_BYTES)
        stride = tuple(tensor.stride()) if is_dense(tensor) else row_major(tensor.shape)
        return SlicePlace(
            name, self.offset_bytes + start, size, tensor.dtype, tuple(tensor.shape), stride
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill one range without holes or overlap, in any order."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return tensor.numel() > 0


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    stride, expected = [], 1
    for extent in reversed(tuple(shape)):
        stride.append(expected)
        expected *= max(extent, 1)
    return tuple(reversed(stride))


def padded_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the tensors take in an area, each with its alignment."""
    return sum(aligned(_bytes_of(tensor), TENSOR_BYTES) for tensor in tensors)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's future state tensors, from a dry step on the meta device.

    This works for each optimizer whose ``step`` runs on meta tensors (torch's Adam, AdamW, SGD,
    RMSprop, Adagrad, ...). For others it returns an estimate: twice the parameters or the size of
    the current state, whichever is larger. A step of a wrapper would step the real optimizer in it,
    so wrappers are not run. Tensors in lists are counted by ``history_bytes``.
    """
    is_wrapper = bool(wrapped_by(optimizer))
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    estimate = 0
    for group in optimizer.param_groups:
        metas = []
        for parameter in group["params"]:
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"))
            meta.grad = torch.empty_like(meta)
            metas.append(meta)
            estimate += FALLBACK_STATE_FACTOR * aligned(_bytes_of(parameter), TENSOR_BYTES)
            if parameter in optimizer.state:
                state[meta] = _on_meta(optimizer.state[parameter])
        plain = {k: False for k in ("fused", "foreach", "capturable") if group.get(k)}
        groups.append({**copy.copy(group), **plain, "params": metas})
    with contextlib.suppress(Exception):  # any error of the optimizer's code: estimate instead
        if not is_wrapper:
            dry = copy.copy(optimizer)  # no hooks; shares only attributes that are replaced next
            dry.param_groups, dry.state = groups, state
            type(optimizer).step(dry)
            return padded_bytes(tensor for _, tensor in state_tensors(dry))
    estimate += 4096 * sum(len(group["params"]) for group in optimizer.param_groups)
    return max(estimate, padded_bytes(tensor for _, tensor in state_tensors(optimizer)))


def history_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors that an optimizer will keep in lists, in the state area.

    LBFGS fills two lists of up to ``history_size`` vectors, each as large as all its parameters.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    total = 0
    for group in optimizer.param_groups:
        vector = aligned(sum(map(_bytes_of, group["params"])), TENSOR_BYTES)
        total += int(group["history_size"]) * (2 * vector + HISTORY_ENTRY_BYTES)
    return total


def sparse_gradient_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the largest sparse gradients that embeddings may leave behind."""
    total = 0
    for module in modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            total += _bytes_of(module.weight) + 8 * module.num_embeddings
    return total


def _on_meta(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: (value.to("meta") if value.dim() else value.clone())
        if isinstance(value, torch.Tensor)
        else copy.copy(value)
        for key, value in state.items()
    }


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield ((parameter, key), tensor) for every tensor directly in the optimizer's state."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield (parameter, key), value
