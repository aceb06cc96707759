"""Dimensions that requests choose: at each size, a real server's answers have the module's bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server
from torch import nn

import pipeswitch as ps
from pipeswitch.programs.graphs.bundle import Graph, Node, write_bundle
from pipeswitch.programs.interface.dims import Dim, Expr, Shape
from pipeswitch.programs.interface.layout import ValueSpec

VOCABULARY, LONGEST = 97, 512


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of configurations that a build in the sandbox may read."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def running(hub: Path) -> Iterator[Checked]:
    environment = {"HF_HOME": str(hub)}
    with checked_server(arena="64MiB", host_store="128MiB", environment=environment) as checked:
        checked.wait_until_whole()
        yield checked


@pytest.fixture(autouse=True)
def _as_a_worker() -> Iterator[None]:
    before = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.set_num_threads(before[0])
    torch.backends.mha.set_fastpath_enabled(before[1])


class Encoder(nn.Module):
    """Module with positions by length, and with outputs whose extents depend on a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(LONGEST, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))[None]
        x = self.layer(x, src_key_padding_mask=mask == 0)
        return {"logits": self.head(x), "pooled": x.mean(1), "every_other": x[:, ::2]}


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.last(self.pool(self.first(x).relu()))
        return y, y.flatten(2).amax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.rnn = nn.RNN(5, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (hidden, _) = self.lstm(x)
        return self.rnn(self.gru(y)[0])[0], hidden


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, length - length // 3 :] = 0
    return {"ids": torch.randint(0, VOCABULARY, (batch, length)), "mask": mask}


def served(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def flat(outputs: Any) -> list[torch.Tensor]:
    return list(outputs.values()) if isinstance(outputs, dict) else list(outputs)


def check_bits(client: ps.Client, name: str, module: nn.Module, inputs: Any) -> None:
    result = client.infer(name, inputs)
    with torch.no_grad():
        is_named = isinstance(inputs, dict)
        expected = flat(module(**inputs) if is_named else module(*inputs))
    assert len(result.outputs) == len(expected)
    for ours, theirs in zip(result.outputs.values(), expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


LENGTHS = [1, 2, 3, 7, 64, LONGEST]


def test_a_text_of_any_length_has_the_modules_bits_without_a_build(running: Checked) -> None:
    torch.manual_seed(1)
    client, module = running.client, served(Encoder())
    ranges = {"ids": {1: (1, LONGEST)}, "mask": {1: (1, LONGEST)}}
    row = client.register("text", module, example_inputs=text(1, 8), dynamic=ranges)
    shown = client.show("text")
    assert shown["dims"] == {"batch": [1, 64], "length": [1, LONGEST]}
    assert shown["inputs"]["ids"] == [["batch", "length"], "int64"]
    assert shown["outputs"]["every_other"][0] == ["batch", "(1+length)//2", 16]
    workers = running.worker_pids()
    for length, batch in itertools.product(LENGTHS, (1, 2, 3)):
        check_bits(client, "text", module, text(batch, length))
    assert (running.worker_pids(), client.show("text")["digest"]) == (workers, row["digest"])
    signature = client.signature("text")
    assert [value.shape for value in signature.random(2, length=9)] == [(2, 9), (2, 9)]
    for shape, words in (
        ((1, LONGEST + 1), f"expects int64[1..64,1..{LONGEST}], got int64[1,{LONGEST + 1}]"),
        ((65, 7), "got int64[65,7]"),
        ((1, 7, 1), "got int64[1,7,1]"),
    ):
        with pytest.raises(ps.InvalidInput) as refused:
            client.infer("text", [torch.ones(shape, dtype=torch.int64)] * 2)
        assert words in refused.value.message
    with pytest.raises(ps.InvalidInput, match=r'"mask" expects int64\[batch=2,length=7\], got'):
        client.infer("text", {**text(2, 7), "mask": text(2, 8)["mask"]})


@pytest.mark.parametrize(
    ("make", "example", "ranges", "shapes"),
    [
        (
            Pictures,
            (1, 3, 32, 48),
            {2: (3, 200), 3: (3, 100)},
            [(1, 3, 3, 3), (2, 3, 4, 5), (3, 3, 64, 48), (1, 3, 200, 100), (2, 3, 31, 77)],
        ),
        (Recurrent, (2, 9, 4), {1: (1, 300)}, [(1, 1, 4), (2, 2, 4), (3, 9, 4), (1, 300, 4)]),
    ],
)
def test_pictures_and_sequences_of_any_size_have_the_modules_bits(
    running: Checked, make: type[nn.Module], example: Any, ranges: Any, shapes: Any
) -> None:
    torch.manual_seed(2)
    client, module, name = running.client, served(make()), make.__name__.lower()
    client.register(name, module, example_inputs=torch.randn(example), dynamic={"x": ranges})
    for shape in shapes:
        check_bits(client, name, module, [torch.randn(shape)])


def test_a_pt2_file_keeps_the_dimensions_it_was_exported_with(
    running: Checked, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    client, module = running.client, served(Pictures())
    batch, side = torch.export.Dim("b", min=1, max=5), torch.export.Dim.AUTO
    exported = torch.export.export(
        module, (torch.randn(2, 3, 40, 44),), dynamic_shapes=({0: batch, 2: side, 3: side},)
    )
    torch.export.save(exported, tmp_path / "pictures.pt2")
    client.register("file", tmp_path / "pictures.pt2")
    assert client.show("file")["dims"]["height"] == [7, 512], "its guards say so"
    dims = client.show("file")["dims"]
    assert (dims["batch"], dims["height"][1], dims["width"][1]) == ([1, 5], 512, 512)
    for height, width in ((40, 44), (dims["height"][0], 17), (101, dims["width"][0])):
        check_bits(client, "file", module, [torch.randn(3, 3, height, width)])


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] > 6 else x


class Places(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(12.0)[: x.shape[1]]


class OneOdd(nn.Module):
    """Module that acts differently at length 8, which an export does not notice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[1] != 8 else x * 3


class Short(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 3:
            raise ValueError("too short")
        return x * 2


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(3, -1) * 2


def test_a_batch_that_is_fixed_is_told(running: Checked) -> None:
    row = running.client.register("rows", Rows(), example_inputs=torch.ones(3, 10))
    assert row["notes"] == ["batch is fixed: the model fixes batch at 3"]
    assert running.client.show("rows")["notes"] == row["notes"]


@pytest.mark.parametrize(
    ("module", "works", "why"),
    [
        (Branches(), [7, 20], "it takes length from 7 to 20"),
        (Places(), [1, 12], "it takes length from 1 to 12"),
        (OneOdd(), [9, 20], "length=8 it does not compute the same bits"),
        (Short(), [3, 20], "it takes length from 3 to 20"),
    ],
)
def test_a_range_is_narrowed_to_what_is_proved_and_that_is_told(
    module: nn.Module, works: list[int], why: str, running: Checked
) -> None:
    name = type(module).__name__.lower()
    row = running.client.register(
        name, module, example_inputs=torch.ones(3, 10), dynamic={"x": {1: (1, 20)}}
    )
    assert running.client.show(name)["dims"]["length"] == works
    [note] = [one for one in row["notes"] if one.startswith("length")]
    assert note.startswith(f"length is {works[0]}..{works[1]}, not 1..20: ")
    assert why in note


class Edges(nn.Module):
    """Module whose edges are node numbers, so the example's edges are invalid for fewer nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor]:
        h = self.layer(x)
        return (torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]),)


def test_edges_name_nodes_that_there_are(running: Checked) -> None:
    module = served(Edges())
    example = (torch.randn(6, 4), torch.randint(0, 6, (2, 9)))
    dynamic = {"x": {0: ("nodes", 1, 64)}, "edges": {1: ("edges", 1, 99)}}
    running.client.register("graph", module, example_inputs=example, dynamic=dynamic)
    assert running.client.show("graph")["dims"] == {"nodes": [1, 64], "edges": [1, 99]}
    for nodes, edges in ((1, 3), (40, 99)):
        inputs = [torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges))]
        check_bits(running.client, "graph", module, inputs)


@pytest.mark.parametrize(
    ("module", "dynamic", "words"),
    [
        (nn.Linear(10, 3), {"x": {1: (1, 20)}}, "the model fixes length at 10"),
        (Branches(), {"y": {1: (1, 20)}}, "no input has that name"),
        (Branches(), {"x": {2: (1, 20)}}, "it has dimensions 0 to 1"),
        (Branches(), {"x": {1: (20, 1)}}, "a range is"),
        (Branches(), {"x": {1: (1, 9)}}, "the example's extent 10 is not within 1..9"),
    ],
)
def test_a_dimension_that_cannot_be_chosen_is_refused_with_the_reason(
    module: nn.Module, dynamic: Any, words: str, running: Checked
) -> None:
    with pytest.raises(ps.RegistrationRefused) as refused:
        running.client.register("odd", module, example_inputs=torch.ones(3, 10), dynamic=dynamic)
    assert words in str(refused.value)


def test_a_transformer_by_name_takes_the_lengths_it_is_asked_for(
    running: Checked, hub: Path
) -> None:
    """Register with lengths; test_programs_bitexact.py tests a registration without lengths."""
    transformers = pytest.importorskip("transformers")
    client = running.client
    transformers.AutoConfig.for_model(
        "bert",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=128,
    ).save_pretrained(hub / "bert")
    dims = dict.fromkeys(("input_ids", "attention_mask"), ((1, (2, 512)), "int64"))
    client.register("bert", f"hf:{hub / 'bert'}", weights="random:1", inputs=dims)
    assert client.show("bert")["dims"] == {"batch": [1, 64], "length": [2, 512]}
    for length in (2, 7, 512):
        answer = client.infer("bert", [np.ones((2, length), np.int64)] * 2)
        assert answer["last_hidden_state"].shape == (2, length, 32)
    with pytest.raises(ps.InvalidInput, match=r"expects int64\[1..64,2..512\], got int64\[1,1\]"):
        client.infer("bert", [np.ones((1, 1), np.int64)] * 2)


# ---- bundles of an attacker ------------------------------------------------------------------

ROWS = 1 << 12


def deep(levels: int) -> Expr:
    extent: Any = "rows"
    for _ in range(levels):
        extent = Expr("+", (extent, 1))
    return Expr("+", (extent, -levels))


def bundle(folder: Path, y: Shape, nodes: list[Node], high: int = 8) -> Path:
    """Write a bundle with an input x [rows, 4]; its output y is the value of the last node."""
    graph = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("rows", 4)),),
        weights=("w",),
        nodes=tuple(nodes),
        results=(1 + len(nodes),),
        outputs=(ValueSpec(name="y", dtype="float32", shape=y),),
        dims=(Dim("rows", 1, high),),
    )
    path = folder / "hostile.bundle"
    write_bundle(path, graph, [("w", "float32", (4,))], [np.ones(4, np.float32).tobytes()])
    return path


RELU = [Node("aten.relu.default", ({"v": 0},))]
POWER: Any = Expr("*", ("rows",) * 40)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ((deep(40), 4), "deeper than"),
        (("columns", 4), "is not a dimension of this program"),
        ((Expr("//", (4, "rows")), 4), "must be divided by a number"),
        ((Expr("**", ("rows", 2)), 4), "is not an operator"),
        ((POWER, 4), "does not fit 62 bits"),
        ((Expr("+", ("rows", -2)), 4), "would be [-1, 4]"),
        ((Expr("*", ("rows", 1 << 50)), 4), "is not a size"),
        ((1, 4), "declared float32[1, 4], computed torch.float32[2, 4]"),
    ],
)
def test_an_extent_that_an_enemy_wrote_is_refused(
    y: Shape, words: str, running: Checked, tmp_path: Path
) -> None:
    with running.running.client(tcp=True) as stranger, pytest.raises(ps.RegistrationRefused) as no:
        stranger.register("hostile", bundle(tmp_path, y, RELU))
    assert words in str(no.value)


def test_an_answer_larger_than_its_signature_says_is_an_error_and_nothing_else_is_read(
    running: Checked, tmp_path: Path
) -> None:
    """Give the output a right extent where registration checks it, and a wrong one in between."""
    whole = Expr("*", ("rows", Expr("//", ("rows", ROWS))))
    ends = Expr("min", ("rows", Expr("max", (128, whole))))
    nodes = RELU * 40  # more nodes than a check tries at once
    with running.running.client(tcp=True) as stranger:
        stranger.register("hostile", bundle(tmp_path, (ends, 4), nodes, ROWS))
        workers = running.worker_pids()
        ones = np.ones((128, 4), np.float32)
        assert stranger.infer("hostile", ones)["y"].shape == (128, 4)
        for rows in (129, 2000):
            with pytest.raises(ps.InvalidInput) as refused:
                stranger.infer("hostile", np.ones((rows, 4), np.float32))
            text = f'"y" is float32[{rows}, 4] at rows={rows}, its signature says float32[128, 4]'
            assert text in refused.value.message
        assert stranger.infer("hostile", ones)["y"].shape == (128, 4)
        stranger.unregister("hostile")
    assert running.worker_pids() == workers


def test_an_answer_that_no_memory_could_hold_is_refused_and_the_server_serves_on(
    running: Checked, tmp_path: Path
) -> None:
    """Give the output no rows where registration checks it, and 2 ** 112 bytes in between."""
    extent = Expr("*", (Expr("%", (Expr("+", ("rows", -1)), 127)), 1 << 55))
    empty = [Node("aten.slice.Tensor", ({"v": 41 + axis}, axis, 0, 0)) for axis in (0, 1)]
    with running.running.client(tcp=True) as stranger:
        path = bundle(tmp_path, (extent, extent), RELU * 40 + empty, 1 + 127 * 33)
        stranger.register("endless", path)
        with pytest.raises(ps.InvalidInput):
            stranger.infer("endless", np.ones((2, 4), np.float32))
        assert stranger.infer("endless", np.ones((128, 4), np.float32))["y"].shape == (0, 0)
        stranger.unregister("endless")
