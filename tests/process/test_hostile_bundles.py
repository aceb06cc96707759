"""Bundles by an attacker who knows torch's kernels, registered through the TCP listener.

In earlier releases, each bundle leaked another model's weights, another client's request or freed
memory, or killed a worker. Now registration refuses each bundle, and names the batch at which it
would go wrong; the server continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from process_tools import Checked, checked_server, until

import pipeswitch as ps
from pipeswitch.programs.graphs.bundle import Graph, Node, write_bundle
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import Manifest, ValueSpec
from pipeswitch.programs.spec import load_manifest, save_manifest

X = {"v": 0}
BATCH = "batch"


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="128MiB") as checked:
        checked.wait_until_whole()
        yield checked


@pytest.fixture
def stranger(running: Checked) -> Iterator[ps.Client]:
    with running.running.client(tcp=True) as client:
        yield client


def node(target: str, *args: Any, **kwargs: Any) -> Node:
    return Node(f"aten.{target}", args, kwargs)


def value(number: int) -> dict[str, int]:
    return {"v": number}


def bundle(
    folder: Path,
    nodes: list[Node],
    *,
    x: tuple[int | None, ...],
    y: tuple[int | None, ...],
    weights: dict[str, tuple[int, ...]],
    result: int = -1,
    batch_max: int = 8,
) -> Path:
    """Write a bundle with input x, float32 weights, and as output y node ``result`` or the last."""
    first = 1 + len(weights)
    graph = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=x),),
        weights=tuple(weights),
        nodes=tuple(nodes),
        results=(first + (len(nodes) - 1 if result < 0 else result),),
        outputs=(ValueSpec(name="y", dtype="float32", shape=y),),
        dims=(Dim(BATCH, 1, batch_max),) if BATCH in x else (),
    )
    path = folder / "hostile.bundle"
    data = [np.ones(shape, np.float32).tobytes() for shape in weights.values()]
    write_bundle(path, graph, [(n, "float32", s) for n, s in weights.items()], data)
    return path


def norm(*arguments: Any) -> Node:
    return node("_native_batch_norm_legit_no_training.default", *arguments, 0.0, 1e-5)


def flat_channels(read: int) -> list[Node]:
    """Reshape x [B, 4] to [1, 4 * B], so that the number of channels grows with the batch."""
    return [
        node("reshape.default", X, [1, -1]),
        norm(value(read), None, None, value(1), value(1)),
        Node("_operator.getitem", (value(3), 0)),
        node("reshape.default", value(4), [-1, 4]),
    ]


def integer_trap() -> list[Node]:
    """Return nodes that compute an LSTM state's extents: right for batches 1, 2 and 5, wrong for 3.

    There are 12 + (b - 1) (b - 2) (b - 5) columns, cut from sixteen.
    """
    terms = [
        node("sym_size.int", X, 0),  # value(3)
        Node("_operator.sub", (value(3), 1)),
        Node("_operator.sub", (value(3), 2)),
        Node("_operator.sub", (value(3), 5)),
        Node("_operator.mul", (value(4), value(5))),
        Node("_operator.mul", (value(7), value(6))),
        Node("_operator.add", (value(8), 12)),  # value(9)
    ]
    return [
        *terms,
        node("slice.Tensor", value(1), 0, 0, value(9)),  # rows of w_ih: 12 of 4 gates by 3
        node("new_zeros.default", X, [1, value(3), 3]),
        node("unsqueeze.default", X, 0),
        node(
            "lstm.input",
            value(12),
            [value(11), value(11)],
            [value(10), value(2)],
            False,
            1,
            0.0,
            False,
            False,
            False,
        ),
        Node("_operator.getitem", (value(13), 0)),
        node("squeeze.dim", value(14), 0),
    ]


ATTACKS: dict[str, dict[str, Any]] = {
    "a weight of one element beside many channels, by the composite": {
        "nodes": [
            node("reshape.default", X, [1, -1]),
            node(
                "batch_norm.default",
                value(2),
                value(1),
                value(1),
                value(1),
                value(1),
                False,
                0.0,
                1e-5,
                False,
            ),
            node("reshape.default", value(3), [-1, 4]),
        ],
        "x": (BATCH, 4),
        "y": (BATCH, 4),
        "weights": {"w": (1,)},
    },
    "a weight of one element beside many channels": {
        "nodes": flat_channels(2),
        "x": (BATCH, 4),
        "y": (BATCH, 4),
        "weights": {"w": (1,)},
    },
    "the request itself as the weight": {
        "nodes": [
            node("reshape.default", X, [-1]),
            node("expand.default", value(1), [1, 4096, 1]),
            norm(value(3), value(2), None, value(2), value(2)),
            Node("_operator.getitem", (value(4), 0)),
        ],
        "x": (1,),
        "y": (1, 4096, 1),
        "weights": {"w": (1, 1, 1)},
    },
    "a norm of one row beside many": {
        "nodes": [
            node("_weight_norm.default", value(1), value(2), 0),
            node("add.Tensor", value(3), X),
        ],
        "x": (BATCH, 4),
        "y": (4096, 4),
        "weights": {"v": (4096, 4), "g": (1, 1)},
        "batch_max": 1,
    },
    "extents that are right at the ends of the range": {
        "nodes": integer_trap(),
        "x": (BATCH, 4),
        "y": (BATCH, 3),
        "weights": {"w": (16, 4), "hidden": (12, 3)},
        "batch_max": 5,
    },
    "a mode that does not exist": {
        "nodes": [node("grid_sampler_3d.default", X, value(1), 7, 0, False)],
        "x": (1, 1, 2, 2, 2),
        "y": (1, 1, 4, 4, 4),
        "weights": {"grid": (1, 4, 4, 4, 3)},
    },
    "an lstm without its parameters": {
        "nodes": [
            node(
                "lstm.input", X, [value(1), value(1)], [value(2)], False, 1, 0.0, False, False, True
            ),
            Node("_operator.getitem", (value(3), 0)),
        ],
        "x": (1, 2, 3),
        "y": (1, 2, 3),
        "weights": {"h": (1, 1, 3), "w": (12, 3)},
    },
    "a gru whose gates are too few": {
        "nodes": [
            node("gru.input", X, value(1), [value(2), value(2)], False, 1, 0.0, False, False, True),
            Node("_operator.getitem", (value(3), 0)),
        ],
        "x": (1, 2, 3),
        "y": (1, 2, 3),
        "weights": {"h": (1, 1, 3), "w": (3, 3)},
    },
    "a circle with a gap, which is freed memory": {
        "nodes": [
            node("pad.default", X, [5, -5], "circular"),
            node("add.Tensor", value(2), value(1)),
        ],
        "x": (1, 1, 5),
        "y": (1, 1, 5),
        "weights": {"w": (1,)},
    },
    "a median of one element that is repeated": {
        "nodes": [
            node("expand.default", value(1), [64, 64]),
            node("median.dim", value(2), 1),
            Node("_operator.getitem", (value(3), 0)),
            node("add.Tensor", value(4), X),
        ],
        "x": (64,),
        "y": (64,),
        "weights": {"w": (1, 1)},
    },
    "windows that overlap, of which attention answers freed memory": {
        "nodes": [
            node("unfold.default", X, 1, 8, 1),
            node("unsqueeze.default", value(2), 0),
            node("scaled_dot_product_attention.default", value(3), value(3), value(3)),
            node("add.Tensor", value(4), value(1)),
        ],
        "x": (2, 13),
        "y": (1, 2, 6, 8),
        "weights": {"w": (1,)},
    },
    "an out overload of another name": {
        "nodes": [node("sort.values", X, values=value(1), indices=value(1))],
        "x": (BATCH, 4),
        "y": (BATCH, 4),
        "weights": {"w": (4,)},
        "result": 0,
    },
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_bundle_is_refused_at_every_batch_it_admits(
    name: str, running: Checked, stranger: ps.Client, tmp_path: Path
) -> None:
    workers = running.worker_pids()
    with pytest.raises(ps.RegistrationRefused) as refused:
        stranger.register("hostile", bundle(tmp_path, **ATTACKS[name]))
    assert refused.value.data["part"].startswith(("node", "operator"))
    assert "hostile" not in {row["name"] for row in stranger.models() if row["state"] == "ready"}
    assert running.worker_pids() == workers


def test_a_range_with_more_batches_than_a_registration_tries_is_served(
    stranger: ps.Client, tmp_path: Path
) -> None:
    nodes = [node("add.Tensor", X, value(1))] * 17
    extents: dict[str, Any] = {"x": (BATCH, 4), "y": (BATCH, 4), "weights": {"w": (4,)}}
    stranger.register("wide", bundle(tmp_path, nodes, **extents, batch_max=65_536))
    with pytest.raises(ps.InvalidInput):
        stranger.infer("wide", np.zeros((65_537, 4), np.float32))
    for batch in (256, 65_536):  # checking every batch would take a minute
        assert np.all(stranger.infer("wide", np.zeros((batch, 4), np.float32))["y"] == 1)


def kept_by_an_older_server(tmp_path: Path) -> tuple[Path, Path, Manifest]:
    """Register a model, and mark it as one that an older server has checked. Return the state
    directory, the model's folder, and the manifest without the mark."""
    nodes = [node("add.Tensor", X, value(1))]
    extents: dict[str, Any] = {"x": (BATCH, 4), "y": (BATCH, 4), "weights": {"w": (4,)}}
    state = tmp_path / "state"
    with checked_server(arena="64MiB", host_store="128MiB", state_dir=state) as checked:
        checked.client.register("kept", bundle(tmp_path, nodes, **extents))
    [folder] = filter(Path.is_dir, (state / "models").iterdir())
    manifest = load_manifest(folder)
    older = {**manifest.extra, "checked_by": "an older one"}
    save_manifest(folder, msgspec.structs.replace(manifest, extra=older))
    return state, folder, manifest


def test_a_program_that_older_contracts_let_through_is_checked_again_at_a_restart(
    tmp_path: Path,
) -> None:
    """Restart with a model that an older server has checked, so that it must be checked again."""
    state, folder, manifest = kept_by_an_older_server(tmp_path)
    (tmp_path / "hostile.bundle").unlink()
    with checked_server(arena="64MiB", host_store="128MiB", state_dir=state) as checked:
        answer = checked.client.infer("kept", np.zeros((2, 4), np.float32))
        assert np.all(answer["y"] == 1)
        assert load_manifest(folder).extra["checked_by"] == manifest.extra["checked_by"]


@pytest.mark.parametrize("where", ["weights", "graph"])
def test_a_damaged_program_is_not_built_again_into_another_one(where: str, tmp_path: Path) -> None:
    state, folder, _ = kept_by_an_older_server(tmp_path)
    path = folder / "program.bundle"
    data = path.read_bytes()
    changed = data[:-1] + b"\x01" if where == "weights" else data.replace(b"aten.add", b"aten.sub")
    assert changed != data
    path.write_bytes(changed)
    with checked_server(arena="64MiB", host_store="128MiB", state_dir=state) as checked:
        until(lambda: checked.client.show("kept")["state"] == "failed", "it is refused")
        with pytest.raises(ps.PipeSwitchError):
            checked.client.infer("kept", np.zeros((2, 4), np.float32))


def test_a_refusal_tells_a_stranger_no_folder_of_the_servers(
    running: Checked, stranger: ps.Client, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{not json here}xx")
    with pytest.raises(ps.RegistrationRefused, match="cannot be read") as refused:
        stranger.register("m", "torchvision:resnet18", weights=path)
    assert refused.value.part == "weights"
    assert str(running.running.state_dir) not in f"{refused.value} {refused.value.data}"
