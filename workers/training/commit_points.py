"""Commit points and commit images of a training job (ADR 8; invariant I2).

A *point* is the state between two steps. Small state is copied when the point is captured (random
generators, options, data position, buffers). Large tensors (parameters, optimizer state, left-over
gradients) are only watched, because they do not change before the next ``optimizer.step()``. So a
point can still be committed exactly in the middle of the next forward or backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput, OutOfDeviceMemory
from pipeswitch.commits.image import HEADER_BYTES, dump_json, pack_header
from pipeswitch.programs.interface.layout import aligned

from .host import JobHost
from .objects import TrainedObjects, add_groups, load_options, options_of
from .randomness import RandomState
from .script_cursor import BEGINNING, PAST, CursorPosition, Order, SavedImage
from .slice import TrainingSlice
from .slice_layout import history_bytes, sparse_gradient_bytes, state_tensors
from .snapshot import Captured, DataState, captured, order_mark
from .torch_private import mark_optimizer_called, optimizer_was_called, version

SPARE_STATE_BYTES: Final = 256 << 10  # random generators, the JSON, and room for growth
JSON_NAMES: Final = 16  # maximum times that the JSON names a parameter (as a tensor, an owner)


@dataclass
class Older:
    """Earlier images in the last commit: an epoch's beginning, and the ends of its loops (ADR 65).
    If the next commit needs them, too, the daemon copies them from the last one."""

    orders: list[Order] = field(default_factory=list)
    own_bytes: int = 0
    older_bytes: int = 0
    last: Order | None = None  # the last commit, if it is such an image itself

    @classmethod
    def of(cls, saved: SavedImage) -> Older:
        last = saved.position.order if saved.position.loop == BEGINNING else None
        return cls([*saved.older][::-1], saved.own_bytes, saved.older_bytes, last)

    def range_for(self, position: CursorPosition) -> tuple[int, int] | None:
        """Return the range of the last commit with all that a commit needs; None if it has not."""
        if position.needs and position.needs == self.orders:
            return self.own_bytes, self.older_bytes
        is_there = self.last is not None and position.needs == [*self.orders, self.last]
        return (0, self.own_bytes + self.older_bytes) if is_there else None


@dataclass
class Point:
    """One captured commit point."""

    position: CursorPosition
    random: RandomState
    data: DataState
    entry: Mapping[str, Any]  # states at the start of script, epoch and loop, for ``state_codec``
    options: Captured  # optimizers' groups, schedulers, extra_state
    marks: list[tuple[int, bool]]  # version and requires_grad of each parameter
    training: bytes  # training flag of each module
    gradients: list[tuple[str, torch.Tensor, int]]  # left-over gradients with versions
    gradients_copied: bool
    sparse_gradients: Mapping[str, torch.Tensor]  # copies of left-over gradients


class Committer:
    """Capture of one slice's commit points, and writing and restoring of their images.

    Args:
        room_bytes: size of the largest commit that fits in the commit area.
    """

    def __init__(
        self, host: JobHost, layout: TrainingSlice, past: Mapping[int, bytes], room_bytes: int
    ) -> None:
        self._host, device = host, host.device
        self._layout, self.room_bytes, self.older = layout, room_bytes, Older()
        self._objects = layout.objects
        self._device = device
        self._past: dict[str, dict[str, int]] = {}
        self._copies_gradients = False
        self._states = 0  # number of parameters with a state
        self._in_flight: Point | None = None
        self._tensors_json = b""
        self._other_bytes = 0  # size of the state area's contents except the options
        self.committed: Point | None = None
        self.last_duration_ms = 0.0
        for phase, image in past.items():
            offset = layout.past.offset_bytes + layout.past.used_bytes
            layout.past.used_bytes += aligned(len(image), 64)
            layout.write(offset, image)
            self._past[f"{PAST}{phase}"] = {"offset": offset, "size": len(image)}

    # --------------------------------------------------------------------------- points

    def capture(
        self,
        position: CursorPosition,
        data: DataState,
        entry: Mapping[str, Any],
        last: Point | None,
    ) -> Point:
        """Return the current state as a commit point.

        Args:
            last: the previous point; its options are used again if they are unchanged.
        """
        if last is not None and not self._copies_gradients:
            # A script that zeroes or accumulates in place destroys left-over gradients before a
            # commit in mid-step. Once that was seen, each point copies them.
            self._copies_gradients = not _are_intact(last.gradients)
        states = sum(len(one.state) for one in self._objects.optimizers.values())
        if self._states != states:  # ``begin`` moves later state into the slice
            self._states = states
            self._adopt()
        self._layout.gather_parameters()
        odd_buffers = self._layout.snapshot_buffers()
        parameters = self._objects.parameters
        gradients = [
            (n, p.grad, version(p.grad))
            for n, p in parameters.items()
            if p.grad is not None and not p.grad.is_sparse
        ]
        sparse = {
            n: p.grad.coalesce().clone()
            for n, p in parameters.items()
            if p.grad is not None and p.grad.is_sparse
        }
        if self._copies_gradients:
            self._copy_gradients(gradients)
        return Point(
            position,
            RandomState(self._device),
            data,
            entry,
            captured(
                options_of(self._objects, odd_buffers), None if last is None else last.options
            ),
            [(version(p), p.requires_grad) for p in parameters.values()],
            bytes([module.training for module in self._objects.modules]),
            gradients,
            self._copies_gradients,
            sparse,
        )

    def parameters_are_intact(self, point: Point) -> bool:
        """Return True if no parameter was written after the point, except through ``.data``."""
        parameters = self._objects.parameters.values()
        return all(version(p) == mark[0] for p, mark in zip(parameters, point.marks, strict=True))

    def checksum(self, point: Point) -> torch.Tensor:
        """Return a sum over parameters and watched ``extra_state``; it also shows writes that no
        version counter shows."""
        return self._layout.sum_of_parameters() + point.options.checksum()

    def state_marks(self) -> list[tuple[Any, ...]]:
        """Return each optimizer state by owner, with marks that a write or a move changes."""
        return [
            (key, id(owner), name, id(tensor), version(tensor), tensor.data_ptr())
            for key, optimizer in self._objects.optimizers.items()
            for (owner, name), tensor in state_tensors(optimizer)
            if tensor.layout is torch.strided
        ]

    def is_intact(self, point: Point) -> bool:
        """Return True if the point can still be committed exactly."""
        return (
            self.parameters_are_intact(point)
            and point.options.is_intact()
            and (point.gradients_copied or _are_intact(point.gradients))
        )

    # --------------------------------------------------------------------------- committing

    def outgrown_bytes(self, point: Point) -> int:
        """Return the bytes of state area that this point needs if the area is too small, else 0."""
        needed_bytes = point.options.size_bytes + self._other_bytes
        return needed_bytes if needed_bytes > self._layout.state.capacity_bytes else 0

    def sizes(self, point: Point) -> tuple[int, int]:
        """Return the bytes of the point's image, and of the earlier images that it needs."""
        area = self._layout.gradients if point.gradients else self._layout.snapshot
        return area.end_bytes, (self.older.range_for(point.position) or (0, 0))[1]

    def has_needed(self, point: Point) -> bool:
        """Return True if a commit of the point would have the earlier images that it needs."""
        has_any = not point.position.needs or self.older.range_for(point.position) is not None
        return has_any and sum(self.sizes(point)) <= self.room_bytes

    def end_loop(self, point: Point | None) -> None:
        """Record that the point is at the end of its loop: later commits may need it."""
        if point is not None and self.committed is point:
            self.older.last = point.position.order

    def begin(self, point: Point) -> None:
        """Write the image's header and state, and start the copy. The point must be intact, and no
        commit may be under way.

        Raises:
            OutOfDeviceMemory: the state outgrew its area.
            InvalidInput: the models' structure has changed since the loop began.
        """
        self._objects.refuse_other_structure()
        self._adopt()
        if point.gradients and not point.gradients_copied:
            self._copy_gradients(point.gradients)
        size, position = self.sizes(point)[0], point.position
        older = self.older.range_for(position) if self.has_needed(point) else None
        self._write_head(point, size)
        self._in_flight = point
        self._host.begin_commit(position.step, [(0, size)], older)
        self.older = Older(position.needs if older else [], size, older[1] if older else 0)
        if position.loop == BEGINNING:
            self.older.last = position.order

    def finish(self, *, only_read: bool = False) -> bool:
        """Wait for the commit under way, or until it has read the slice; return True if none is
        under way any more. Raise PipeSwitchError if it failed."""
        if self._in_flight is not None:
            point, self._in_flight = self._in_flight, None
            older, self.older = self.older, Older()  # of no commit, if this one failed
            took_ms = self._host.wait_commit(only_read=only_read)
            self.older = older
            if took_ms is None:
                self._in_flight = point
                return False
            self.last_duration_ms, self.committed = took_ms, point
        return True

    @property
    def is_in_flight(self) -> bool:
        """True if a commit was begun and has not been waited for."""
        return self._in_flight is not None

    def _adopt(self) -> None:
        if self._layout.adopt_optimizer_state():
            self._tensors_json = b""

    def _copy_gradients(self, gradients: list[tuple[str, torch.Tensor, int]]) -> None:
        for name, gradient, _ in gradients:
            self._layout.view(self._layout.gradient_places[name]).copy_(gradient)

    def _write_head(self, point: Point, image_bytes: int) -> None:
        state, attachments = state_codec.encode(self._values(point))
        blobs: dict[str, dict[str, int]] = {}
        offset = HEADER_BYTES
        parts = {"state": [a.read() for a in attachments], "options": point.options.read()}
        for kind, contents in parts.items():
            for index, raw in enumerate(contents):
                end = aligned(offset + len(raw), 16)
                self._refuse_growth(point, end)
                self._layout.write(offset, raw)
                blobs[f"{kind}/{index}"] = {"offset": offset, "size": len(raw)}
                offset = end
        meta = {
            **vars(point.position),
            "state": state,
            "state_blobs": [name for name in blobs if name.startswith("state/")],
            "options": point.options.data,
            "options_blobs": [name for name in blobs if name.startswith("options/")],
        }
        tail = dump_json({"blobs": {**blobs, **self._past}, "meta": meta})
        document = b'{"tensors":' + self._tensors(point) + b"," + tail[1:]
        self._refuse_growth(point, offset + len(document))
        self._layout.write(offset, document)
        self._layout.write(0, pack_header(document, offset, image_bytes))

    def _tensors(self, point: Point) -> bytes:
        """Return the entries of the tensors as JSON, cached for points without gradients."""
        if point.gradients:
            places = self._layout.gradient_places
            names = [name for name, *_ in point.gradients]
            more = {places[name].name: places[name].entry() for name in names}
            base = {name: place.entry() for name, place in self._layout.places.items()}
            return dump_json({**base, **more})
        if not self._tensors_json:
            base = {name: place.entry() for name, place in self._layout.places.items()}
            self._tensors_json = dump_json(base)
        return self._tensors_json

    def _refuse_growth(self, point: Point, needed_bytes: int) -> None:
        self._other_bytes = max(0, needed_bytes - point.options.size_bytes)
        if needed_bytes > self._layout.state.capacity_bytes:
            raise OutOfDeviceMemory(
                "the state that is not in tensors (of optimizers, schedulers and extra_state) grew "
                f"to {needed_bytes} bytes; {self._layout.state.capacity_bytes} are reserved",
                hint="keep logs and histories out of extra_state; for LBFGS lower history_size",
                requested_bytes=needed_bytes,
            )

    def _values(self, point: Point) -> dict[str, Any]:
        return {
            "position": tuple(vars(point.position).values()),
            "random": point.random.values(),
            "data": (point.data.generators, point.data.own, point.data.workers),
            "drawn": order_mark(point.data.drawn),
            "proof": None if point.data.proof is None else point.data.proof.values(),
            **point.entry,
            "requires_grad": bytes(mark[1] for mark in point.marks),
            "training": point.training,
            "gradients": [name for name, *_ in point.gradients],
            "sparse_gradients": {
                name: (gradient.indices(), gradient.values(), tuple(gradient.shape))
                for name, gradient in point.sparse_gradients.items()
            },
            "optimizers": {k: self._optimizer_values(k) for k in self._objects.optimizers},
            "state_capacity": self._layout.state.capacity_bytes,
        }

    def _optimizer_values(self, key: str) -> dict[str, Any]:
        """Return an optimizer's state by parameter; a tensor in the slice appears as its name."""
        optimizer = self._objects.optimizers[key]
        names = {id(p): name for name, p in self._objects.parameters.items()}
        entries: list[Any] = []
        for owner, state in optimizer.state.items():
            if id(owner) not in names:
                raise InvalidInput(f"optimizer {key!r} has state for {type(owner).__name__}")
            for state_key, value in state.items():
                home = None
                if isinstance(value, torch.Tensor):
                    home = self._layout.home_of(key, owner, state_key)
                owner_name = names[id(owner)]
                if home is None:
                    entries.append((owner_name, state_key, None, value))
                else:
                    entries.append((owner_name, state_key, home.name, None))
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        return {"called": optimizer_was_called(optimizer), "entries": entries, "groups": groups}

    # --------------------------------------------------------------------------- restoring

    def restore(self, saved: SavedImage) -> None:
        """Restore parameters, buffers, gradients, optimizers, schedulers and extra_state.

        Raises:
            InvalidInput: the image has other models or optimizers, because the script has changed.
        """
        self.finish()
        self._restore_tensors(saved)
        groups = {key: one.get("groups", ()) for key, one in saved.values["optimizers"].items()}
        add_groups(self._objects, saved.options["groups"], groups)
        load_options(self._objects, saved.options)
        for key, optimizer in self._objects.optimizers.items():
            self._restore_optimizer(saved, key, optimizer)
        self._layout.adopt_optimizer_state()
        self._tensors_json = b""
        flags = zip(self._objects.parameters.values(), saved.values["requires_grad"], strict=True)
        for parameter, flag in flags:
            parameter.requires_grad_(bool(flag))
        for module, flag in zip(self._objects.modules, saved.values["training"], strict=True):
            module.training = bool(flag)

    def _restore_tensors(self, saved: SavedImage) -> None:
        layout, objects = self._layout, self._objects
        layout.bring_parameters_home()
        stored = saved.content["tensors"]
        for name in (*objects.parameters, *objects.buffers):
            place = layout.places[name]
            entry = stored.get(name, {})
            if {**entry, "offset": 0} != {**place.entry(), "offset": 0}:
                raise InvalidInput(
                    f"{name}: the commit has {entry.get('dtype')}{entry.get('shape')}, the script "
                    f"makes {place.dtype}{list(place.shape)}: the script has changed"
                )
            if name in objects.buffers:
                layout.restore_buffer(name, saved.blob(name))
            else:
                layout.write(place.offset_bytes, saved.blob(name))
        present = set(saved.values["gradients"])
        for name, parameter in objects.parameters.items():
            parameter.grad = None
            if name in present:
                place = layout.gradient_places[name]
                layout.write(place.offset_bytes, saved.blob(place.name))
                parameter.grad = torch.empty_like(parameter).copy_(layout.view(place))
        for name, (indices, values, shape) in saved.values["sparse_gradients"].items():
            gradient = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
            objects.parameters[name].grad = gradient.to(objects.parameters[name].device)
        layout.restore_odd_buffers(saved.options["odd_buffers"])

    def _restore_optimizer(
        self, saved: SavedImage, key: str, optimizer: torch.optim.Optimizer
    ) -> None:
        if key not in saved.values["optimizers"]:
            raise InvalidInput(f"the commit has no optimizer {key!r}: the script has changed")
        stored = saved.values["optimizers"][key]
        if stored["called"]:
            mark_optimizer_called(optimizer)
        optimizer.state.clear()
        tensors: dict[str, torch.Tensor] = {}  # two parameters may share one
        for owner, state_key, tensor_name, value in stored["entries"]:
            parameter = self._objects.parameters[owner]
            if tensor_name is not None:
                if tensor_name not in tensors:
                    tensors[tensor_name] = _tensor_from(saved, tensor_name, parameter.device)
                value = tensors[tensor_name]
            optimizer.state[parameter][state_key] = value


def state_area_bytes(objects: TrainedObjects, before: int) -> int:
    """Return the state area's size: the present need, a quarter more, LBFGS's history, a reserve.

    Args:
        before: the size in an earlier run of the script; the area never shrinks.
    """
    options = Captured(options_of(objects))
    tensors = 4 * len(objects.parameters) + len(objects.buffers)
    now = len(str(options.data)) + sum(len(part) for part in options.read()) + 400 * tensors
    now += JSON_NAMES * sum(map(len, objects.parameters))
    history = sum(map(history_bytes, objects.optimizers.values()))
    history += sparse_gradient_bytes(objects.modules)
    return max(before, now + now // 4 + history + SPARE_STATE_BYTES)


def _are_intact(gradients: list[tuple[str, torch.Tensor, int]]) -> bool:
    return all(version(gradient) == mark for _, gradient, mark in gradients)


def _tensor_from(saved: SavedImage, name: str, device: torch.device) -> torch.Tensor:
    entry = saved.content["tensors"][name]
    if entry["dtype"] not in state_codec.TORCH_DTYPES:
        raise InvalidInput(f"{name}: unknown dtype {entry['dtype']!r}")
    dtype = getattr(torch, entry["dtype"])
    raw = bytearray(saved.blob(name))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.as_strided(entry["shape"], entry["stride"]).to(device)
