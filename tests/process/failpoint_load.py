"""Load of the failpoint tour: clients that check answers, and a plain run of the job's script."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeswitch.client.client import Client

from ..chaos.stage import Stage
from .tools import is_bit_equal, run_plain

ANSWERED_WITHIN_S: Final = 60.0
PAUSE_S: Final = 0.01  # between two requests of a client

TRAIN: Final = """
    import hashlib, os, sys, threading
    import torch
    from torch.utils.data import DataLoader, Dataset
    from pipeswitch import job

    pace_s, stop_file, out, last = float(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

    class Paced(Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, index):
            threading.Event().wait(pace_s / 16)
            return torch.full((64,), index / 160.0) + 0.1 * torch.randn(64)

    def said():
        total = hashlib.sha256()
        for value in net.state_dict().values():
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            total.update(raw.numpy().tobytes())
        total.update(torch.get_rng_state().numpy().tobytes())
        return f"{job.step} {total.hexdigest()}"

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2),
        torch.nn.ReLU(), torch.nn.Linear(64, 64),
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    loader = DataLoader(Paced(), batch_size=16, shuffle=True)
    for epoch in job.epochs(10**9):
        for x in job.steps(loader, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not out:
            print(said())
        if job.step >= last or os.path.exists(stop_file):
            break
    if out:
        with open(out, "w") as file:
            file.write(said())
"""
"""Script that trains in epochs of ten steps until a stop file exists."""


# ---- the clients -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Result of one request, as its client has seen it."""

    sent_at_s: float
    ended_at_s: float
    said: str  # ok, wrong, or the error's type and text


class Lane:
    """Client in its own thread, which sends requests over TCP and compares each answer's bits.

    Args:
        batches: inputs and outputs by model, or by ``model@version``.
    """

    def __init__(self, stage: Stage, name: str, batches: Mapping[str, Any]) -> None:
        self._stage = stage
        self._expected = [(model, x, y) for model, (x, y) in batches.items()]
        self.over = threading.Event()
        self.answers: list[Answer] = []  # the thread only appends
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._stage.client() as client:
            for model, x, y in itertools.cycle(self._expected):
                if self.over.wait(PAUSE_S):
                    return
                sent_at_s = time.monotonic()
                reply = self._ask(client, model, x, y)
                self.answers.append(Answer(sent_at_s, time.monotonic(), reply))

    @staticmethod
    def _ask(client: Client, model: str, x: Any, y: Any) -> str:
        name, _, version = model.partition("@")
        try:
            answer = client.infer(name, x, version=int(version or 0))
            return "ok" if is_bit_equal(answer["y"], y) else "wrong"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def is_served_since(self, at_s: float) -> bool:
        """Return True if a request that was sent after ``at_s`` has the right answer."""
        return any(a.said == "ok" and a.sent_at_s >= at_s for a in self.answers[-20:])

    def stop(self) -> None:
        self.over.set()
        self._thread.join(ANSWERED_WITHIN_S)
        assert not self._thread.is_alive(), f"{self._thread.name} was never answered"


# ---- the undisturbed run -----------------------------------------------------------------------


class Undisturbed:
    """Output of the plain script after each epoch; the script runs again for more epochs."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._said: dict[int, str] = {}

    def after(self, step: int) -> str:
        if step not in self._said:
            last = max(2 * step, 1500)
            for line in run_plain(self._script, "0", "", "", str(last)).splitlines():
                self._said[int(line.split()[0])] = line
        return self._said[step]
