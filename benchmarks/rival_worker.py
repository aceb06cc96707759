"""A worker process of ``rival.py``: it answers requests, or trains until it must terminate."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torchvision  # noqa: F401 - the fork server imports it once, for all workers
from torch import nn

from pipeswitch.devices.cpu.page_protection import MADV_POPULATE_READ
from pipeswitch.programs.interface.layout import TensorSpec
from pipeswitch.programs.running.executor import ModuleProgram
from pipeswitch.programs.running.tensor_views import bytes_over, tensor_over

from . import plain
from .lane import bytes_of, copy_in_pieces, open_mapping, packed
from .setting import Style
from .train_script import network
from .trials import Numbers, now_ms

ANNOUNCED_STEPS: Final = 2


class Terminated(Exception):
    """Request to terminate, raised by a leaf module's hook in the middle of a training step."""


class Termination:
    """Thread that waits for the order to terminate, and the flag that it sets for the hooks."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_asked = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def check(self) -> None:
        """Raise ``Terminated`` if ordered; called after each leaf module, with the device idle."""
        if self._is_asked.is_set():
            raise Terminated

    def acknowledge(self) -> None:
        """Report to the coordinator that the device is free."""
        self._is_asked.clear()
        self._pipe.send("terminated")

    def _listen(self) -> None:
        try:
            while True:
                self._pipe.recv()
                self._is_asked.set()
        except (EOFError, OSError):
            pass  # the coordinator has ended; the main thread notices it, too, and leaves


def main(
    order: plain.Order,
    style: Style,
    paths: tuple[str, str],
    work: Connection,
    stop: Connection,
    groups: Connection,
) -> None:
    """Serve until the coordinator closes the connection."""
    torch.set_num_threads(order["threads"])
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
    termination = Termination(stop)
    model = ServedModel(order, style, paths)
    work.send("ready")
    try:
        while True:
            verb, inputs = work.recv()
            if verb == "train":
                _train(work, termination)
                if style.workers != "one":  # with one worker, the request comes next on this pipe
                    work.send("clean")
            else:
                tensors = [torch.from_numpy(value) for value in inputs]
                outputs, numbers = model.run(tensors, groups)
                ended_at_ms = now_ms()
                work.send((plain.as_arrays(outputs), ended_at_ms, numbers))
    except EOFError:
        pass


def _train(work: Connection, termination: Termination) -> None:
    """Train from scratch until ordered to terminate; the return drops all references to tensors."""
    module, x, y = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    for leaf in module.modules():
        if next(leaf.children(), None) is None:
            leaf.register_forward_hook(lambda *_: termination.check())
            leaf.register_full_backward_hook(lambda *_: termination.check())
    step = 0
    try:
        while True:
            loss: Any = nn.functional.mse_loss(module(x), y)  # untyped in torch
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == ANNOUNCED_STEPS:
                work.send("training")
    except Terminated:
        termination.acknowledge()


class ServedModel:
    """The model's program, with its tensors in the arena, or newly allocated for each request."""

    def __init__(self, order: plain.Order, style: Style, paths: tuple[str, str]) -> None:
        self._style = style
        self._manifest, _ = packed(order["packed_path"])
        size_bytes = self._manifest.total_bytes
        store, arena = (open_mapping(path, size_bytes) for path in paths)
        for mapping in (store, arena):
            mapping.madvise(MADV_POPULATE_READ)
        self._store, self._arena = bytes_of(store), bytes_over(arena)
        self._program = ModuleProgram(self._manifest, plain.structure(order))
        self._bound = self._program.bind(self._over_arena)

    def run(
        self, inputs: list[torch.Tensor], groups: Connection
    ) -> tuple[list[torch.Tensor], Numbers]:
        """Wait and copy as the style requires, and compute; return outputs and times."""
        waited_ms = 0.0
        copy_ms = 0.0
        bound = self._bound
        before: Callable[[int], None] = _go_on
        began_ms = now_ms()
        if self._style.transfer == "tensors":
            bound = self._program.bind(self._made_anew)
            copy_ms = now_ms() - began_ms
        elif self._style.transfer == "whole":
            groups.recv()
            waited_ms = now_ms() - began_ms
        else:

            def before(index: int) -> None:
                nonlocal waited_ms
                blocked_at_ms = now_ms()
                groups.recv()
                waited_ms += now_ms() - blocked_at_ms

        outputs = bound.run(inputs, before)
        compute_ms = now_ms() - began_ms - waited_ms - copy_ms
        return outputs, {"compute_ms": compute_ms, "stall_ms": waited_ms, "copy_ms": copy_ms}

    def _over_arena(self, spec: TensorSpec) -> torch.Tensor:
        return tensor_over(self._arena, spec, 0)

    def _made_anew(self, spec: TensorSpec) -> torch.Tensor:
        """Allocate memory for one tensor and copy it from the store, like ``.to(device)``."""
        tensor = torch.empty(spec.size_bytes, dtype=torch.uint8)
        end = spec.offset_bytes + spec.size_bytes
        copy_in_pieces(self._store[spec.offset_bytes : end], tensor.numpy(), 0, len(tensor))
        return tensor.view(getattr(torch, spec.dtype)).view(spec.shape)


def _go_on(index: int) -> None:
    """Continue without waiting, because all groups have arrived."""
