"""A watched folder of models: one that appears, changes, goes, is half written, or is faulty."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from process_tools import until

from pipeswitch.testing import server

NO_PROGRAM = b"no program"


def put(folder: Path, seed: int, width: int = 4) -> torch.nn.Module:
    """Write a version's program, and return its module."""
    torch.manual_seed(seed)
    net = torch.nn.Linear(width, 2)
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(net, (torch.ones(1, width),)), folder / "model.pt2")
    return net


def put_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def test_a_folder_is_served_as_it_changes(tmp_path: Path) -> None:
    root, x = tmp_path / "models", torch.ones(1, 4)
    nets = [put(root / "net/1", 0)]
    put_file(root / "faulty/1/model.pt2", NO_PROGRAM)
    put(tmp_path / "whole", 3)
    whole = (tmp_path / "whole/model.pt2").read_bytes()
    half = put_file(root / "half/1/model.pt2", whole[:1000])
    with (
        server(args=("--models", str(root)), state_dir=tmp_path / "state") as running,
        running.client() as client,
    ):

        def rows() -> dict[str, Any]:
            return {row["name"]: row for row in client.models()}

        def states() -> dict[str, str]:
            return {name: row["state"] for name, row in rows().items()}

        expected = {"net": "ready", "faulty": "failed"}  # a file that changes is being copied
        until(lambda: os.utime(half) or states() == expected, "two models")
        assert "torch.export.load" in rows()["faulty"]["reason"]
        half.write_bytes(whole)
        until(lambda: states().get("half") == "ready", "the rest of a copy")

        nets.append(put(root / "net/2", 1))
        until(lambda: client.show("net")["version"] == 2, "a version")
        for version, net in enumerate(nets, 1):
            answer = client.infer("net", x, version=version).value
            assert torch.equal(answer, net(x).detach())

        put_file(root / "net/3/model.pt2", NO_PROGRAM)
        until(lambda: "version 3" in str(client.show("net")["notes"]), "a note of a fault")
        assert torch.equal(client.infer("net", x).value, nets[1](x).detach())

        shutil.rmtree(root / "faulty")
        wider = put(root / "net/4", 2, width=3)  # another program replaces the model
        until(lambda: "faulty" not in states(), "a model that has gone")
        until(lambda: ", 3]" in str(rows().get("net", {}).get("inputs")), "another program")
        assert "version 3" not in str(rows()["net"]["notes"])

        put_file(root / "net/5/model.gguf", NO_PROGRAM)
        until(lambda: "version 5" in str(rows().get("net", {}).get("notes")), "a faulty program")
        assert torch.equal(client.infer("net", x[:, :3]).value, wider(x[:, :3]).detach())

        shutil.rmtree(root / "net")
        until(lambda: states() == {"half": "ready"}, "an unregistered model")
        root.rename(tmp_path / "away")  # like an unmounted disk
        until(lambda: "No such file" in running.log(), "a report")
        root.mkdir()
        until(lambda: "no model is removed" in running.log(), "a report of an empty folder")
        assert states() == {"half": "ready"}
        assert "net: version 3" in running.log()
