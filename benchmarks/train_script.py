"""Training script of the benchmarks, which runs as a plain process and as a job.

``python -m benchmarks.train_script`` starts a plain process. A job's entry is
``benchmarks.train_script:main``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pipeswitch import job
from pipeswitch.devices.worker_device import Pacer

WIDTH: Final = 512
LAYERS: Final = 4
BATCH: Final = 256
REPLAYS: Final = 20  # of a step as a CUDA graph


def main() -> None:
    """Train on random data; write the times at which steps begin and end to ``--record``."""
    options = _options()
    torch.set_num_threads(options.threads)
    time.sleep(options.load_s)  # what a script does that loads its data
    device = options.device or job.device
    sizes = options.width, options.layers, options.batch, options.frozen_mib
    parts = resnet50() if options.resnet50 else network(*sizes)
    model, x, y = parts[0].to(device), parts[1].to(device), parts[2].to(device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-4)
    gaps = Gaps(model) if options.gaps else None
    instants_ms: list[float] = []
    cpu_ms: list[float] = []  # this thread's CPU time, which a busy machine changes little
    waits: list[tuple[int, float]] = []  # how often and long the limit on run-ahead has waited
    pacer = Pacer.current or Pacer()
    per_epoch = options.steps or 1000
    turns = Turns(options.turns, device) if options.turns else None
    for _ in job.epochs(1 if options.steps else 1_000_000):
        for number, (inputs, targets) in enumerate(
            job.steps([(x, y)] * per_epoch, model=model, optimizer=optimizer)
        ):
            if options.record:
                if number == options.warm_up:
                    _synchronize(device)
                instants_ms.append(time.monotonic() * 1000)
                cpu_ms.append(time.thread_time() * 1000)
                waits.append((pacer.waits, pacer.waited_ms))
            if options.live:
                with open(options.live, "a") as file:
                    file.write(f"{job.step} {time.monotonic() * 1000}\n")
            if turns is not None:
                turns.begin_step()
            if gaps is not None:
                gaps.begin()
            loss: Any = nn.functional.mse_loss(model(inputs), targets)  # untyped in torch
            loss.backward()
            if gaps is not None:
                gaps.end()
            optimizer.step()
            optimizer.zero_grad()
            if options.announce and number == options.announce:
                sys.stdout.write("training\n")
                sys.stdout.flush()
    _synchronize(device)
    if options.record:
        ended_ms = time.monotonic() * 1000
        rows = gaps.rows if gaps is not None else []
        content = {"instants_ms": instants_ms, "ended_ms": ended_ms, "cpu_ms": cpu_ms}
        content |= {"gaps_ms": rows, "waits": waits}
        if options.replay:

            def step() -> None:
                graphed.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                graphed.step()

            graphed = torch.optim.Adam(trained, lr=1e-4, capturable=True)
            content["gpu_step_ms"] = replay_ms(step)
        part = Path(f"{options.record}.part")
        part.write_text(json.dumps(content))
        os.replace(part, options.record)


def network(
    width: int = WIDTH, layer_count: int = LAYERS, batch: int = BATCH, frozen_mib: int = 0
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the MLP to train, a batch of inputs, and targets; every call returns equal values."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(layer_count)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    if frozen_mib:
        model.append(Frozen(frozen_mib << 20, width))
    return model, torch.randn(batch, width), torch.randn(batch, width)


class Frozen(nn.Module):
    """Weights that a step hardly reads and never changes, like those beside an adapter.

    A job's slice has as much room again, for their gradients."""

    def __init__(self, size_bytes: int, width: int) -> None:
        super().__init__()
        rows = torch.full((size_bytes // (4 * width), width), 0.01)
        self.rows = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows[: len(x)]


def resnet50() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return ResNet-50, which the GPU stages train, with a batch of random images and targets."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(num_classes=8)
    return model, torch.randn(32, 3, 224, 224), torch.randn(32, 8)


def replay_ms(step: Callable[[], None], cuda: Any = torch.cuda) -> float:
    """Return the GPU's time for a step in ms: of a CUDA graph, in which no launch waits for the
    host. Events around an eager step would count the host's pauses, too."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):  # loads the kernels, takes the workspaces
            step()
        graph, begin, end = cuda.CUDAGraph(), *(cuda.Event(enable_timing=True) for _ in "ab")
        with cuda.graph(graph, stream=stream):
            step()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Turns:
    """Blocks of steps, each computed when a line of ``orders`` says so, so that several processes
    can take turns. A line of ``answers`` has the times of its steps."""

    def __init__(self, folder: str, device: str) -> None:
        self._device, self._pacer = device, Pacer.current or Pacer()
        self._orders = open(Path(folder, "orders"))  # noqa: SIM115 - until the process ends
        self._answers = open(Path(folder, "answers"), "w", buffering=1)  # noqa: SIM115
        self._left = 0
        self._instants_ms: list[float] = []
        self._before = (0.0, 0, 0.0)

    def begin_step(self) -> None:
        """Count a step; at the end of a block wait for the next order, or exit without one."""
        if not self._left:
            _synchronize(self._device)
            if self._instants_ms:
                self._answer()
            self._obey(json.loads(self._orders.readline() or sys.exit(0)))
        self._left -= 1
        self._instants_ms.append(time.monotonic() * 1000)

    def _numbers(self) -> tuple[float, int, float]:
        return time.thread_time() * 1000, self._pacer.waits, self._pacer.waited_ms

    def _answer(self) -> None:
        instants_ms = [*self._instants_ms, time.monotonic() * 1000]
        gaps_ms = [after - before for before, after in pairwise(instants_ms)]
        used = [now - then for now, then in zip(self._numbers(), self._before, strict=True)]
        self._answers.write(json.dumps({"gaps_ms": gaps_ms, "cpu_waits_waited": used}) + "\n")

    def _obey(self, order: dict[str, int]) -> None:
        """Begin a block, with another limit on the steps that may be enqueued, if it has one."""
        from pipeswitch.devices.cuda import stream_gate

        vars(stream_gate)["LOOKS_PER_GROUP"] = order.get("looks", stream_gate.LOOKS_PER_GROUP)
        if "ahead" in order:
            pacer: Any = self._pacer
            del pacer._events[order["ahead"] + 1 :]
            while len(pacer._events) <= order["ahead"]:
                pacer._events.append(pacer._cuda.event())
        self._left, self._instants_ms, self._before = order["steps"], [], self._numbers()


class Gaps:
    """Times between two successive places at which a job would check for preemption.

    The longest gap is the time of "one layer", the longest that a stop should have to wait.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[list[float]] = []
        self._marks: list[float] = []
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own or next(module.children(), None) is None:
                module.register_forward_pre_hook(lambda *_: self.mark())
                if own:
                    first: Any = own[0]  # untyped in torch
                    first.register_post_accumulate_grad_hook(lambda _: self.mark())

    def mark(self) -> None:
        self._marks.append(time.monotonic() * 1000)

    def begin(self) -> None:
        self._marks = []
        self.mark()

    def end(self) -> None:
        self.mark()
        pairs = pairwise(self._marks)
        self.rows.append([after - before for before, after in pairs])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=0, help="0: for ever")
    parser.add_argument("--record", default="", help="a file for the step instants")
    parser.add_argument("--device", default="", help="of a plain run; a job is told its own")
    parser.add_argument("--resnet50", action="store_true", help="in place of the MLP")
    parser.add_argument(
        "--warm-up", type=int, default=-1, help="the device is idle before this step"
    )
    parser.add_argument("--turns", default="", help="a folder with two pipes, orders and answers")
    parser.add_argument("--replay", action="store_true", help="record the GPU's time for a step")
    parser.add_argument("--gaps", action="store_true", help="record the time between layers too")
    parser.add_argument("--load-s", type=float, default=0.0, help="the script loads data so long")
    parser.add_argument("--frozen-mib", type=int, default=0, help="size of weights that stay")
    parser.add_argument("--live", default="", help="a file: number and instant of each step")
    parser.add_argument("--announce", type=int, default=0, help="say so after this many steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
