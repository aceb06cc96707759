"""Three jobs whose slices fit on the device together; they alternate between or within steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
import torch
from process_tools import checked_server, finish, hurt, mlp, run_plain, until, write_script

SEED: Final = 17
ROUNDS: Final = 6
EPOCH_STEPS: Final = 50
SCRIPT: Final = """
    import hashlib, os, sys, time
    import torch
    from pipeswitch import job
    out, epochs, width, depth = sys.argv[1], *map(int, sys.argv[2:])
    torch.manual_seed(width)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Dropout(),
        *(one for _ in range(depth) for one in (torch.nn.Linear(width, width), torch.nn.ReLU())),
        torch.nn.Linear(width, 8)
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)

    class Data(list):
        def __iter__(self):
            for x in super().__iter__():
                time.sleep(0.005 * (depth > 0))
                yield x

    data = Data(torch.full((256, 64), float(i % 7)) for i in range(50))

    def persistent():
        moments = [t for s in optimizer.state.values() for t in s.values()]
        tensors = [*net.parameters(), *(t for t in moments if isinstance(t, torch.Tensor))]
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

    before = None
    for epoch in job.epochs(epochs):
        if os.path.exists(f"{out}.enough-{epoch}"):
            break
        for x in job.steps(data, model=net, optimizer=optimizer):
            assert before in (None, persistent()), "another job wrote to its slice"
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            before = persistent()
    with open(out, "w") as file:
        file.write(f"{job.step} {persistent()} {torch.rand(1).item().hex()}")
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("order", ["fair", pytest.param("coshift", marks=pytest.mark.slow)])
def test_three_jobs_under_requests_evictions_and_kills_end_as_each_alone(
    tmp_path: Path, order: str
) -> None:
    """Kill and evict jobs. ``coshift`` gives all activations 256 KiB; one job alone uses more."""
    depth, more = ("6", 2) if order == "coshift" else ("0", 5)
    script, dice = write_script(tmp_path, "one.py", SCRIPT), random.Random(SEED)
    environment = {
        "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "20ms",
        "PIPESWITCH_SCHEDULER__TRAINING": order,
        "PIPESWITCH_SCHEDULER__ACTIVATION_MEMORY": "256KiB",
        "PIPESWITCH_DEVICE__LINK_GBPS": "0.02",
        "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
    }
    with checked_server(arena="64MiB", environment=environment) as checked:
        checked.client.register("small", mlp(64, 3, 1), example_inputs=(torch.zeros(1, 64),))
        out = {width: tmp_path / f"served-{width}" for width in (32, 48, 64)}
        tasks = {
            width: checked.client.train(
                script, name=f"j{width}", args=[str(path), "1000000", str(width), depth]
            )
            for width, path in out.items()
        }

        def are_resident() -> bool:
            rows = [task.status() for task in tasks.values()]
            trained = all(row["lease_bytes"] and row["suspensions"] for row in rows)
            waiting = [row["state"] for row in rows].count("suspended")
            return trained and (waiting == 2 or order == "coshift")  # coshift changes them fast

        until(are_resident, "each has trained, and two wait in place")
        for _ in range(ROUNDS):
            for _ in range(dice.randrange(4)):
                assert checked.client.infer("small", torch.ones(1, 64))["y"].shape == (1, 64)
            hurt(checked, tasks[dice.choice([*tasks])], dice.choice(("kill", "evict")))
        until(are_resident, "all are side by side again", 60.0)
        for width, task in tasks.items():
            Path(f"{out[width]}.enough-{task.status()['step'] // EPOCH_STEPS + more}").touch()
        rows = {width: finish(task) for width, task in tasks.items()}
        assert sum(row["restarts"] for row in rows.values()) > 1
        assert sum(row["evictions"] for row in rows.values()) > 1
        for width, row in rows.items():
            alone = tmp_path / f"alone-{width}"
            run_plain(script, str(alone), str(row["step"] // EPOCH_STEPS), str(width), depth)
            assert out[width].read_text() == alone.read_text(), row
            if order == "coshift":
                shown = row["activations"]
                assert 0 < shown["device_peak_bytes"] <= 256 << 10 < shown["saved_bytes"], shown
