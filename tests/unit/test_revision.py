"""Versions of an exact program, made of a commit in memory without a build (ADR 68)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.commits.area import CommitArea, create_area
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.revision import revise
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.spec import BUNDLE_FILE, BuildSpec, is_same_content
from tests.unit.test_weights import HEADER_BYTES, entry, image


class Net(torch.nn.Module):
    def __init__(self, last: float, place: int = 0) -> None:
        super().__init__()
        self.register_buffer("at", torch.tensor([place]))
        self.first, self.last = (torch.nn.Parameter(torch.full((4,), x)) for x in (2.0, last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.first + self.last).index_select(1, self.at)


def built(folder: Path, net: Net) -> Manifest:
    folder.mkdir()
    export_module_to_bundle(net, (torch.ones(2, 4),), folder / "it.bundle")
    spec = BuildSpec(name="net", source=str(folder / "it.bundle"))
    return build(spec, folder, lambda stage, fraction: None)


def committed(net: Net) -> CommitArea:
    tensors, data = {}, b""
    for name, value in net.state_dict().items():
        at = {"dtype": str(value.dtype)[6:], "offset": HEADER_BYTES + len(data)}
        tensors[f"net.{name}"] = entry([len(value)], [1], value.nbytes, **at)
        data += value.numpy().tobytes()
    commit = image(tensors, data)
    area = CommitArea(create_area(len(commit)), len(commit), is_writer=True)
    area.write(7, len(commit), lambda view: view.__setitem__(slice(None), commit))
    return area


def test_a_version_is_what_a_build_would_make(tmp_path: Path) -> None:
    base, other = built(tmp_path / "base", Net(3.0)), built(tmp_path / "other", Net(5.0))
    spec = BuildSpec(name="net", source=str(tmp_path / "base" / BUNDLE_FILE), commit_of="job")
    made = revise(spec, committed(Net(5.0)), tmp_path / "made")
    both = [(tmp_path / name / BUNDLE_FILE).read_bytes() for name in ("made", "other")]
    assert both[0] == both[1]
    assert (is_same_content(made, other), is_same_content(made, base)) == (True, False)
    same = {"digest": "", "weights_sha256": "", "extra": {}}
    assert structs.replace(made, **same) == structs.replace(other, **same)
    assert made.extra == other.extra | {"origin": "job:job@7"}
    with pytest.raises(RegistrationRefused, match="must be checked"):
        revise(spec, committed(Net(5.0, place=9)), tmp_path / "index")  # it may be out of range
    with pytest.raises(RegistrationRefused, match="nothing has been committed"):
        revise(spec, None, tmp_path / "none")
