"""Baselines of the GPU switch benchmark: plain PyTorch in one process that reads requests as lines.

Arms: ``ready-eager`` and ``ready-graph`` have the model on the device; ``serial`` copies all
weights from pinned memory, then computes (PipeSwitch without the pipeline); ``to-device`` calls
``module.to`` on ordinary memory. As for a request to a server, each trial begins with the input in
host memory and ends with the output in host memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from .gpu_common import is_fake, now_ms
from .trials import say


class Arms:
    """One model, with four ways to answer a request."""

    def __init__(self, order: dict[str, Any]) -> None:
        import numpy as np
        import torch

        from . import child, plain

        self.torch = torch
        self.device = "cpu" if is_fake() else "cuda"
        self.module = plain.load(order).module.eval()
        child.save_tensors(self.module, order["weights_path"])
        with np.load(order["inputs_path"]) as arrays:
            self.batches = {
                batch: [self._pinned(torch.from_numpy(arrays[n][:batch])) for n in arrays.files]
                for batch in order["batches"]
            }
        self.stream = None if is_fake() else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.resident = deepcopy(self.module).to(self.device)
        self.graphs: dict[int, tuple[Any, list[Any], Any]] = {}
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.host_weights = [self._pinned(tensor.detach()) for tensor in tensors]
        landing = deepcopy(self.module).to(self.device)
        self.landing_module = landing
        self.landing = [*landing.parameters(), *landing.buffers()]

    def _pinned(self, tensor: Any) -> Any:
        return tensor.contiguous() if is_fake() else tensor.contiguous().pin_memory()

    def _timed(self, run: Callable[[], Any]) -> dict[str, float]:
        torch = self.torch
        if self.stream is not None:
            torch.cuda.synchronize()
        with torch.inference_mode():
            began_ms = now_ms()
            checksum, scale = sums(run())
            return {"total_ms": now_ms() - began_ms, "checksum": checksum, "scale": scale}

    def _inputs(self, batch: int) -> list[Any]:
        return [value.to(self.device, non_blocking=True) for value in self.batches[batch]]

    def ready_eager(self, batch: int) -> dict[str, float]:
        return self._timed(lambda: self.resident(*self._inputs(batch)))

    def ready_graph(self, batch: int) -> dict[str, float]:
        if self.stream is None:
            return self.ready_eager(batch)
        if batch not in self.graphs:
            self.graphs[batch] = self._capture(batch)
        graph, places, output = self.graphs[batch]

        def run() -> Any:
            for place, value in zip(places, self.batches[batch], strict=True):
                place.copy_(value, non_blocking=True)
            graph.replay()
            return output

        return self._timed(run)

    def _capture(self, batch: int) -> tuple[Any, list[Any], Any]:
        torch = self.torch
        places = self._inputs(batch)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(3):
                self.resident(*places)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                output = self.resident(*places)
        return graph, places, output

    def serial(self, batch: int) -> dict[str, float]:
        def run() -> Any:
            for place, value in zip(self.landing, self.host_weights, strict=True):
                place.copy_(value, non_blocking=True)
            if self.stream is not None:
                self.torch.cuda.current_stream().synchronize()
            return self.landing_module(*self._inputs(batch))

        return self._timed(run)

    def to_device(self, batch: int) -> dict[str, float]:
        module = deepcopy(self.module)  # not timed: the arm starts with the module in host memory
        return self._timed(lambda: module.to(self.device)(*self._inputs(batch)))


def answer(order: dict[str, Any]) -> None:
    """Read lines ``arm batch``; for each, run the arm and print its times as one JSON line."""
    arms = Arms(order)
    calls = {
        "ready-eager": arms.ready_eager,
        "ready-graph": arms.ready_graph,
        "serial": arms.serial,
        "to-device": arms.to_device,
    }
    say(ready=True)
    for line in sys.stdin:
        arm, batch = line.split()
        try:
            say(**calls[arm](int(batch)))
        except RuntimeError as error:
            say(error=f"{type(error).__name__}: {error}"[:300])


def sums(output: Any) -> tuple[float, float]:
    """Copy the output to the host, as for a request; return sums of its values and magnitudes."""
    value = output
    while not hasattr(value, "double"):
        value = value[0] if isinstance(value, tuple | list) else next(iter(value.values()))
    on_host = value.cpu().double()
    return float(on_host.sum()), float(on_host.abs().sum())


if __name__ == "__main__":
    answer(json.loads(sys.argv[2]))
