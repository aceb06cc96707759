"""Memory of a training job: a slice of the arena, and the place of each tensor in it.

    [state area | past phases | parameters | optimizer | buffer snapshot | gradients | buffers]
    |<------------------------- the commit image --------------------------->|

The image is one contiguous range, so a commit is one copy. It includes the gradients only if a
commit point has left-over gradients. Forward changes the live buffers, so the image has a snapshot
of the buffers. Rebinding keeps every Python object: identity, hooks and optimizers stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeswitch.base.errors import InvalidInput, OutOfDeviceMemory

from .objects import TrainedObjects
from .slice_layout import Area, SlicePlace, optimizer_state_bytes, padded_bytes, state_tensors
from .torch_private import Buffers, bytes_of_their_own, live_buffers


class TrainingSlice:
    """Slice of a job: created as a layout of sizes, then bound to leased memory by ``bind``."""

    def __init__(
        self,
        objects: TrainedObjects,
        state_bytes: int,
        past_bytes: int,
        optimizer_bytes: int | None = None,
    ) -> None:
        self.objects = objects
        parameters = padded_bytes(objects.parameters.values())
        buffers = padded_bytes(objects.buffers.values())
        if optimizer_bytes is None:
            optimizer_bytes = sum(map(optimizer_state_bytes, objects.optimizers.values()))
        self.state = Area("state (scheduler, extra_state, ...)", 0, state_bytes)
        self.past = Area("past phases", self.state.end_bytes, past_bytes)
        self.parameters = Area("parameters", self.past.end_bytes, parameters)
        self.optimizer = Area("optimizer state", self.parameters.end_bytes, optimizer_bytes)
        self.snapshot = Area("buffers", self.optimizer.end_bytes, buffers)
        self.gradients = Area("gradients", self.snapshot.end_bytes, parameters)
        self.buffers = Area("buffers", self.gradients.end_bytes, buffers)
        self.places: dict[str, SlicePlace] = {}  # in the image, without gradients
        self.gradient_places: dict[str, SlicePlace] = {}
        self._buffer_places: dict[str, SlicePlace] = {}
        self._homes: dict[tuple[str, int, Any], tuple[SlicePlace, torch.Tensor]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bound: dict[int, torch.Tensor] = {}  # offset -> tensor; replaced tensors are freed
        # Each buffer's name, its module's buffers, its key there, the tensor, and its address.
        self._live: list[tuple[str, Buffers, str, torch.Tensor | None, int]] = []
        for name, parameter in objects.parameters.items():
            self.places[name] = self.parameters.place(name, parameter)
            self.gradient_places[name] = self.gradients.place(f"{name}.grad", parameter)
        for name, buffer in objects.buffers.items():
            self.places[name] = self.snapshot.place(name, buffer)
            self._buffer_places[name] = self.buffers.place(name, buffer)

    @property
    def slice_bytes(self) -> int:
        """Number of bytes to lease."""
        return self.buffers.end_bytes

    @property
    def image_bytes(self) -> int:
        """Number of bytes of the largest commit image."""
        return self.gradients.end_bytes

    def bind(self, memory: torch.Tensor) -> None:
        """Move parameters, buffers and present optimizer state into ``memory`` (the lease)."""
        self._memory = memory
        for name, parameter in self.objects.parameters.items():
            self._move(parameter, self.places[name])
        for name, buffer in self.objects.buffers.items():
            self._move(buffer, self._buffer_places[name])
        buffers = self.objects.buffers
        self._live = [
            (name, live_buffers(module), key, one, 0 if one is None else one.data_ptr())
            for name, (module, key) in self.objects.owners.items()
            for one in (buffers.get(name),)
        ]
        self.adopt_optimizer_state()

    def unbind(self) -> None:
        """Move all tensors out of the slice into separate memory, before the lease ends."""
        with torch.no_grad():
            for tensor in self._bound.values():
                rebind(tensor, tensor.detach().clone())
        self._bound.clear()
        self._homes.clear()

    @torch.no_grad()
    def adopt_optimizer_state(self) -> bool:
        """Move new and replaced state tensors into the slice.

        Returns:
            True if the layout has new names.

        Raises:
            OutOfDeviceMemory: there is more state than the dry run predicted.
            InvalidInput: a state shares memory with another tensor, so it cannot be moved.
        """
        changed = False
        names = {id(p): name for name, p in self.objects.parameters.items()}
        placed: dict[int, SlicePlace] | None = None  # by tensor; built if there is one to adopt
        for whose, (at, one) in self._homes.items():
            if one is not self._memory and not self._is_home(one, at):
                self._refuse_shared_states()  # it was moved, perhaps to another one's place
                rebind(one, one.detach().clone())
                self._homes[whose] = at, self._memory
        for key, optimizer in self.objects.optimizers.items():
            for (parameter, state_key), tensor in state_tensors(optimizer):
                if not self.holds(tensor):
                    continue
                owner = (key, id(parameter), state_key)
                home = self._homes.get(owner)
                if home is not None and home[1] is tensor:
                    continue
                if home is not None and not home[0].fits(tensor):
                    raise OutOfDeviceMemory(f"optimizer {key}: state {state_key!r} changed shape")
                if placed is None:
                    self._refuse_shared_states()
                    placed = {id(one): place for place, one in self._homes.values()}
                place = placed.get(id(tensor))
                if place is not None:  # shared by two parameters, or two states were swapped
                    self._homes[owner] = (place, tensor)
                    continue
                if home is None or self._is_shared(owner, home[0]):
                    name = f"optimizer.{key}.state.{names[id(parameter)]}.{state_key}"
                    place = self.optimizer.place(name, tensor)
                    changed = True
                else:
                    place = home[0]
                self.places[place.name] = place
                before = self._bound.get(place.offset_bytes) if place.size_bytes else None
                if before is not None:  # it may be another state now, or the script's
                    rebind(before, before.detach().clone())
                    placed.pop(id(before), None)
                self._move(tensor, place)
                self._homes[owner] = (place, tensor)
                placed[id(tensor)] = place
        return changed

    def _refuse_shared_states(self) -> None:
        """Raise InvalidInput if a new state shares its storage, so that it cannot move alone."""
        start, states = self._memory.data_ptr(), dict[int, tuple[str, torch.Tensor]]()
        for key, optimizer in self.objects.optimizers.items():
            for number, ((_, name), one) in enumerate(state_tensors(optimizer)):
                if self.holds(one) and one.numel():
                    is_new = not 0 <= one.data_ptr() - start < self._memory.numel()
                    whole = one.new_empty(0).set_(one.untyped_storage()) if is_new else one
                    states[id(one)] = f"optimizer {key}: state {name!r} ({number})", whole
        self.objects.refuse_shared_memory(dict(states.values()))

    def _is_shared(self, owner: tuple[str, int, Any], place: SlicePlace) -> bool:
        """Return True if a state of another owner lies at the place."""
        return any(one is place and key != owner for key, (one, _) in self._homes.items())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a state tensor can lie in the slice: dense, and on the slice's device."""
        return tensor.device.type == self._memory.device.type and tensor.layout is torch.strided

    def home_of(self, optimizer: str, parameter: torch.Tensor, key: Any) -> SlicePlace | None:
        """Return the place of a state tensor, or None if it is not in the slice."""
        home = self._homes.get((optimizer, id(parameter), key))
        return None if home is None or home[1] is self._memory else home[0]

    def view(self, place: SlicePlace) -> torch.Tensor:
        """Return a tensor over a place; its storage has only the bytes of that place.

        So ``torch.save`` of a parameter does not write the whole arena.
        """
        if not place.size_bytes:
            return torch.empty(place.shape, dtype=place.dtype, device=self._memory.device)
        raw = self.bytes_at(place.offset_bytes, place.size_bytes)
        flat = raw.view(place.dtype)
        return flat.as_strided(place.shape, place.stride, flat.storage_offset())

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return a range of the slice as a uint8 tensor, without copying it."""
        if self._memory.device.type != "cpu":
            return bytes_of_their_own(self._memory, offset_bytes, size_bytes)
        part = self._memory[offset_bytes : offset_bytes + size_bytes]
        return torch.from_numpy(part.numpy())

    def gather_parameters(self) -> None:
        """Copy parameters that the script moved by ``parameter.data = …`` to their places.

        The parameter itself is not moved back, because other objects of the script may refer to it.
        Parameters that were exchanged are: each lies where another one is copied to.

        Raises:
            InvalidInput: a moved parameter has another shape or dtype.
        """
        moved = self._moved()
        addresses = {self.view(self.places[name]).data_ptr() for name, _ in moved}
        exchanged = {
            name: parameter.detach().clone()
            for name, parameter in moved
            if parameter.data_ptr() in addresses
        }
        for name, parameter in moved:
            place = self.places[name]
            if not place.fits(parameter):
                raise InvalidInput(
                    f"{name} was {place.dtype}{list(place.shape)} when the loop began and is "
                    f"{parameter.dtype}{list(parameter.shape)} now; cannot commit",
                    hint="change shapes between two job.epochs, not within",
                )
            with torch.no_grad():
                view = self.view(place)
                view.copy_(exchanged.get(name, parameter))
                if name in exchanged:
                    rebind(parameter, view)

    def bring_parameters_home(self) -> None:
        """Bind moved parameters to their places again, before their values are restored."""
        for name, parameter in self._moved():
            with torch.no_grad():
                rebind(parameter, self.view(self.places[name]))

    def _moved(self) -> list[tuple[str, nn.Parameter]]:
        start, places = self._memory.data_ptr(), self.places
        return [
            (name, one)
            for name, one in self.objects.parameters.items()
            if one.data_ptr() - start != places[name].offset_bytes
            and not self._is_home(one, places[name])
        ]

    def _is_home(self, tensor: torch.Tensor, place: SlicePlace) -> bool:
        """Return True if a tensor still lies in its place; ``tensor.data = …`` moves it."""
        at = tensor.data_ptr() - self._memory.data_ptr()
        return at == place.offset_bytes or not (place.size_bytes or tensor.numel())

    def sum_of_parameters(self) -> torch.Tensor:
        """Return a checksum, still on the device: it almost certainly changes if any bit of a
        parameter does. Reading it waits for the device."""
        used = self.bytes_at(self.parameters.offset_bytes, self.parameters.used_bytes)
        return used.view(torch.int64).sum() if used.numel() else torch.tensor(0)

    def snapshot_buffers(self) -> dict[str, torch.Tensor | None]:
        """Copy the live buffers to the snapshot, all at once, and then each replaced or moved one.

        Returns:
            Buffers without a place in the snapshot: None, or with another shape or dtype by now.
        """
        odd: dict[str, torch.Tensor | None] = {}
        size = self.snapshot.used_bytes
        if size:
            target = self.bytes_at(self.snapshot.offset_bytes, size)
            target.copy_(self.bytes_at(self.buffers.offset_bytes, size))
        for name, live, key, first, address in self._live:  # runs in each step: keep it fast
            now = live.get(key)
            if now is first and (first is None or first.data_ptr() == address):
                continue
            place = self.places.get(name)
            if now is None or place is None or not place.fits(now):
                odd[name] = now
            else:
                self.view(place).copy_(now)
        return odd

    def write(self, offset_bytes: int, raw: memoryview | bytes) -> None:
        """Copy bytes into the slice."""
        target = self.bytes_at(offset_bytes, len(raw))
        if target.device.type == "cpu":
            np.copyto(target.numpy(), np.frombuffer(raw, np.uint8))
        elif len(raw):
            target.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def restore_odd_buffers(self, odd: Mapping[str, torch.Tensor | None]) -> None:
        """Set the buffers that ``snapshot_buffers`` returned on their modules again."""
        for name, value in odd.items():
            module, key = self.objects.owners[name]
            setattr(module, key, None if value is None else value.to(self._memory.device))

    def restore_buffer(self, name: str, raw: memoryview) -> None:
        """Write a committed buffer to its place, and set it on its module if it was replaced."""
        module, key = self.objects.owners[name]
        first, place = self.objects.buffers[name], self._buffer_places[name]
        self.write(place.offset_bytes, raw)
        if not self._is_home(first, place):
            with torch.no_grad():
                rebind(first, self.view(place))
        if getattr(module, key, None) is not first:  # replaced since the loop began
            setattr(module, key, first)

    def _move(self, tensor: torch.Tensor, place: SlicePlace) -> None:
        with torch.no_grad():
            view = self.view(place)
            view.copy_(tensor)
            if place.size_bytes:
                rebind(tensor, view)
                self._bound[place.offset_bytes] = tensor


def rebind(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Make ``tensor``, as the same Python object, use the memory of ``memory``."""
    offset = int(memory.storage_offset())
    tensor.set_(memory.untyped_storage(), offset, memory.shape, memory.stride())
