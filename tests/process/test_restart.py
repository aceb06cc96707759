"""Models of a server, as clients see them after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp

from pipeswitch.base.errors import ServerUnavailable
from pipeswitch.base.failpoints import VARIABLE

MODULE = mlp(64, 2, 1)
X = torch.linspace(-1, 1, 64).reshape(1, 64)
READ = "daemon.store.read"


def register(state: Path) -> str:
    """Register a model on a first server, and stop this server; return the model's digest."""
    with checked_server(state_dir=state) as checked:
        checked.client.register("a", MODULE, example_inputs=(X,))
        return str(checked.client.show("a")["digest"])


def armed(folder: Path, action: str) -> dict[str, str]:
    points = folder / "points"
    points.mkdir()
    (points / READ).write_text(action)
    return {VARIABLE: str(points)}


def state_of(checked: Checked, name: str) -> str:
    return str(checked.client.show(name)["state"])


def test_a_restarted_server_is_ready_when_its_models_are(tmp_path: Path) -> None:
    register(tmp_path / "state")
    slow = armed(tmp_path, "delay 4000")
    with checked_server(state_dir=tmp_path / "state", environment=slow) as checked:
        assert state_of(checked, "a") == "ready"
        assert is_bit_equal(checked.client.infer("a", X)["y"], eager(MODULE, X))


def test_a_request_for_a_model_that_cannot_be_brought_back_reads_why(tmp_path: Path) -> None:
    digest = register(tmp_path / "state")
    weights = max((tmp_path / "state" / "models" / digest).iterdir(), key=_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0xFF  # a weight: the example is at the end
    weights.write_bytes(data)
    slow = armed(tmp_path, "delay 4000")
    with checked_server(state_dir=tmp_path / "state", environment=slow) as checked:
        assert "failed models: a" in checked.running.ready_line
        for ask in (lambda: checked.client.infer("a", X), lambda: checked.client.load("a")):
            with pytest.raises(ServerUnavailable, match=r'"a" is failed: .*corrupt'):
                ask()
        [row] = checked.client.models()
        assert (row["name"], row["state"], row["digest"]) == ("a", "failed", "")
        assert "corrupt" in row["reason"]
        assert checked.client.show("a") == row
        checked.client.register("a", MODULE, example_inputs=(X,))
        assert state_of(checked, "a") == "ready"


def test_a_model_with_a_damaged_file_is_failed_and_never_wrong(tmp_path: Path) -> None:
    """Damage the graph: the model fails, and recovers with its file. A manifest is made again."""
    digest = register(tmp_path / "state")
    folder = tmp_path / "state" / "models" / digest
    for name, old, new in (
        ("manifest.json", b'"total_bytes":3', b'"total_bytes":4'),
        ("program.bundle", b"aten.tanh", b"aten.sinh"),
    ):
        sound = (folder / name).read_bytes()
        assert sound.count(old) > 0, name
        (folder / name).write_bytes(sound.replace(old, new, 1))
        with checked_server(state_dir=tmp_path / "state") as checked:
            if name == "manifest.json":
                assert is_bit_equal(checked.client.infer("a", X)["y"], eager(MODULE, X))
                continue
            assert state_of(checked, "a") == "failed"
            with pytest.raises(ServerUnavailable, match='"a" is failed: '):
                checked.client.infer("a", X)
        (folder / name).write_bytes(sound)
        with checked_server(state_dir=tmp_path / "state") as checked:
            assert is_bit_equal(checked.client.infer("a", X)["y"], eager(MODULE, X))
    with checked_server(state_dir=tmp_path / "state") as checked:
        checked.client.unregister("a")
        assert checked.client.models() == []


def _size(path: Path) -> int:
    return path.stat().st_size
