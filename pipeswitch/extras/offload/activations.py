"""Saved tensors of a training step under a memory budget: tensors beyond it move to the host.

PyTorch's saved-tensor hooks show each tensor that forward keeps for backward. Each *storage* counts
once, however many views of it are saved. Parameters, buffers and the batch are not activations and
are never moved. Life of a storage, in numbered steps:

1. *saved*: if there is no room, forward waits for copies under way or sends other storages first;
2. *leaving*: a copy thread copies it out, as the plan (``offload="auto"``) or the mode says;
3. *on the host*: this module holds no reference to the device's bytes any more;
4. *coming*: backward fetches storages ahead, in the order of use, as far as there is room;
5. *used*: autograd gets a view of the bytes, which count until autograd drops the view.

The thread that computes does everything except the copies. Finished copies and dropped saved
tensors (any thread's garbage collector may drop them) wait in queues for that thread's next call.

In-place writes: hooks disable autograd's check for them, so each saved tensor keeps a *witness*, a
tensor that shares its version counter and has no bytes. If a storage is saved again and its copy
may be older than its current contents, the storage is counted and copied as a new one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipeswitch.devices.worker_device import HostCopies, now_ms
from pipeswitch.extras.offload.swaps import MIN_BYTES
from pipeswitch.ipc.gate import Gate, Where

from ...workers.training.torch_private import root, version
from .activation_budget import TILE_BYTES, ActivationBudget
from .copy_streams import Copy, CopyStreams
from .saved import UNLIMITED, ActivationMemory, Saved, StepPlan, StoragePlace

CONVOLUTIONS: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
WORTH_MS: Final = 3.0  # a shorter wait is not worth two switches: to another job, and back
CHARGE_BYTES: Final = 1 << 20  # unit in which host memory is reserved: few requests, little unused


class _Handle:
    """Placeholder that autograd keeps instead of a saved tensor."""

    __slots__ = ("dtype", "ended", "offset", "saved", "shape", "stride", "version", "witness")

    def __init__(self, saved: Saved, tensor: torch.Tensor, ended: deque[Saved]) -> None:
        self.saved, self.ended = saved, ended
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = version(tensor)
        self.witness = tensor.detach()
        self.witness.data = tensor.new_empty(0)

    def tensor(self) -> torch.Tensor:
        """Return the saved view; its bytes must be on the device."""
        assert self.saved.device is not None
        tensor = self.saved.device.new_empty(0, dtype=self.dtype)
        tensor.set_(self.saved.device.untyped_storage(), self.offset, self.shape, self.stride)
        shown = self.witness.detach()  # shares the version counter
        shown.data = tensor
        return shown

    def __del__(self) -> None:
        self.ended.append(self.saved)


class _Kept:
    """Tensor that autograd keeps, but that is not an activation."""

    __slots__ = ("kept", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept, self.version = tensor.detach(), version(tensor)


class _Storages:
    """A map from live storages to values; a storage that is freed leaves the map."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def put(self, storage: Any, value: Any = True) -> None:
        key, known = id(storage), self._known
        known[key] = (weakref.ref(storage, lambda _: known.pop(key, None)), value)

    def get(self, storage: Any) -> Any:
        return self._known.get(id(storage), (None, None))[1]


class _Layers:
    """Number of the layer that computes now; the count starts at 0 in each step."""

    def __init__(
        self, keep: Callable[[Iterable[torch.Tensor]], None], streams: CopyStreams
    ) -> None:
        self._keep, self._streams = keep, streams
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.number, self.is_convolution = 0, False

    def enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # compiled code has no layers
        self.number += 1
        self.is_convolution = isinstance(module, CONVOLUTIONS)
        if module not in self._seen:
            self._seen.add(module)
            self._keep(module.parameters(recurse=False))
            self._keep(module.buffers(recurse=False))
        self._streams.resume()

    def leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.is_convolution = False


class Activations:
    """Saved tensors of one loop: ``body`` wraps each step, and ``figures`` describe the last step.

    Args:
        offload: see ``pipeswitch.job.steps``.
        budget_bytes: None for no budget: ``all`` and ``conv`` then keep two layers on the device.
        charge: called before more host memory is taken, with the total need in bytes.
    """

    def __init__(
        self,
        offload: str,
        budget_bytes: int | None,
        copies: HostCopies,
        gate: Gate,
        charge: Callable[[int], None] = lambda _: None,
        tiles: ActivationBudget | None = None,
    ) -> None:
        self._charge, self._charged = charge, 0
        self._offload, self.asked_for = offload, (offload, budget_bytes)
        self._streams, self._gate = CopyStreams(copies, gate), gate
        self.memory = ActivationMemory(budget_bytes, tiles, gate)
        self.plan = StepPlan(offload, self._streams)
        self._layers = _Layers(self.keep, self._streams)
        self._own = _Storages()  # parameters, buffers, the batch
        self._table = _Storages()  # saved storages, each with its ``Saved``
        self._handles_ended: deque[Saved] = deque()
        self._bytes_ended: deque[int] = deque()
        self._alive: dict[Saved, None] = {}
        self._ahead: list[Saved] | None = None  # to fetch next, in reverse order; None in forward
        self.away_ms = 0.0
        self._moved = self._asked_ahead = self._asked_late = 0
        self._on_host = self._host_peak = 0
        self.figures: dict[str, Any] = {}

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude the storages of these tensors from the activations."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._own.put(tensor.untyped_storage())

    @contextmanager
    def body(self, batch: Any) -> Iterator[None]:
        """Treat tensors that are saved inside the block (one step) as activations."""
        self.keep(_tensors_in(batch))
        self._begin()
        hooks = [register_module_forward_pre_hook(self._layers.enter)]
        if self._offload == "conv":
            hooks.append(register_module_forward_hook(self._layers.leave, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._end()

    def give_back(self) -> None:
        """Release the reserved host memory that no tensor uses; called at a loop's end."""
        self._finish_copies()
        if self._charged > self._on_host:
            self._charge(self._on_host)
            self._charged = self._on_host

    def close(self) -> None:
        """Close the copy threads; call no other method after that."""
        self._streams.close()

    def _begin(self) -> None:
        self._finish_copies()
        self.away_ms = 0.0
        self.memory.begin()
        self._layers.number, self._ahead = 0, None
        self.plan.begin()
        self._moved = self._asked_ahead = self._asked_late = 0
        self._streams.resume()

    def _end(self) -> None:
        self._finish_copies()
        memory, plan = self.memory, self.plan
        self.figures = {
            "budget_bytes": memory.budget if memory.is_limited else None,
            "peak_bytes": memory.peak_bytes,
            "offloaded_bytes": self._moved,
            "host_bytes": self._host_peak,
            "fetched_ahead": self._asked_ahead,
            "fetched_late": self._asked_late,
            "waited_ms": round(memory.waited_ms, 3),
            "device_peak_bytes": memory.tiles and memory.tiles.most * TILE_BYTES,
            **plan.end(memory),
        }

    # -- saving ----------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Handle | _Kept:
        if not _is_plain(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        if self._own.get(storage):
            return _Kept(tensor)
        self._finish_copies()
        self._streams.resume()
        saved = self._table.get(storage)
        if saved not in self._alive or (_may_be_copied(saved) and not _is_as_saved(saved, tensor)):
            saved = self._admit(storage)
        if self._layers.is_convolution and self._offload == "conv":
            self._send_once(saved)
        saved.roots.append((weakref.ref(root(tensor)), version(tensor)))
        saved.handles += 1
        return _Handle(saved, tensor, self._handles_ended)

    def _admit(self, storage: torch.UntypedStorage) -> Saved:
        """Count a new storage (steps 1 and 2 of its life); mark it as refused if it has no room."""
        self._ahead = None
        size_bytes = storage.nbytes()
        may_leave = size_bytes >= MIN_BYTES and self._offload in ("auto", "all")
        saved = Saved(len(self.plan.of_step), size_bytes, self._layers.number, may_leave)
        self.plan.of_step.append(saved)
        has_room = self._make_room(size_bytes, "forward")
        self._alive[saved] = None
        self.plan.note("save", saved, self.memory.waited_ms)
        if not has_room:
            saved.place = StoragePlace.REFUSED
            self.memory.refused += size_bytes
            self.memory.needed = max(self.memory.needed, self.memory.held + size_bytes)
            return saved
        self.memory.hold(size_bytes)
        saved.device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._table.put(saved.device.untyped_storage(), saved)
        leaving = self.plan.forecast.leaving if self.plan.forecast is not None else ()
        if self._offload == "all" or saved.number in leaving:
            self._send_once(saved)
        return saved

    def _send_once(self, saved: Saved) -> None:
        if (
            saved.place is StoragePlace.DEVICE
            and saved.host is None
            and saved.size_bytes >= MIN_BYTES
        ):
            saved.may_leave = True
            self._send(saved)

    # -- using -----------------------------------------------------------------------------------

    def _unpack(self, handle: _Handle | _Kept) -> torch.Tensor:
        witness = handle.kept if isinstance(handle, _Kept) else handle.witness
        if version(witness) != handle.version:
            shape = witness.shape if isinstance(handle, _Kept) else handle.shape
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{witness.type()} {list(shape)}] is at version "
                f"{version(witness)}; expected version {handle.version} instead. Hint: enable "
                "anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True)."
            )
        if isinstance(handle, _Kept):
            return handle.kept
        self._finish_copies()
        self._streams.resume()
        self._bring(handle.saved)
        return handle.tensor()

    def _bring(self, saved: Saved) -> None:
        """Wait until the storage's bytes are on the device (steps 4 and 5 of its life)."""
        if self.memory.refused:
            raise self.memory.over_budget(self._offload, self.plan.of_step)
        if not saved.is_used:
            self.plan.note("use", saved, self.memory.waited_ms)
            if saved.host is not None:
                is_late = saved.place is StoragePlace.HOST
                self._asked_late += is_late
                self._asked_ahead += not is_late
        self._stay(saved)
        if saved.place is StoragePlace.HOST:
            if not self._make_room(saved.size_bytes, "backward"):
                self.memory.needed = self.memory.held + saved.size_bytes
                raise self.memory.over_budget(self._offload, self.plan.of_step)
            self._ask_back(saved)
        saved.is_used = True
        self._look_ahead(saved)
        while saved.place is StoragePlace.COMING:
            self._wait("backward", saved.size_bytes, lambda: saved.place is not StoragePlace.COMING)

    def _look_ahead(self, current: Saved) -> None:
        """Fetch the next storages as far as there is room; without a budget, those of a layer."""
        if self._ahead is None:
            away = [
                one
                for one in self._alive
                if one.place in (StoragePlace.HOST, StoragePlace.LEAVING) and not one.is_used
            ]
            away.sort(key=lambda one: (-self.plan.rank.get(one.number, 0), one.number))
            self._ahead = away
        layers = {current.layer}
        while self._ahead:
            saved = self._ahead[-1]
            if not self.memory.is_limited and saved.layer not in layers:
                if len(layers) > 1:
                    return
                layers.add(saved.layer)
            self._stay(saved)
            if saved.place is StoragePlace.HOST and saved.handles and not saved.is_used:
                if not self.memory.fits(saved.size_bytes):
                    return
                self._ask_back(saved)
            self._ahead.pop()

    def _make_room(self, size_bytes: int, where: Where) -> bool:
        """Wait for copies, drop device copies, or send storages; return False if none helps."""
        while not self.memory.fits(size_bytes):
            if self._streams.is_busy:
                self._wait(where, size_bytes, lambda: self.memory.fits(size_bytes))
            elif not (
                self._drop_a_copy()
                or self._send_another()
                or self._finish_copies()
                or self.memory.outlast_others(size_bytes, self.plan)
            ):
                return False
        return True

    def _drop_a_copy(self) -> bool:
        """Drop one fetched storage's device copy: a used one, else the one that is used last."""
        came = [one for one in self._alive if one.host is not None and one.device is not None]
        if not came:
            return False
        saved = min(came, key=lambda one: (not one.is_used, one.number))
        self._forget_bytes(saved)
        self._ahead = None
        self._finish_copies()
        return True

    def _send_another(self) -> bool:
        """Send the storage saved first, used last in backward; return False if none may leave."""
        if self.memory.budget < UNLIMITED:
            for saved in self._alive:
                if saved.place is StoragePlace.DEVICE and saved.may_leave and saved.host is None:
                    self._send(saved)
                    return True
        return False

    # -- places ----------------------------------------------------------------------------------

    def _send(self, saved: Saved) -> None:
        assert saved.device is not None
        on_host = self._on_host + saved.size_bytes
        if on_host > self._charged:
            self._charge(needed := -(-on_host // CHARGE_BYTES) * CHARGE_BYTES)
            self._charged = needed
        self._on_host = on_host
        self._host_peak = max(self._host_peak, on_host)
        saved.place = StoragePlace.LEAVING
        saved.copy = self._streams.submit(saved, saved.device, to_host=True)

    def _ask_back(self, saved: Saved) -> None:
        assert saved.host is not None
        self.memory.hold(saved.size_bytes)
        saved.place = StoragePlace.COMING
        saved.copy = self._streams.submit(saved, saved.host, to_host=False)

    def _stay(self, saved: Saved) -> None:
        """Cancel a copy to the host, so that the storage stays on the device."""
        if saved.place is StoragePlace.LEAVING:
            assert saved.copy is not None
            self._streams.cancel(saved.copy)
            self._on_host -= saved.size_bytes
            saved.copy, saved.place = None, StoragePlace.DEVICE

    def _forget_bytes(self, saved: Saved) -> None:
        """Drop the device copy; its bytes still count while autograd may compute with them."""
        assert saved.device is not None
        storage, saved.device = saved.device.untyped_storage(), None
        saved.place = StoragePlace.HOST
        if saved.is_used:
            saved.end = weakref.finalize(storage, self._bytes_ended.append, saved.size_bytes)
            saved.end.atexit = False
        else:
            self.memory.change(-saved.size_bytes)

    def _wait(self, where: Where, size_bytes: int, is_over: Callable[[], bool]) -> None:
        """Wait for a copy. If the wait is long, leave the device until ``is_over`` returns True.

        Leaving requires a step whose times are known.
        """
        gate, streams = self._gate, self._streams
        may_leave = gate.allows_copies and not (self.plan.measuring or gate.in_optimizer_step)
        is_long = size_bytes > WORTH_MS * streams.bytes_per_ms(to_host=where == "forward")
        if self.memory.tiles is None or not (may_leave and is_long):
            self.memory.waited_ms += streams.wait(where)
            self._finish_copies()
            return
        began_ms = now_ms()
        gate.leave("copies")
        try:
            while streams.is_busy and streams.wait_away():
                self._finish_copies()
                if is_over():
                    break
            self.away_ms += now_ms() - began_ms
        finally:
            gate.enter()
        streams.resume()
        self.memory.waited_ms += now_ms() - began_ms

    def _finish_copies(self) -> bool:
        """Process finished copies and dropped tensors; return True if there were any."""
        has_changed = False
        for copy in self._streams.take_ended():
            has_changed = True
            self._copied(copy, copy.of)
        while self._handles_ended:
            saved = self._handles_ended.popleft()
            saved.handles -= 1
            if not saved.handles:
                has_changed = True
                self._drop(saved)
        while self._bytes_ended:
            has_changed = True
            self.memory.change(-self._bytes_ended.popleft())
        return has_changed

    def _copied(self, copy: Copy, saved: Saved) -> None:
        if saved.place is StoragePlace.GONE:
            self.memory.change(-saved.size_bytes)
        elif copy is saved.copy:
            saved.copy = None
            if copy.error is not None:
                saved.place = StoragePlace.DEVICE if copy.to_host else StoragePlace.HOST
                self._on_host -= saved.size_bytes if copy.to_host else 0
                self.memory.change(-(0 if copy.to_host else saved.size_bytes))
                raise copy.error
            assert copy.target is not None
            if copy.to_host:
                self._moved += saved.size_bytes
                saved.host = copy.target
                self._forget_bytes(saved)
            else:
                saved.device = copy.target
                self._table.put(copy.target.untyped_storage(), saved)
                saved.place = StoragePlace.DEVICE

    def _drop(self, saved: Saved) -> None:
        """Release a storage that autograd has dropped."""
        self.plan.note("release", saved, self.memory.waited_ms)
        self._alive.pop(saved, None)
        copy, saved.copy = saved.copy, None
        if saved.host is not None or saved.place is StoragePlace.LEAVING:
            self._on_host -= saved.size_bytes
        if saved.place is StoragePlace.REFUSED:
            self.memory.refused -= saved.size_bytes
        elif copy is not None and not self._streams.cancel(copy):
            saved.place = StoragePlace.GONE
        elif saved.place is not StoragePlace.HOST:
            self.memory.change(-saved.size_bytes)
        if saved.end is not None and saved.end.detach():
            self.memory.change(-saved.size_bytes)  # the script still holds the bytes: not counted
        saved.host = saved.device = None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if strided bytes describe the tensor completely."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _may_be_copied(saved: Saved) -> bool:
    return saved.host is not None or (saved.copy is not None and saved.copy.is_begun)


def _is_as_saved(saved: Saved, tensor: torch.Tensor) -> bool:
    """Return True if the tensor, or another view of its root, was saved and not written since.

    torch cuts some pieces without recording them as views (``unsafe_chunk`` in recurrent cells).
    These pieces are written in place one after the other, and no version counter shows that.
    """
    one, now = root(tensor), version(tensor)
    return any(known() is one and now == then for known, then in saved.roots)


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, also those inside lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _tensors_in(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from _tensors_in(one)
