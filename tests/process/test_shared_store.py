"""Variants share bytes in the host store of a real server."""

from __future__ import annotations

import os
from pathlib import Path

import process_tools as tools
import torch
from process_tools import checked_server
from torch import nn

WIDTH, COUNT = 512, 12
X = torch.randn(3, WIDTH)


def net(number: int) -> nn.Module:
    """Return a variant; its number picks the layer that differs."""
    torch.manual_seed(0)
    body = [nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)]
    torch.manual_seed(number)
    if number:
        body[number % COUNT] = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*body, nn.Linear(WIDTH, 8)).eval()


def test_variants_that_fit_only_by_sharing_answer_exactly_in_each_life(tmp_path: Path) -> None:
    names, state = [f"m{seed}" for seed in range(16)], tmp_path / "state"
    for seed, name in enumerate(names):
        torch.save(net(seed).state_dict(), tmp_path / f"{name}.pt")
    options = {"state_dir": state, "host_store": "28MiB", "arena": "32MiB"}  # a model has 12 MiB
    expected: dict[str, torch.Tensor] = {}
    with checked_server(**options) as checked:
        client = checked.client
        client.register("m0", net(0), example_inputs=(X,))
        for name in names[1:]:
            client.register(name, like="m0", weights=tmp_path / f"{name}.pt")
        row = client.show("m7")
        assert row["shares"] == f"{row['shared_bytes'] / (1 << 20):.1f} MiB with m0"
        assert row["shared_bytes"] > 0.9 * row["bytes"]
        for seed, name in enumerate(names):
            expected[name] = client.infer(name, X).value
            torch.testing.assert_close(expected[name], net(seed)(X).detach())
        client.unregister(names.pop(0))
        assert "has left" in client.show("m1")["shares"]
        assert client.show("m7")["shares_with"] == "m1"
        tools.kill(checked.daemon_pid())
        for name in reversed(names):
            assert torch.equal(client.infer(name, X).value, expected[name])
    [first] = state.glob(f"models/{row['digest']}")
    bundle = first / "program.bundle"
    os.truncate(bundle, bundle.stat().st_size - 5)
    with checked_server(**options) as checked:
        rows = {row["name"]: row["state"] for row in checked.client.models()}
        lost = [name for name in names if rows[name] == "failed"]
        assert len(lost) <= 1
        for name in set(names) - {*lost}:
            assert torch.equal(checked.client.infer(name, X).value, expected[name])
