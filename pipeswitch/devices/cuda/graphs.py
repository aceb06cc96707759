"""A program on the cuda device: it copies inputs in, and runs groups eagerly or as CUDA graphs.

There is one graph for each layer group (ADR 13). The waits for fences stay between the replays, so
a group still starts when it has arrived, and no Python runs per layer. Graphs are captured after
the first eager run of their input shapes, when the answer has been sent. By then every kernel is
loaded and every workspace is allocated, and a capture computes nothing. A graph is valid for one
address of the weights, so weights at another address need a new ``DeviceProgram``. A step of a
language model is one graph, which reads and writes the cache where it is.

The driver memory of each capture is measured. Above the budget the least recently used shapes run
eagerly again. Shapes whose capture fails stay eager, and the cause is logged once.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from ...ipc.messages.worker import Shapes
from ...programs.graphs.indices import check_indices, index_limits
from ...programs.running.executor import BeforeGroup, BoundGraph, BoundProgram
from .bindings import CudaError

if TYPE_CHECKING:
    from .capture import CudaRecorder, Replayable

log = logging.getLogger(__name__)

IMPROVE_S: Final = 1.0  # meanwhile this worker takes no request
GRAPH_BYTES: Final = 256 << 10  # the driver's memory of a graph: 34 took 4 to 8 MB on an H200

Then = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Step = tuple[Sequence[torch.Tensor], Then | None]  # inputs used where they are, and ``then``


class GraphBudget:
    """Limit of the driver memory that all captured graphs of one worker use."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._held: OrderedDict[tuple[int, Shapes], tuple[int, Callable[[], object]]] = (
            OrderedDict()
        )

    def add(self, key: tuple[int, Shapes], size_bytes: int, drop: Callable[[], object]) -> None:
        """Add captured shapes; drop the least recently used ones until the rest fits."""
        self._held[key] = (size_bytes, drop)
        self.used_bytes += size_bytes
        while self.used_bytes > self.limit_bytes and self._held:
            oldest = next(iter(self._held))
            log.info("graphs=dropped bytes=%d of=%d", self._held[oldest][0], self.limit_bytes)
            self._held[oldest][1]()
            self.remove(oldest)

    def touch(self, key: tuple[int, Shapes]) -> None:
        """Mark these shapes as the most recently used."""
        self._held.move_to_end(key)

    def remove(self, key: tuple[int, Shapes]) -> None:
        """Remove these shapes from the list, and their bytes from the sum."""
        size_bytes, _ = self._held.pop(key, (0, None))
        self.used_bytes -= size_bytes


@dataclass(frozen=True)
class _Captured:
    inputs: list[torch.Tensor]
    graphs: dict[int, Replayable]  # index of a graph's last group -> graph
    outputs: list[torch.Tensor]


class DeviceProgram:
    """A bound program (see ``BoundProgram``) whose inputs come from host memory.

    Used by the worker's main thread, inside ``CudaTorch.computing``.
    """

    def __init__(
        self, bound: BoundProgram, device: str, recorder: CudaRecorder | None, budget: GraphBudget
    ) -> None:
        self.manifest = bound.manifest
        self._bound = bound
        self._device = device
        self._recorder = recorder if isinstance(bound, BoundGraph) else None
        self.limits: dict[int, int] = {}  # see ``index_limits``
        if isinstance(bound, BoundGraph):
            self.limits = index_limits(bound.graph, bound.manifest.tensors)
        self._budget = budget
        self._captured: dict[Shapes, _Captured] = {}
        self._wanted: dict[Shapes, Step] = {}  # shapes that ran eagerly, oldest first
        self._refused: set[Shapes] = set()
        # A graph program keeps nothing between two runs; a module may cache tensors.
        self.may_use_slice = isinstance(bound, BoundGraph)
        # A replay loads no kernel and allocates nothing, so the device itself may wait for a fence.
        self.is_replaying = False

    def run(
        self, inputs: Sequence[torch.Tensor], before_group: BeforeGroup, then: Then | None = None
    ) -> list[torch.Tensor]:
        """Implement ``BoundProgram.run``; return when all work is enqueued, not when it has run.

        The inputs must stay unchanged until it has run. The next replay overwrites the outputs.

        With ``then``, the inputs are on this device and in range, and its result is returned. It
        reads only outputs and inputs, and may change the inputs. One graph contains all that, so
        its replay waits for all groups.

        Raises:
            InvalidInput: an index is out of its table's range; nothing was enqueued.
        """
        if then is None:
            check_indices(self.limits, self.manifest.inputs, inputs)
        shapes = _shapes(inputs, are_here=then is not None)
        captured = self._captured.get(shapes)
        self.is_replaying = captured is not None
        if captured is None:
            moved = [value.to(self._device, non_blocking=True) for value in inputs]
            outputs = self._bound.run(moved, before_group)
            if self._recorder is not None and shapes not in self._refused:
                # Each operator's contract has held for these shapes.
                self._wanted[shapes] = ([] if then is None else inputs, then)
            with torch.inference_mode():
                return outputs if then is None else then(outputs)
        self._budget.touch((id(self), shapes))
        with torch.inference_mode():
            for place, value in zip(captured.inputs, inputs, strict=False):
                place.copy_(value, non_blocking=True)
        for index in range(len(self.manifest.groups)):
            before_group(index)
            if (graph := captured.graphs.get(index)) is not None:
                graph.replay()
        return captured.outputs

    @property
    def is_capture_wanted(self) -> bool:
        """True if shapes ran eagerly that could be captured."""
        return bool(self._wanted)

    def improve(self, *more: Shapes) -> tuple[Shapes, ...]:
        """Capture shapes that ran eagerly, here or (``more``) with other weights, newest first;
        return those captured that other processes can capture, too. Block for up to
        ``IMPROVE_S`` and one capture.

        Call it inside ``CudaTorch.computing(in_slice=False)``, because torch cannot capture into
        a pool that is in use.
        """
        ends_at_s, tried = time.monotonic() + IMPROVE_S, list[Shapes]()
        self._wanted |= dict.fromkeys(set(more) - self._refused, ([], None))
        while self._wanted and self._recorder is not None:
            shapes, step = self._wanted.popitem()
            tried += [shapes] if step[1] is None else []
            if shapes not in self._captured:
                self._improve(shapes, step, self._recorder)
            if time.monotonic() > ends_at_s:
                break
        return tuple([shapes for shapes in tried if shapes in self._captured])

    def _improve(self, shapes: Shapes, step: Step, recorder: CudaRecorder) -> None:
        assert isinstance(self._bound, BoundGraph)
        if not self._bound.is_tried(tuple(shape for _, shape, _ in shapes)):
            return  # the contracts' result was dropped, and a capture does not check contracts
        try:
            captured, cost = self._capture(self._bound, shapes, step, recorder)
        except CudaError:  # sticky: this process is replaced
            raise
        except Exception as error:  # these shapes run eagerly
            log.warning("graphs=refused shapes=%s cause=%s", shapes, error)
            self._refused.add(shapes)
            return
        if cost > self._budget.limit_bytes:
            log.warning("graphs=too-large bytes=%d budget=%d", cost, self._budget.limit_bytes)
            self._refused.add(shapes)
            return
        self._captured[shapes] = captured
        self._budget.add((id(self), shapes), cost, partial(self._captured.pop, shapes))
        log.info("graphs=captured count=%d bytes=%d", len(captured.graphs), cost)

    def close(self) -> None:
        """Free all captured graphs, because the weights have moved or the program is not needed."""
        for shapes in self._captured:
            self._budget.remove((id(self), shapes))
        self._captured.clear()

    def _capture(
        self, bound: BoundGraph, shapes: Shapes, step: Step, recorder: CudaRecorder
    ) -> tuple[_Captured, int]:
        """Capture graphs; return them with their cost in bytes.

        The cost is torch's reserved bytes plus the driver's, which are capped, because other
        processes allocate at the same time. Each counts ``GRAPH_BYTES`` or more:
        this limits their number.
        """
        free, reserved = recorder.memory_bytes()
        (inputs, then), end, outputs = step, len(self.manifest.groups), list[torch.Tensor]()
        with recorder.session(), torch.inference_mode():
            copies = [
                torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
                for dtype, shape, _ in shapes
                if then is None
            ]
            environment = bound.start(copies or inputs)

            def compute(groups: range) -> None:
                for index in groups:
                    bound.run_group(index, environment)
                if groups.stop == end:
                    results = bound.finish(environment)
                    outputs.extend(results if then is None else then(results))

            parts = [range(end)] if then else [range(one, one + 1) for one in range(end)]
            graphs = {part[-1]: recorder.record(partial(compute, part)) for part in parts}
        free_now, reserved_now = recorder.memory_bytes()
        own = reserved_now - reserved
        driver_bytes = min(max(0, free - free_now - own), GRAPH_BYTES * end)
        return _Captured(copies, graphs, outputs), max(own + driver_bytes, GRAPH_BYTES)


def _shapes(inputs: Sequence[torch.Tensor], *, are_here: bool = False) -> Shapes:
    places = [(v.data_ptr(), *v.stride()) if are_here else () for v in inputs]
    pairs = zip(inputs, places, strict=True)
    return tuple((str(v.dtype).removeprefix("torch."), tuple(v.shape), at) for v, at in pairs)
