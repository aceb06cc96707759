"""The server's start environment: the owner's code can read it, a client's program cannot."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import numpy as np
import pytest
from process_tools import checked_server, finish, write_script

from pipeswitch.sandbox.confine import missing

SOURCE = {
    "source": "torchvision:squeezenet1_1",
    "weights": "random:0",
    "inputs": {"x": ((1, 3, 64, 64), "float32")},
}

FACTORY = """
import os
import torch

class Counts(torch.nn.Module):
    # Builder and worker ask for the secret; it does not export, as it looks at its input.
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1, bias=False)
        self.length = len(os.environ["A_SECRET"])

    def forward(self, x):
        return self.linear(x) + (self.length if x.sum() < 1 else 0)
"""
SCRIPT = """
    import os, sys
    with open(sys.argv[1], "w") as file:
        file.write(os.environ["A_SECRET"])
"""


def knows(pid: int, secret: str) -> bool:
    """Return True if the secret is in a process's memory that maps no file, such as the heap."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, may, _, _, inode, *_ = line.split()
            begin, end = (int(text, 16) for text in span.split("-"))
            if not may.startswith("rw-p") or inode != "0":
                continue
            memory.seek(begin)
            with contextlib.suppress(OSError):  # the process has just given it back
                if secret.encode() in memory.read(end - begin):
                    return True
    return False


@pytest.mark.skipif(bool(missing()), reason="this kernel lacks the sandbox")
def test_a_secret_is_in_no_process_that_runs_a_clients_program_and_where_the_owners_code_runs(
    tmp_path: Path,
) -> None:
    secret = uuid.uuid4().hex
    (tmp_path / "counting.py").write_text(FACTORY)
    script = write_script(tmp_path, "tells.py", SCRIPT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with checked_server(environment={"A_SECRET": secret, "PYTHONPATH": path}) as checked:
        client = checked.client
        client.register("program", **SOURCE)
        client.infer("program", x=np.zeros((1, 3, 64, 64), np.float32))
        assert knows(checked.pid, secret)
        children = (checked.fork_server_pid(), *checked.worker_pids().values())
        assert [pid for pid in children if knows(pid, secret)] == []

        finish(client.train(script, args=[str(tmp_path / "told")]))
        assert (tmp_path / "told").read_text() == secret
        inputs = {"x": ((1, 1), "float32")}
        client.register("code", "counting:Counts", weights="random:0", inputs=inputs)
        [answer] = client.infer("code", x=np.zeros((1, 1), np.float32)).outputs.values()
        assert answer == len(secret)
        assert not knows(checked.fork_server_pid(), secret)
