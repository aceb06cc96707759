"""A model's tensors in a commit: they are found by name, and never read outside of the commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.client.client import Task
from pipeswitch.commits import weights
from pipeswitch.commits.commit_files import write_commit
from pipeswitch.commits.image import HEADER_BYTES, dump_json, pack_header
from pipeswitch.frontend.job_files import read_piece


def test_a_part_has_its_models_own_names() -> None:
    weight = weights.Weight("float32", (1,), np.zeros(1, np.uint32))
    names = ("net.0.weight", "ema.module.0.weight", "ema.n_averaged", "module.module.a", "module.b")
    every = dict.fromkeys(names, weight)
    assert [*weights.of_part(every, "net")] == ["0.weight"]
    assert [*weights.of_part(every, "ema")] == ["0.weight"]
    assert [*weights.of_part(every, "module")] == [
        "module.a",
        "b",
    ]  # not an average: a model whose child has this name
    with pytest.raises(InvalidInput) as refused:
        weights.of_part(every, "n")
    assert "ema, module, net" in refused.value.hint


def image(tensors: dict[str, dict[str, Any]], data: bytes) -> memoryview:
    """Return an image: the header, then ``data`` with the tensors' bytes, then the JSON."""
    document = dump_json({"tensors": tensors, "blobs": {}, "meta": {}})
    offset = HEADER_BYTES + len(data)
    head = pack_header(document, offset, offset + len(document))
    return memoryview(head + data + document)


def entry(shape: list[int], stride: list[int], size: int, **more: Any) -> dict[str, Any]:
    fields = {"dtype": "float32", "offset": HEADER_BYTES, "size": size}
    return {**fields, "shape": shape, "stride": stride, **more}


VALUES = np.arange(6, dtype=np.float32)
ROWS = entry([2, 3], [3, 1], 24)


def test_parameters_have_the_names_of_a_state_dict_and_lie_row_by_row(tmp_path: Path) -> None:
    columns = entry([3, 2], [1, 3], 24)
    names = {"model.w": ROWS, "model.t": columns, "model.w.grad": ROWS}
    tensors = weights.weights_of(
        image({**names, "optimizer.optimizer.state.model.w.m": ROWS}, VALUES.tobytes())
    )
    assert set(tensors) == {"model.w", "model.t"}
    weights.save_weights(weights.for_anybody(tensors), tmp_path / "out.safetensors")
    from safetensors.numpy import load_file

    read = load_file(tmp_path / "out.safetensors")
    assert np.array_equal(read["w"], VALUES.reshape(2, 3))
    assert np.array_equal(read["t"], VALUES.reshape(2, 3).T)
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_several_models_keep_their_keys() -> None:
    tensors = weights.weights_of(image({"g.w": ROWS, "d.w": ROWS}, VALUES.tobytes()))
    assert set(weights.for_anybody(tensors)) == set(tensors) == {"g.w", "d.w"}


@pytest.mark.parametrize(
    "bad",
    [
        entry([2, 4], [4, 1], 24),  # the shape needs more than 24 bytes
        entry([2, 3], [4, 1], 24),  # the strides need more than 24 bytes
        entry([2, 3], [-3, 1], 24),
        entry([6, 1 << 60], [1, 0], 24),
        entry([2, 3], [3], 24),
        entry([2, 3], [3, 1], 24, dtype="object"),
        entry([2, 3], [3, 1], 24, dtype=["float32"]),
        entry([True, 3], [3, 1], 12),
        {**ROWS, "shape": None},
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"model\.w"):
        weights.weights_of(image({"model.w": bad}, VALUES.tobytes()))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64])
def test_a_file_that_is_no_commit_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(InvalidInput):
        weights.weights_of(weights.read_image(tmp_path / "x"))


def test_a_damaged_commit_is_neither_published_nor_exported(tmp_path: Path) -> None:
    def ask(name: Any, action: str, **at: int) -> dict[str, Any]:
        return {"job": {}} if action == "export" else read_piece(tmp_path, name, action, **at)

    folder, out, client = tmp_path / "commits" / "j", tmp_path / "out", Mock(job=ask)
    record = write_commit(folder, 3, image({"model.w": ROWS}, VALUES.tobytes()))
    Task(client, "j").export(out)
    before, data = out.read_bytes(), bytearray((folder / record.image).read_bytes())
    assert weights.load_weights(folder)[0] == record
    data[data.index(VALUES.tobytes()) + 5] ^= 1
    (folder / record.image).write_bytes(data)
    for use in (lambda: weights.load_weights(folder), lambda: Task(client, "j").export(out)):
        with pytest.raises(InvalidInput, match="does not match its digest"):
            use()
    assert out.read_bytes() == before
