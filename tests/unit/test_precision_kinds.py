"""Precisions over all kinds of activations, shared weights, dtypes, scales and masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.devices.cpu import packed
from pipeswitch.devices.cpu.packed import KERNELS, missing
from pipeswitch.ipc.messages.base import ResourceLimits
from pipeswitch.programs import spec as specs
from pipeswitch.programs.compiler import build_process
from pipeswitch.programs.compiler.checking import differences, is_rounded
from pipeswitch.programs.compiler.export import MAX_EXAMPLE_ROWS, export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.verify import like, load_examples
from pipeswitch.programs.graphs.bundle import EXAMPLE, read_bundle, write_bundle
from pipeswitch.programs.interface import packing
from pipeswitch.programs.spec import BuildSpec
from tests.unit.test_precision import answers, built, outputs_of, packing_always_pays

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"packed weights: {missing()}")
assert packing_always_pays  # a fixture for all tests here

FORMS = ("fast", "bf16", "int8")
Activation = tuple[str, list[float], str, Callable[[torch.Tensor], torch.Tensor]]
FUSED: tuple[Activation, ...] = (
    ("none", [], "", lambda y: y),
    ("relu", [], "", torch.relu),
    ("sigmoid", [], "", torch.sigmoid),
    ("tanh", [], "", torch.tanh),
    ("hardswish", [], "", functional.hardswish),
    ("hardsigmoid", [], "", functional.hardsigmoid),
    ("swish", [], "", functional.silu),
    ("hardtanh", [0.0, 6.0], "", functional.relu6),
    ("hardtanh", [-0.5, 0.25], "", lambda y: y.clamp(-0.5, 0.25)),
    ("leaky_relu", [0.01], "", functional.leaky_relu),
    ("leaky_relu", [0.0], "", lambda y: functional.leaky_relu(y, 0.0)),
    ("leaky_relu", [-0.5], "", lambda y: functional.leaky_relu(y, -0.5)),
    ("gelu", [], "none", functional.gelu),
    ("gelu", [], "tanh", lambda y: functional.gelu(y, approximate="tanh")),
)
ODD = (math.nan, math.inf, -math.inf)


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype is theirs.dtype
    scale = theirs.double().abs().max().clamp(min=1e-30)
    return float((ours.double() - theirs.double()).abs().max() / scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", ["linear", "few rows", "convolution", "depthwise", "sum"])
@pytest.mark.parametrize("after", FUSED, ids=lambda one: f"{one[0]}{one[1]}{one[2]}")
def test_a_fused_activation_keeps_nan_and_infinities(
    after: Activation, product: str, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and not KERNELS.supports_bfloat16():
        pytest.skip("this processor has no bfloat16")
    *how, function = after
    operators, is_linear = KERNELS.operators(), product in ("linear", "few rows")
    groups = 16 if product == "depthwise" else 1
    weight = torch.randn(48, 64) if is_linear else torch.randn(16, 16 // groups, 3, 3)
    weight, bias = weight.to(dtype), torch.randn(len(weight)).to(dtype)
    shape = (1 if product == "few rows" else 8, 64) if is_linear else (2, 16, 10, 10)
    places = [1, 1], [1, 1], [1, 1], groups
    pack = (weight,) if is_linear else (weight, *places, shape)
    kernel = KERNELS.pack_linear if is_linear else KERNELS.pack_convolution
    layout, data = kernel(*pack)  # type: ignore[operator]
    wrapped, other = KERNELS.wrap(data, layout), torch.randn(shape).to(dtype)
    for odd in ODD:
        x = torch.randn(shape).to(dtype)
        x.view(-1)[7] = odd
        if is_linear:
            ours = operators[packing.LINEAR](x, wrapped, bias, *how)
            plain = functional.linear(x, weight, bias)
        else:
            plain = functional.conv2d(x, weight, bias, 1, 1, 1, groups)
            if product == "sum":
                plain = plain + other
                if how[0] not in ("none", "relu"):  # others are not fused into a sum
                    return
                ours = operators[packing.CONVOLUTION_ADD](x, other, wrapped, bias, *places, *how)
            else:
                ours = operators[packing.CONVOLUTION](x, wrapped, bias, *places, *how)
        theirs = function(plain)
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0.3, equal_nan=True)


def test_a_kernel_that_makes_numbers_of_nan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_LOSSY", ())
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with pytest.raises(RegistrationRefused, match="an input is nan"):
        built(module, (torch.randn(2, 64),), tmp_path, "fast", max_error=1e-3)


W, D = torch.randn(32, 16, 3, 3) / 12, torch.randn(64, 64) / 8
conv = functional.conv2d
SHARED: Mapping[str, Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "biases": lambda m, x: (conv(x, m.w, m.a).relu(), conv(x, m.w, m.b).sigmoid()),
    "a bias and none": lambda m, x: (conv(x, m.w, m.a), conv(x, m.w)),
    "groups": lambda m, x: (conv(x, m.w), conv(torch.cat([x, x], 1), m.w, groups=2)),
    "strides": lambda m, x: (conv(x, m.w, stride=2), conv(x, m.w, m.b, stride=[1, 2])),
    "paddings": lambda m, x: (conv(x, m.w, padding=1), conv(x, m.w, padding=[0, 1])),
    "dilations": lambda m, x: (conv(x, m.w, dilation=2), conv(x, m.w)),
    "norms": lambda m, x: (m.n(conv(x, m.w, m.a)), m.o(conv(x, m.w, m.a)), conv(x, m.w, m.a)),
    "norms and biases": lambda m, x: (m.n(conv(x, m.w, m.a)), m.n(conv(x, m.w, m.b))),
    "transposed": lambda m, x: (functional.conv_transpose2d(conv(x, m.w), m.w), conv(x, m.w)),
    "linear": lambda m, x: (m.f(x) @ m.d.t(), functional.linear(m.f(x), m.d, m.e)),
    "addmm": lambda m, x: (torch.addmm(m.e, m.f(x), m.d), functional.linear(m.f(x), m.d, m.e)),
    "table": lambda m, x: (
        m.d[m.i],
        functional.embedding(m.i, m.d),
        functional.linear(m.f(x), m.d),
    ),
}


class Sharing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.w, self.d = kind, nn.Parameter(W), nn.Parameter(D)
        self.a, self.b = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))
        self.e, self.g = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))
        self.n, self.o = nn.BatchNorm2d(32), nn.BatchNorm2d(32)
        nn.init.uniform_(self.n.weight, 0.5, 2.0)
        self.register_buffer("i", torch.tensor([3, 0, 63]))

    def f(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :64]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return SHARED[self.kind](self, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SHARED)
def test_a_weight_with_several_uses_serves_each_of_them(
    kind: str, form: str, tmp_path: Path
) -> None:
    module, x = Sharing(kind).eval().requires_grad_(False), torch.randn(2, 16, 12, 12)
    manifest = built(module, (x,), tmp_path, form)
    if manifest.precision is None:
        assert "it saves no bytes" in manifest.extra["notes"][-1]
        return
    for ours, theirs in zip(answers(manifest, tmp_path, (x,)), outputs_of(module, x), strict=True):
        assert error_of(ours, theirs) <= max(manifest.precision.max_error, 1e-6) < 0.1


class Layers(nn.Module):
    """One layer of a kind in ``dtype``, and a linear one; the answer is in ``answer``."""

    def __init__(self, kind: str, dtype: torch.dtype, answer: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype, self.answer = kind, dtype, answer
        make, self.shape = LAYERS[kind]
        self.first, self.last = make().to(dtype), nn.Linear(64, 64).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.long() % 64 if self.kind == "embedding" else x.to(self.dtype)
        y = self.first(y.reshape(len(x), *self.shape)).flatten(1)[:, :64]
        return (4 * self.last(torch.tanh(y))).to(self.answer)


LAYERS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 64), (64,)),
    "conv1d": (lambda: nn.Conv1d(8, 32, 3, padding=1), (8, 8)),
    "conv2d": (lambda: nn.Conv2d(8, 32, 3, padding=1), (8, 8, 1)),
    "conv3d": (lambda: nn.Conv3d(8, 32, 3, padding=1), (8, 8, 1, 1)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 32, 3, padding=1), (8, 8, 1)),
    "depthwise": (lambda: nn.Conv2d(8, 128, 3, padding=1, groups=8), (8, 8, 1)),
    "embedding": (lambda: nn.Embedding(64, 64), (64,)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TAKEN = (*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool)
MIXES = [
    *((kind, torch.float32, torch.float32, torch.float32) for kind in LAYERS),
    *(("linear", taken, torch.float32, torch.float32) for taken in TAKEN[1:]),
    *(("linear", held, held, held) for held in DTYPES[1:]),
    *(("conv2d", held, held, held) for held in DTYPES[1:]),
    *(("embedding", torch.int64, held, held) for held in DTYPES[1:]),
    *(("linear", torch.float32, torch.float32, given) for given in (*DTYPES[1:], torch.int32)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "taken", "held", "given"), MIXES, ids=lambda one: str(one).removeprefix("torch.")
)
def test_layers_of_each_kind_answer_in_the_modules_dtype(
    kind: str, taken: torch.dtype, held: torch.dtype, given: torch.dtype, form: str, tmp_path: Path
) -> None:
    module = Layers(kind, held, given).eval().requires_grad_(False)
    x = torch.randn(4, 64) if taken.is_floating_point else torch.randint(0, 2, (4, 64))
    manifest = built(module, (x.to(taken),), tmp_path, form, max_error=0.3)
    if manifest.precision is None:
        assert "stays exact" in manifest.extra["notes"][-1]
        return
    [ours], [theirs] = answers(manifest, tmp_path, (x.to(taken),)), outputs_of(module, x.to(taken))
    assert error_of(ours, theirs) <= manifest.precision.max_error + 1e-6
    assert form == "fast" or manifest.total_bytes < manifest.precision.plain_bytes


def columns(rows: int) -> torch.Tensor:
    ends = (
        (2015.0, 2027.0),
        (273.0, 303.0),
        (1e5, 1.03e5),
        (0.0, 1.0),
        (-180.0, 180.0),
        (1e-3, 2e-3),
    )
    return torch.stack([torch.rand(rows) * (b - a) + a for a, b in ends], 1)


NETS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32)),
        lambda: torch.randn(4, 64) * 20 + 300,
    ),
    "ids": (
        lambda: nn.Sequential(
            nn.Embedding(5000, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)
        ),
        lambda: torch.randint(4000, 5000, (2, 12)),
    ),
    "columns": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 64)),
        lambda: columns(4),
    ),
}


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("name", NETS)
def test_a_hundred_fresh_inputs_are_within_the_printed_error(
    name: str, form: str, tmp_path: Path
) -> None:
    module, draw = NETS[name][0]().eval(), NETS[name][1]
    manifest = built(module, (draw(),), tmp_path, form, max_error=0.5)
    assert manifest.precision is not None
    for _ in range(100):
        x = draw()
        [ours], [theirs] = answers(manifest, tmp_path, (x,)), outputs_of(module, x)
        assert error_of(ours, theirs) <= manifest.precision.max_error
    assert manifest.precision.max_error < 0.1


class Raw(nn.Module):
    """Columns as they are, compared by their last digits; ``end`` makes the answer of them."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(6, 256), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.end(y - y.mean(0, keepdim=True))


MASKED = torch.arange(256) % 4 == 0
ENDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers": lambda y: y,
    "integers": lambda y: y.round().long(),
    "choices": lambda y: y.argmax(-1),
    "filled": lambda y: y.masked_fill(MASKED, -1e9),
    "added": lambda y: y + MASKED * -1e9,
    "least": lambda y: y + MASKED * torch.finfo(torch.float32).min,
    "infinite": lambda y: y.masked_fill(MASKED, -math.inf),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("end", ENDS)
def test_an_error_at_the_examples_scale_is_seen_in_any_answer(
    end: str, rows: int, tmp_path: Path
) -> None:
    module = Raw(ENDS[end])
    if rows == 1:
        module.end = lambda y: ENDS[end](y - 700.0 * module.linear.weight.sum(1))
    with pytest.raises(RegistrationRefused, match=r"the error is|not finite"):
        built(module, (columns(rows),), tmp_path, "bf16", max_error=0.01)


@pytest.mark.parametrize("mask", [-1e4, -65504.0, -1e9, 1e30, torch.finfo(torch.float32).min])
def test_masks_do_not_count_in_the_scale(mask: float) -> None:
    theirs = torch.randn(8, 8)
    theirs[:, ::2] = mask
    ours = theirs + torch.where(theirs == mask, 0.0, 0.01)
    difference, scale = differences(ours, theirs)
    assert scale == float(theirs[:, 1::2].abs().max())
    assert 0.0099 < float(difference.max()) < 0.0101
    assert not is_rounded(ours + torch.where(theirs == mask, 0.0, 0.1), theirs)


def test_random_inputs_are_like_the_example() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(example: torch.Tensor) -> torch.Tensor:
        return torch.cat([like(example, example, generator) for _ in range(50)])

    for example in (torch.zeros(2, 8), torch.ones(1, 8)):  # a constant says little
        assert 0.8 < float(drawn(example).std()) < 1.2
    table = columns(8)
    for new, old in zip(drawn(table).t(), table.t(), strict=True):
        assert abs(float(new.mean() - old.mean())) < float(old.std())
        assert 0.5 < float(new.std() / old.std()) < 1.5
    assert bool(((drawn(table[:1]) - table[0]).abs() <= 0.11 * table[0].abs()).all())
    assert float(drawn(torch.rand(4, 16)).min()) >= 0.0  # a model may take its root
    years = drawn(torch.tensor([[2015, 3], [2026, 7], [2020, 0]]))
    assert [*years.amin(0), *years.amax(0)] == [2015, 0, 2026, 7]
    kept = torch.tensor([[0.0, -math.inf]])
    assert torch.equal(like(kept, kept, generator), kept)


def test_a_bundle_keeps_rows_of_its_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, path = torch.randn(40, 64), tmp_path / "m.bundle"
    export_module_to_bundle(nn.Linear(64, 64), (x,), path)
    assert torch.equal(load_examples(path, read_bundle(path))[0], x[:MAX_EXAMPLE_ROWS])
    monkeypatch.setattr("pipeswitch.programs.compiler.export.MAX_EXAMPLE_BYTES", 100)
    row = export_module_to_bundle(nn.Linear(64, 64), (x,), path)
    assert not read_bundle(path).examples
    assert "is not kept" in row["notes"][-1]


@pytest.mark.parametrize(
    ("name", "shape"), [("other", (2, 8)), (f"{EXAMPLE}1", (2, 8)), (f"{EXAMPLE}0", (2, 7))]
)
def test_tensors_that_are_not_the_inputs_are_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "m.bundle"
    export_module_to_bundle(nn.Linear(8, 8, bias=False), (torch.randn(2, 8),), path)
    graph = read_bundle(path).graph
    tensors = [(graph.weights[0], "float32", (8, 8)), (name, "float32", shape)]
    write_bundle(path, graph, tensors, [bytes(256), bytes(4 * math.prod(shape))])
    with pytest.raises(RegistrationRefused, match="bundle"):
        read_bundle(path)


def test_builders_read_the_processors_features_before_they_are_confined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # builders set it
    steps: list[str] = []
    for name in ("processor_features", "_confine", "_limit"):
        monkeypatch.setattr(build_process, name, lambda *_, name=name: steps.append(name))
    spec = specs.msgspec.msgpack.encode(BuildSpec(name="m", source="/none.bundle"))
    settings = build_process.BuildSettings(
        model="m",
        op_id=1,
        directory=str(tmp_path),
        spec=spec,
        limits=ResourceLimits(threads=torch.get_num_threads(), is_sandboxed=True),
    )
    build_process.run(settings, SimpleNamespace(send=print))  # type: ignore[arg-type]
    assert steps == ["_limit", "processor_features", "_confine"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loop = torch._higher_order_ops.while_loop  # type: ignore[attr-defined]
        start = torch.tensor(0), torch.cond(x.sum() > 0, self.a, lambda x: self.b(x) * 2, (x,))
        y: torch.Tensor = loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.a(y)), start)[1]
        return y


def test_branches_and_loops_on_data_are_served_in_module_mode(tmp_path: Path) -> None:
    spec = BuildSpec(
        name="m",
        source=f"{__name__}:Branch",
        weights="random:0",
        inputs={"x": ((2, 16), "float32")},
        allow_module_mode=True,
    )
    assert build(spec, tmp_path / "m", lambda *progress: None).mode == "module"
