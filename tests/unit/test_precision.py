"""Programs in another precision: packed weights, fused operators, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.devices.cpu.packed import KERNELS, CpuKernels, missing, missing_int8
from pipeswitch.devices.torch_kernels import TorchKernels, to_tf32
from pipeswitch.programs.compiler import fusing, precision
from pipeswitch.programs.compiler import program as building
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.fusing import call_times, quantized
from pipeswitch.programs.compiler.precision import derive
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.graphs.bundle import decode_graph, encode_graph, read_bundle
from pipeswitch.programs.graphs.contracts import BrokenContract
from pipeswitch.programs.graphs.graph import resolve
from pipeswitch.programs.interface import packing
from pipeswitch.programs.interface.layout import KindSettings, Manifest
from pipeswitch.programs.running import executor
from pipeswitch.programs.running.executor import GraphProgram, fitting
from pipeswitch.programs.spec import BuildSpec, fingerprint, is_packed_for
from tests.models import loading

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"packed weights: {missing()}")


class Block(nn.Module):
    """A residual block of a convolutional network, followed by a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.third = nn.Conv2d(8, 16, 1)
        self.last = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)
        for norm in (self.norm, self.last):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = torch.relu_(self.last(self.second(y)) + self.third(x))
        return self.head(y.mean((2, 3)))


class Written(nn.Module):
    """Model with a product whose computation must not move behind a later in-place write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + 1.0
        y = self.linear(x)
        x.add_(y)
        x.mul_(2.0)
        return torch.relu(y), x


class Activated(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.convolution = nn.Linear(16, 32), nn.Conv2d(4, 8, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.activation(self.linear(x)), self.activation(self.convolution(y))


ACTIVATIONS = {
    "relu": torch.relu,
    "relu6": nn.functional.relu6,
    "gelu": nn.functional.gelu,
    "gelu-tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": nn.functional.hardswish,
    "hardsigmoid": nn.functional.hardsigmoid,
    "hardtanh": nn.functional.hardtanh,
    "leaky": nn.functional.leaky_relu,
    "leaky-2": lambda x: nn.functional.leaky_relu(x, 0.2),
    "clamp": lambda x: x.clamp(-0.1, 0.2),
    "clamp-one": lambda x: x.clamp(min=0.1),
    "softplus": nn.functional.softplus,
}


@pytest.fixture(autouse=True)
def packing_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that packing is always faster, because tests' small calls often are not."""

    def timed(*walks: Any, inputs: Any) -> list[list[float]]:
        plain_ms, packed_ms = call_times(*walks, inputs=inputs)
        return [[2.0] * len(plain_ms), [1.0] * len(packed_ms)]

    monkeypatch.setattr(fusing, "call_times", timed)
    monkeypatch.setattr(fusing, "MAX_RUNS", 1)
    monkeypatch.setattr(precision, "call_times", timed)
    torch.manual_seed(0)


def built(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    folder: Path,
    precision: str = "fast",
    packs_weights: bool = True,
    **options: Any,
) -> Manifest:
    folder.mkdir(exist_ok=True)
    export_module_to_bundle(module.eval(), inputs, folder / "m.bundle")
    spec = BuildSpec(name="m", source=str(folder / "m.bundle"), precision=precision, **options)
    return build(spec, folder / "out", lambda *progress: None, packs_weights=packs_weights)


def again(folder: Path, out: str, *, packs_weights: bool = True, **options: Any) -> Manifest:
    """Build the program in a folder again, into another folder beside it."""
    spec = BuildSpec(name="m", source=str(folder / "program.bundle"), **options)
    return build(spec, folder.parent / out, lambda *progress: None, packs_weights=packs_weights)


def answers(
    manifest: Manifest, folder: Path, inputs: tuple[torch.Tensor, ...], out: str = "out"
) -> list[torch.Tensor]:
    is_packed = manifest.precision is not None and manifest.precision.layout == "onednn"
    bound = loading.bound(folder / out, manifest, KERNELS if is_packed else TorchKernels())
    return bound.run([value.clone() for value in inputs], lambda index: None)


def targets(folder: Path) -> list[str]:
    graph = read_bundle(folder / "out" / packing.DERIVED_FILE, is_derived=True).graph
    return [node.target for node in graph.nodes]


def test_a_residual_block_becomes_three_calls(tmp_path: Path) -> None:
    module, x = Block(), torch.randn(3, 8, 12, 12)
    manifest = built(module, (x,), tmp_path)
    assert manifest.precision is not None
    assert manifest.precision.max_error < 1e-5
    assert manifest.precision.agreement == 1.0
    assert targets(tmp_path).count(packing.CONVOLUTION) == 2
    assert targets(tmp_path).count(packing.CONVOLUTION_ADD) == 1
    assert not [name for name in targets(tmp_path) if "norm" in name or "relu" in name]
    for rows in (1, 3, 7):
        image = torch.randn(rows, 8, 12, 12)
        torch.testing.assert_close(answers(manifest, tmp_path, (image,))[0], module(image))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_fused_activation_equals_the_modules(name: str, packs: bool, tmp_path: Path) -> None:
    module = Activated(ACTIVATIONS[name])
    inputs = torch.randn(2, 16), torch.randn(2, 4, 9, 9)
    manifest = built(module, inputs, tmp_path, packs_weights=packs)
    for ours, theirs in zip(answers(manifest, tmp_path, inputs), module(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_product_is_not_moved_over_a_write(tmp_path: Path) -> None:
    module, x = Written(), torch.randn(2, 16)
    manifest = built(module, (x,), tmp_path)
    assert packing.LINEAR in targets(tmp_path)
    for ours, theirs in zip(answers(manifest, tmp_path, (x,)), module(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_sum_that_broadcasts_is_not_fused(tmp_path: Path) -> None:
    class Broad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + x.mean(0, keepdim=True)  # equal shapes only for one row

    module = Broad()
    manifest = built(module, (torch.randn(1, 16),), tmp_path)
    x = torch.randn(5, 16)
    torch.testing.assert_close(answers(manifest, tmp_path, (x,))[0], module(x))


VIEWS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda y: y.view(y.shape[0], -1),
    "relu": lambda y: torch.relu(y).view(-1, 16 * 36),
    "all": lambda y: y.view(-1),
    "channels": lambda y: y.view(y.shape[0] * 16, 36),
    "shuffle": lambda y: y.view(-1, 4, 4, 6, 6).transpose(1, 2).contiguous().view(-1, 16, 6, 6),
    "pooled": lambda y: nn.functional.max_pool2d(y, 2).view(y.shape[0], -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_convolution_is_the_modules(name: str, tmp_path: Path) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return VIEWS[name](self.second(self.first(x)))

    module = Viewed()
    manifest = built(module, (torch.randn(3, 8, 6, 6),), tmp_path)
    assert manifest.precision is not None
    for rows in (1, 3):
        x = torch.randn(rows, 8, 6, 6)
        torch.testing.assert_close(answers(manifest, tmp_path, (x,))[0], module(x))


WRITES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda y: y.view(y.shape[0], -1).clamp_(max=1.0).view(y.shape) + y,
    "reshape": lambda y: y + y.reshape(y.shape[0], -1).clamp_(max=1.0).sum(),
    "flatten": lambda y: (y.flatten(1).clamp_(max=1.0), y)[1],
    "slice": lambda y: (lambda part: (y.view(y.shape[0], -1).clamp_(max=1.0), part)[1])(y[:, 1:]),
    "permuted": lambda y: (y.permute(0, 2, 3, 1).reshape(y.shape[0], -1).clamp_(max=1.0), y)[1],
    "sum": lambda y: (lambda z: (z.flatten(1).clamp_(max=1.0), z)[1])(y * 2.0),
}


@pytest.mark.parametrize("form", ["fast", "bf16"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_reaches_what_it_reaches_in_the_module(
    name: str, form: str, tmp_path: Path
) -> None:
    """A packed convolution's result has other strides, so an operator that returns a view in the
    module may return a copy here, or the reverse. The example is too small to be clamped."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv2d(8, 16, 3, padding=1), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return WRITES[name](self.convolution(x)), self.head(x.flatten(1)[:, :64])

    module, x = Written().requires_grad_(False), torch.randn(2, 8, 6, 6)
    manifest = built(module, (x * 1e-2,), tmp_path, form)
    assert manifest.precision is not None
    assert manifest.precision.packed_count <= 1
    for ours, theirs in zip(answers(manifest, tmp_path, (x * 9,)), module(x * 9), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("form", ["fast", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float16])
def test_a_sum_with_another_dtype_is_not_fused(
    dtype: torch.dtype, form: str, tmp_path: Path
) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            crossed = self.linear(x.exp()).clamp(0.3, 0.1)  # kernels refuse such limits
            return torch.relu(self.convolution(x) + y), self.linear(x) + y, crossed

    inputs = torch.randn(2, 4, 6, 64), (torch.randn(2, 4, 6, 64) * 5).to(dtype)
    module = Sum().requires_grad_(False)
    manifest = built(module, inputs, tmp_path, form)
    assert manifest.precision is not None
    for ours, theirs in zip(answers(manifest, tmp_path, inputs), module(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-2)


def test_a_call_is_packed_if_it_gains_at_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {2: (1.0, 1.04), 8: (3.0, 2.0)}  # number of rows -> ms unpacked, ms packed

    def timed(*_: Any, inputs: Any) -> list[list[float]]:
        return [[one] for one in times[len(inputs[0])]]

    monkeypatch.setattr(fusing, "call_times", timed)
    manifest = built(nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path)
    assert manifest.precision is not None
    assert "batch=8" in manifest.extra["notes"][-1]
    times[8] = (3.0, 3.0)
    assert built(nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path / "b").precision is None


@pytest.mark.parametrize("loser", [2, 8])
@pytest.mark.parametrize(("loss_ms", "count"), [(0.19, 1 + 2), (0.04, 1 + 9), (0.9, 1)])
def test_calls_that_lose_most_for_their_gain_stay_plain(
    loss_ms: float, count: int, loser: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*_: Any, inputs: Any) -> list[list[float]]:
        if len(inputs[0]) != loser:
            return [[3.0] * 9 + [9.0], [1.0] * 10]
        return [[1.0] * 10, [1.0 + loss_ms] * 9 + [1.1]]

    monkeypatch.setattr(fusing, "call_times", timed)
    body = [nn.Linear(16, 16) for _ in range(9)]
    module, x = nn.Sequential(*body, nn.Linear(16, 32)), torch.randn(2, 16)
    manifest = built(module, (x,), tmp_path)
    assert manifest.precision is not None
    assert manifest.precision.packed_count == count
    assert manifest.precision.plain_count == 10 - count
    torch.testing.assert_close(answers(manifest, tmp_path, (x,))[0], module(x))


@pytest.mark.parametrize(("loss_ms", "plain"), [(0.09, 0), (0.11, 1)])
def test_linear_layers_may_lose_half_a_percent(
    loss_ms: float, plain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [[10.0, 0.5], [5.0, 0.5 + loss_ms / 2]]  # 21 ms in both shapes together
    monkeypatch.setattr(fusing, "call_times", lambda *_, inputs: calls)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32))
    manifest = built(module, (torch.randn(2, 16),), tmp_path)
    assert manifest.precision is not None
    assert (manifest.precision.packed_count, manifest.precision.plain_count) == (2 - plain, plain)


class OneRow(KindSettings, frozen=True):
    """Settings of a kind whose most runs have one row, such as language models."""

    kind = "one"
    low_dims = ("length", "batch")


def test_a_language_model_is_timed_at_one_stream_and_at_eight(tmp_path: Path) -> None:
    manifest = built(nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path)
    manifest.extra["example_dims"]["batch"] = 2
    for settings, rows in ((None, [2, 8]), (OneRow(), [1, 8])):
        shapes = precision._shapes(manifest, (), settings)[: fusing.TIMED]
        assert [shape["batch"] for shape in shapes] == rows


@pytest.mark.parametrize("how", ["wrong", "nan"])
def test_a_form_that_disagrees_is_refused(how: str, tmp_path: Path) -> None:
    class Lying(CpuKernels):
        def operators(self) -> Mapping[str, Callable[..., torch.Tensor]]:
            def lie(*arguments: Any) -> torch.Tensor:
                output = super(Lying, self).operators()[packing.LINEAR](*arguments)
                return output * (1.01 if how == "wrong" else float("nan"))

            return {**super().operators(), packing.LINEAR: lie}

    built(nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path)
    export_module_to_bundle(nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path / "n.bundle")
    spec = BuildSpec(name="m", source=str(tmp_path / "n.bundle"))
    plain = build(spec, tmp_path / "plain", lambda stage, fraction: None)
    with pytest.raises(RegistrationRefused) as caught:
        derive(plain, tmp_path / "plain", replace(spec, precision="fast"), Lying())
    assert caught.value.data["part"] == "precision 'fast'"


def test_an_error_over_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused, match="max_error"):
        built(Block(), (torch.randn(3, 8, 12, 12),), tmp_path, max_error=1e-12)


def test_a_model_that_gains_nothing_stays_exact(tmp_path: Path) -> None:
    manifest = built(nn.Softmax(-1), (torch.randn(2, 16),), tmp_path)
    exact = built(nn.Softmax(-1), (torch.randn(2, 16),), tmp_path, "exact")
    assert manifest.precision is exact.precision is None
    assert manifest.digest != exact.digest  # with equal digests, both would get the same notes
    assert "it stays exact" in manifest.extra["notes"][-1]
    assert not (tmp_path / "out" / packing.DERIVED_FILE).exists()


def test_two_graphs_run_in_turns_and_each_call_is_timed(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    export_module_to_bundle(module, (x,), tmp_path / "n.bundle")
    graph = read_bundle(tmp_path / "n.bundle").graph
    log: list[str] = []

    def look_up(mark: str) -> Callable[[str], Callable[..., Any]]:
        return lambda target: lambda *values: (log.append(mark), resolve(target)(*values))[1]

    weights = [*module.state_dict().values()]
    walks = [(graph, weights, look_up(mark)) for mark in "ab"]
    for times_ms in call_times(*walks, inputs=[x]):
        assert len(times_ms) == len(graph.nodes) == 2
        assert all(0.0 <= one < 1e3 for one in times_ms)
    assert "".join(log) == "aabb" * fusing.MAX_RUNS


@pytest.mark.parametrize(("fast_ms", "gains"), [(0.99, False), (0.9, True)])
def test_a_gain_within_the_noise_of_a_measurement_is_none(
    fast_ms: float, gains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "call_times", lambda *_, inputs: [[1.0], [fast_ms]])
    manifest = built(nn.Linear(64, 64), (torch.randn(2, 64),), tmp_path)
    assert (manifest.precision is not None) is gains
    for module in (fusing, precision):
        monkeypatch.setattr(module, "call_times", None)  # a rebuild times nothing
    manifest = again(tmp_path / "out", "again", precision="fast")
    assert (manifest.precision is not None) is gains


@pytest.mark.parametrize("name", ["fast", "bf16", "int8"])
def test_other_weights_take_the_times_and_are_compared_anew(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = torch.randn(2, 8, 12, 12), Block().eval()
    base = built(Block(), (x,), tmp_path, name).precision
    save_file(other.state_dict(), weights := tmp_path / "other.safetensors")
    for module in (fusing, precision):
        monkeypatch.setattr(module, "call_times", None)
    manifest = again(tmp_path / "out", "new", weights=str(weights), precision=name)
    assert base is not None
    assert manifest.precision is not None
    assert manifest.precision.ms == base.ms
    assert manifest.precision.max_error != base.max_error
    [answer] = answers(manifest, tmp_path, (x,), "new")
    torch.testing.assert_close(answer, other(x), rtol=0.1, atol=0.1 if name != "fast" else 1e-4)


@pytest.mark.parametrize("there", ["more threads", "torch's layout"])
def test_a_rebuild_packs_the_same_calls_whatever_it_measures(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(first_ms: float, last_ms: float) -> None:
        times = [[2.0, 2.0], [first_ms, last_ms]]
        monkeypatch.setattr(fusing, "call_times", lambda *_, inputs: times)

    def once_more(number: int, **options: bool) -> Manifest:
        return again(tmp_path / f"{number - 1}", f"{number}", precision="fast", **options)

    measure(3.0, 1.0)
    layers = nn.Linear(16, 16), nn.Linear(16, 32)
    first = built(nn.Sequential(*layers), (torch.randn(2, 16),), tmp_path)
    (tmp_path / "out").rename(tmp_path / "0")
    measure(1.0, 3.0)
    monkeypatch.setattr(precision, "call_times", lambda *_, inputs: [[1.0], [2.0]])  # no gain
    assert once_more(1).digest == first.digest
    monkeypatch.setattr(precision, "call_times", lambda *_, inputs: [[2.0], [1.0]])
    if there == "more threads":
        monkeypatch.setattr(precision, "fingerprint", lambda *_: there)
        assert once_more(2).digest != first.digest  # measured there
    else:
        assert once_more(2, packs_weights=False).digest != first.digest
    monkeypatch.setattr(precision, "fingerprint", fingerprint)
    assert once_more(3).digest == first.digest


def test_machines_that_derive_other_forms_name_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = nn.Linear(64, 64), torch.randn(2, 64)
    packed = built(module, (x,), tmp_path)
    monkeypatch.setattr(precision, "call_times", lambda *_, inputs: [[1.0], [2.0]])
    slower, exact = (built(module, (x,), tmp_path, form) for form in ("fast", "exact"))
    assert packed.program == slower.program != exact.program
    assert len({packed.digest, slower.digest, exact.digest}) == 3


def test_a_clients_bundle_may_not_be_packed(tmp_path: Path) -> None:
    built(Block(), (torch.randn(3, 8, 12, 12),), tmp_path)
    derived = tmp_path / "out" / packing.DERIVED_FILE
    with pytest.raises(RegistrationRefused):
        read_bundle(derived)
    graph = read_bundle(derived, is_derived=True).graph
    with pytest.raises(RegistrationRefused):
        decode_graph(encode_graph(replace(graph, packed={})))
    with pytest.raises(RegistrationRefused):
        build(BuildSpec(name="m", source=str(derived)), tmp_path / "b", lambda *progress: None)


def test_weights_packed_for_another_server_are_refused(tmp_path: Path) -> None:
    manifest = built(Block(), (torch.randn(3, 8, 12, 12),), tmp_path)
    threads = torch.get_num_threads()
    assert is_packed_for(manifest, "onednn", threads)
    assert not is_packed_for(manifest, "torch", threads)
    assert not is_packed_for(manifest, "onednn", threads + 1)
    assert manifest.precision is not None
    moved = replace(manifest, precision=replace(manifest.precision, fingerprint="another"))
    assert not is_packed_for(moved, "onednn", threads)


def with_other_threads() -> nn.Module:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return Block()


def test_weights_are_packed_for_the_servers_threads_whatever_a_factory_sets(tmp_path: Path) -> None:
    threads, inputs = torch.get_num_threads(), {"x": ((3, 8, 12, 12), "float32")}
    source = f"{__name__}:{with_other_threads.__name__}"
    spec = BuildSpec(name="m", source=source, inputs=inputs, precision="bf16")
    try:
        manifest = build(spec, tmp_path / "out", lambda *progress: None)
    finally:
        torch.set_num_threads(threads)
    assert manifest.precision is not None
    assert is_packed_for(manifest, "onednn", threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 3])
def test_a_layouts_description_has_nothing_of_the_stack(
    side: int, stride: int, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and not KERNELS.supports_bfloat16():
        pytest.skip("this processor has no bfloat16")
    weight, how = torch.randn(32, 16, side, side).to(dtype), ([0, 0], [stride, stride], [1, 1])

    def layouts() -> list[packing.PackedLayout]:
        convolution, _ = KERNELS.pack_convolution(weight, *how, 1, (1, 16, 16, 16))
        return [convolution, KERNELS.pack_linear(weight[:, :, 0, 0])[0]]

    alike = {"initializer": torch.set_num_threads, "initargs": (torch.get_num_threads(),)}
    with ThreadPoolExecutor(1, **alike) as pool:  # its stack has other addresses
        assert pool.submit(layouts).result() == layouts()


@pytest.mark.parametrize("shape", [(2, 15), (2, 17), (15,), (), (2, 2, 2, 2, 8)])
def test_an_input_that_does_not_fit_its_packed_weight_is_refused(shape: tuple[int, ...]) -> None:
    layout, data = KERNELS.pack_linear(torch.randn(8, 16))
    weight = KERNELS.wrap(data, layout)
    call = fitting(KERNELS.operators()[packing.LINEAR])
    with pytest.raises(BrokenContract):
        call(torch.randn(shape), weight, None, "none", [], "")
    for rows in ((), (2,), (2, 2, 2, 2)):
        assert call(torch.randn(*rows, 16), weight, None, "none", [], "").shape == (*rows, 8)


@pytest.mark.parametrize("how", ["description", "shape", "dtype", "unread", "plain"])
def test_a_layout_that_a_builder_made_up_is_refused(how: str, tmp_path: Path) -> None:
    manifest = built(Block(), (torch.randn(3, 8, 12, 12),), tmp_path)
    graph = read_bundle(tmp_path / "out" / packing.DERIVED_FILE, is_derived=True).graph
    name = next(name for name in graph.packed if "head" in name)
    layout, packed = graph.packed[name], dict(graph.packed)
    match how:
        case "description":
            first = layout.description[0] ^ 1
            description = bytes([first]) + layout.description[1:]
            packed[name] = replace(layout, description=description)
        case "shape":
            packed[name] = replace(layout, shape=(layout.shape[0] * 2, layout.shape[1]))
        case "dtype":
            packed[name] = replace(layout, dtype="bfloat16")
        case "unread":
            packed[graph.weights[-1]] = layout
        case "plain":
            del packed[name]
    with pytest.raises(RegistrationRefused):
        GraphProgram(manifest, replace(graph, packed=packed), "cpu", KERNELS)


@pytest.mark.parametrize(
    "shape", [(), (1, 8, 12), (1, 7, 12, 12), (0, 8, 12, 12), (1, 8, -5, 12), (1, 8, 1, 1 << 62)]
)
def test_a_layout_for_an_input_that_cannot_be_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    manifest = built(Block(), (torch.randn(3, 8, 12, 12),), tmp_path)
    graph = read_bundle(tmp_path / "out" / packing.DERIVED_FILE, is_derived=True).graph
    name = next(name for name in graph.packed if "third" in name)
    layout = graph.packed[name]
    assert layout.input_shape == (3, 8, 12, 12)
    packed = dict(graph.packed) | {name: replace(layout, input_shape=shape, description=b"")}
    with pytest.raises(RegistrationRefused):
        GraphProgram(manifest, replace(graph, packed=packed), "cpu", KERNELS)


# --- bfloat16 and int8 ------------------------------------------------------------------------


class Layer(nn.Module):
    """Transformer layer with a token table, which is also the weight of the output head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.LayerNorm(64)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) / 8.0
        x = x + torch.softmax(scores, -1) @ self.value(y)
        x = x + self.down(nn.functional.gelu(self.up(self.last(x))))
        return self.head(x)


class Shared(nn.Module):
    """Model that changes views of a product in place, and later reads other views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        part = y[:, :32]
        part.add_(1.0)
        z = self.other(x)
        return y.exp(), self.other(y), torch.relu_(z)


class Seen(nn.Module):
    """A convolution; the module takes a view of its result that needs a contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(4, 16, 3), nn.Linear(16 * 36, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x).view(x.shape[0], 16 * 36))


class Masked(nn.Module):
    """Model with a mask beyond bfloat16's range, a recurrent layer, and a 1d convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(64, 64), nn.LSTM(64, 32, batch_first=True)
        self.convolution = nn.Conv1d(64, 32, 3, padding=1)
        mask = torch.full((64, 64), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.linear(x) + self.mask, -1)
        return self.memory(y)[0] + self.convolution(y.transpose(1, 2)).transpose(1, 2)


FORMS = {
    "block": (Block, torch.randn(3, 8, 12, 12)),
    "layer": (Layer, torch.arange(40).reshape(2, 20) * 3 % 128),
    "shared": (Shared, torch.randn(4, 64)),
    "seen": (Seen, torch.randn(2, 4, 8, 8)),
    "masked": (Masked, torch.randn(2, 64, 64)),
}


def outputs_of(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        output = module(x.clone())
    return output if isinstance(output, tuple) else (output,)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("machine", ["packs", "stores", "gpu"])
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_in_fewer_bytes_answers_as_the_module_does(
    name: str, form: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``stores``, the processor cannot compute in bfloat16; ``gpu`` builds for cuda."""
    if machine == "stores":
        monkeypatch.setattr(CpuKernels, "supports_bfloat16", lambda kernels: False)
    module, x = FORMS[name][0](), FORMS[name][1]
    packs = machine != "gpu"
    manifest = built(module, (x,), tmp_path, form, packs_weights=packs)
    assert manifest.precision is not None
    assert manifest.precision.layout == ("onednn" if packs else "torch")
    assert manifest.precision.name == form
    assert manifest.total_bytes < manifest.precision.plain_bytes
    for rows in (1, len(x)):
        outputs = answers(manifest, tmp_path, (x[:rows],))
        pairs = zip(outputs, outputs_of(module, x[:rows]), strict=True)
        errors = [relative_error(ours, theirs) for ours, theirs in pairs]
        assert 0.0 < max(errors) < 0.05


class Flattened(nn.Module):
    """An MLP as transformers' GPT-2 computes it; it also returns the inner value ``seen``."""

    def __init__(self, seen: str = "") -> None:
        super().__init__()
        self.seen, self.dropout = seen, nn.Dropout(0.1)
        self.up = nn.Parameter(torch.randn(64, 128) / 8)
        self.down = nn.Parameter(torch.randn(128, 64) / 8)
        self.biases = nn.ParameterList([torch.randn(128), torch.randn(64)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = x.view(-1, 64)
        y = torch.addmm(self.biases[0], flat, self.up).view(*x.shape[:2], 128)
        inner = torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0)))
        z = 0.5 * y * (1.0 + inner)
        z = torch.addmm(self.biases[1], z.view(-1, 128), self.down).view(*x.shape[:2], 64)
        values = {"flat": flat, "y": y, "inner": inner, "sum": x + self.dropout(z)}
        return {name: values[name] for name in values if name in ("sum", self.seen)}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("seen", "count"), [("", 2), ("flat", 3), ("y", 10), ("inner", 10)])
def test_views_and_a_gelu_of_eight_calls_become_part_of_a_product(
    seen: str, count: int, packs: bool, tmp_path: Path
) -> None:
    module, x = Flattened(seen).eval(), torch.randn(2, 3, 64)
    manifest = built(module, (x,), tmp_path, packs_weights=packs)
    called = [one for one in targets(tmp_path) if not one.startswith(("_operator", "aten.sym"))]
    assert called[-1] == packing.LINEAR_ADD
    assert len(called) == count
    for rows in (1, 2):
        theirs = module(x[:rows])
        outputs = answers(manifest, tmp_path, (x[:rows],))
        for ours, name in zip(outputs, theirs, strict=True):
            torch.testing.assert_close(ours, theirs[name], rtol=1e-4, atol=1e-5)


class Odd(nn.Module):
    """Graphs in which neighbours of a product look as if they could join its call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.convolution = kind, nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8).eval()])
        with torch.no_grad():
            self.norms[1].running_var.fill_(0.25)  # type: ignore[union-attr,operator]
        self.square, self.bias = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(64)
        self.wide = nn.Parameter(torch.randn(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flatten(2)
        match self.kind:
            case "a view between two products":
                y = nn.functional.linear(y.view(-1, 64), self.square).view(*y.shape[:2], 64)
                return nn.functional.linear(y, self.square).view(-1, 64)
            case "a convolution with two norms":
                return self.norms[0](self.convolution(x)) - self.norms[1](self.convolution(x))
            case "a weight and its transpose":
                flat = nn.functional.linear(y, self.square).view(-1, 64)
                return torch.addmm(self.bias, flat, self.square)
            case "a sum and another activation":
                return nn.functional.silu(self.convolution(x) + x)
            case "another formula":
                y = nn.functional.linear(y, self.square)
                y3 = 0.044715 * torch.pow(y, 3.0)
                scaled = math.sqrt(2.0 / math.pi) * torch.add(y, y3, alpha=2)
                return 0.5 * y * (1.0 + torch.tanh(scaled))
            case _:  # more dimensions
                return torch.addmm(self.bias, x.view(-1, 8), self.wide).view(*x.shape[:3], 64)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("form", ["fast", "bf16"])
@pytest.mark.parametrize(
    "kind",
    [
        "a view between two products",
        "a convolution with two norms",
        "a weight and its transpose",
        "a sum and another activation",
        "another formula",
        "more dimensions",
    ],
)
def test_neighbours_join_a_product_only_if_they_belong_to_it(
    kind: str, form: str, packs: bool, tmp_path: Path
) -> None:
    module, x = Odd(kind).eval(), torch.randn(2, 8, 8, 8)
    manifest = built(module, (x,), tmp_path, form, packs_weights=packs)
    if manifest.precision is None:
        assert "it saves no bytes" in manifest.extra["notes"][-1]
        return
    [ours], most = answers(manifest, tmp_path, (x,)), 1e-5 if form == "fast" else 2e-2
    with torch.no_grad():
        assert relative_error(ours, module(x)) < most


def test_fast_stays_exact_if_nobody_allows_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fast`` is a language model's default, so its error must not refuse the model."""
    monkeypatch.setattr(TorchKernels, "fast_error", 1e-9)
    module, x = nn.Linear(64, 64), torch.randn(2, 64)
    manifest = built(module, (x,), tmp_path, packs_weights=False)
    assert manifest.precision is None
    assert "the error is" in manifest.extra["notes"][-1]
    with pytest.raises(RegistrationRefused, match="the error is"):
        built(module, (x,), tmp_path / "asked", packs_weights=False, max_error=1e-9)

    def refused(*arguments: Any) -> Manifest:
        raise RegistrationRefused("precision", "nothing was written yet")

    monkeypatch.setattr(building, "derive", refused)
    manifest = built(module, (x,), tmp_path / "early")
    assert "nothing was written yet" in manifest.extra["notes"][-1]


def test_rounding_may_differ_in_a_batch_as_much_as_fast_allows(tmp_path: Path) -> None:
    """A bit that differs in a batch may round to another TF32 value, layer after layer."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(10):
        parts += [nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256)]
    module, x = nn.Sequential(*parts), torch.randn(8, 256)
    manifest = built(module, (x,), tmp_path, packs_weights=False, batch=8)
    assert manifest.precision is not None
    assert manifest.batching is not None


@pytest.mark.parametrize("packs", [True, False])
def test_a_converted_model_can_batch_requests(packs: bool, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    manifest = built(module, (torch.randn(2, 64),), tmp_path, packs_weights=packs, batch=8)
    assert manifest.precision is not None
    assert manifest.precision.layout == ("onednn" if packs else "torch")
    assert manifest.batching is not None


@pytest.mark.parametrize("name", FORMS)
def test_fast_for_a_gpu_is_compared_as_a_gpu_computes_it(name: str, tmp_path: Path) -> None:
    """The build has no GPU, so it rounds the factors of products to TF32."""
    module, x = FORMS[name][0](), FORMS[name][1]
    manifest = built(module, (x,), tmp_path, "fast", packs_weights=False)
    assert manifest.precision is not None
    assert 1e-5 < manifest.precision.max_error < 5e-3
    for rows in (1, len(x)):
        outputs = answers(manifest, tmp_path, (x[:rows],))
        for ours, theirs in zip(outputs, outputs_of(module, x[:rows]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rounding_to_tf32_is_to_nearest_and_keeps_inf_and_nan() -> None:
    numbers = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-12, -(1 + 3 * 2**-11), torch.inf, torch.nan])
    rounded = to_tf32(numbers).tolist()
    assert rounded[:4] == [1.0, 1 + 2**-10, 1.0, -(1 + 2**-9)]
    assert str(rounded[4:]) == "[inf, nan]"


def test_sums_and_norms_of_a_transformer_stay_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = FORMS["layer"][0](), FORMS["layer"][1]
    manifest = built(module, (x,), tmp_path, "bf16")
    dtypes: dict[str, set[torch.dtype]] = {}

    class Watching(CpuKernels):
        def operators(self) -> Mapping[str, Callable[..., torch.Tensor]]:
            return {**super().operators(), packing.LINEAR: watched(packing.LINEAR)}

    def watched(target: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            output = (KERNELS.operators().get(target) or resolve(target))(*arguments, **named)
            if isinstance(output, torch.Tensor):
                dtypes.setdefault(target, set()).add(output.dtype)
            return output

        return call

    monkeypatch.setattr(executor, "resolve", watched)
    loading.bound(tmp_path / "out", manifest, Watching()).run([x], lambda index: None)
    assert dtypes[packing.LINEAR] == dtypes["aten.matmul.default"] == {torch.bfloat16}
    for target in ("aten.layer_norm.default", "aten.softmax.int", "aten.add.Tensor"):
        assert dtypes[target] == {torch.float32}


def test_a_tied_weight_is_stored_for_each_of_its_uses_and_counted(tmp_path: Path) -> None:
    manifest = built(FORMS["layer"][0](), (FORMS["layer"][1],), tmp_path, "bf16")
    names = [spec.name for spec in manifest.tensors if "tokens" in spec.name or "head" in spec.name]
    assert len(names) == 2
    table_bytes = 128 * 64 * 2
    assert [s.size_bytes for s in manifest.tensors if s.name in names] == [table_bytes] * 2
    assert manifest.total_bytes >= sum(spec.size_bytes for spec in manifest.tensors)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_weights_shrink_as_the_form_says(form: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    manifest = built(module, (torch.randn(2, 512),), tmp_path, form)
    assert manifest.precision is not None
    share = {"bf16": 0.5, "int8": 0.25}[form]
    assert manifest.total_bytes == pytest.approx(share * manifest.precision.plain_bytes, rel=0.03)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_slower_form_is_kept_for_its_bytes_and_says_so(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "call_times", lambda *_, inputs: [[1.0], [2.0]])
    manifest = built(nn.Linear(64, 64), (torch.randn(2, 64),), tmp_path, form)
    assert manifest.precision is not None
    assert "slower" in manifest.extra["notes"][-1]


def test_a_model_without_float32_weights_stays_exact(tmp_path: Path) -> None:
    for form in ("bf16", "int8"):
        manifest = built(nn.ReLU(), (torch.randn(2, 64),), tmp_path, form)
        assert manifest.precision is None
        assert "it stays exact" in manifest.extra["notes"][-1]


def test_a_large_max_error_does_not_serve_nonsense(tmp_path: Path) -> None:
    class Lost(CpuKernels):
        def pack_linear(self, weight: torch.Tensor) -> tuple[packing.PackedLayout, torch.Tensor]:
            return super().pack_linear(torch.zeros_like(weight))

    export_module_to_bundle(nn.Linear(64, 64), (torch.randn(2, 64),), tmp_path / "n.bundle")
    spec = BuildSpec(name="m", source=str(tmp_path / "n.bundle"))
    plain = build(spec, tmp_path / "plain", lambda stage, fraction: None)
    with pytest.raises(RegistrationRefused):
        derive(plain, tmp_path / "plain", replace(spec, precision="bf16", max_error=1.0), Lost())


def test_a_saturated_weight_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(64, 64)
    with torch.no_grad():
        module.weight[3, 5] = 3.4028e38  # above the largest bfloat16
    x = torch.zeros(2, 64)
    x[:, 5] = 1e-30
    with pytest.raises(RegistrationRefused):
        built(module, (x,), tmp_path, "bf16")


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("out", "width"), [(24, 3072), (2304, 768), (768, 3072), (99, 70)])
def test_a_packed_product_gives_a_row_its_bits_in_any_batch(
    out: int, width: int, form: str
) -> None:
    """In bfloat16 the number of rows may choose another kernel, whose sums round elsewhere."""
    if form == "bfloat16" and not KERNELS.supports_bfloat16():
        pytest.skip("this processor has no bfloat16")
    if form == "int8" and missing_int8():
        pytest.skip(missing_int8())
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    plain, bias = torch.randn(out, width), torch.randn(out).to(dtype)
    x, other = torch.randn(65, width).to(dtype), torch.randn(65, out).to(dtype)
    operators = KERNELS.operators()
    scales, rows = quantized(plain)
    sums = rows.sum(1) * scales
    packs = KERNELS.pack_int8(rows) if form == "int8" else KERNELS.pack_linear(plain.to(dtype))
    assert packs[0] is not None
    weight = KERNELS.wrap(packs[1], packs[0])

    def answers(rows: int) -> list[torch.Tensor]:
        own, more = x[:rows].view(rows, 1, width), other[:rows].view(rows, 1, out)
        if form == "int8":
            product = operators[packing.LINEAR_INT8]
            both = [product(own, weight, scales, s, bias, "relu", [], "") for s in (sums, None)]
            return [found.view(rows, out) for found in both]
        return [
            operators[packing.LINEAR](x[:rows], weight, bias, "relu", [], ""),
            operators[packing.LINEAR_ADD](own, more, weight, bias).view(rows, out),
        ]

    expected = answers(65)
    for count in (*range(10), 12, 13, 16, 33, 64):
        for ours, theirs in zip(answers(count), expected, strict=True):
            if form == "bfloat16":
                torch.testing.assert_close(ours, theirs[:count], rtol=2**-7, atol=0.5)
            else:
                assert torch.equal(ours, theirs[:count])


@pytest.mark.skipif(bool(missing_int8()), reason=missing_int8())
@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("width", [64, 70, 99, 1030])
def test_a_product_in_int8_takes_any_rows(width: int, has_sums: bool) -> None:
    plain, bias, x = torch.randn(40, width), torch.randn(40), torch.randn(9, width)
    x[1], x[2], x[3, 5], x[4, 7], x[5, 9] = 0.0, 2.5, math.nan, math.inf, -math.inf
    x[6] *= 1e-40
    scales, rows = quantized(plain)
    layout, data = KERNELS.pack_int8(rows)
    assert layout is not None
    weight, sums = KERNELS.wrap(data, layout), rows.sum(1) * scales if has_sums else None

    def product(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        call = KERNELS.operators()[packing.LINEAR_INT8]
        return call(x, weight, scales, sums, bias, "none", [], "")

    found, expected = product(x), nn.functional.linear(x, rows * scales[:, None])
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[1].any()
    finite = [0, 1, 2, 6, 7, 8]
    most = 0.03 if has_sums else 1e-3
    torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=most * width**0.5)
    torch.testing.assert_close(product(x[:1], bias), found[:1] + bias)
    wide = torch.randn(2, 3, 4, width)
    for form in (wide, wide.permute(1, 0, 2, 3), wide[:, :, ::2], wide[0, 0, 0], wide[:0]):
        flat = product(form.reshape(-1, width).contiguous())
        assert torch.equal(product(form), flat.view(*form.shape[:-1], 40))
    assert product(x.bfloat16()).dtype is torch.bfloat16


class Outlying(nn.Module):
    """Two products: the second one's rows have an outlier of ``size``, which its weight ignores."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.first, self.second, self.size = nn.Linear(64, 64), nn.Linear(64, 64), size
        with torch.no_grad():
            self.second.weight[:, 3] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x) + self.size * (torch.arange(64) == 3))
        return y


@pytest.mark.skipif(bool(missing_int8()), reason=missing_int8())
def test_rows_with_outliers_are_multiplied_in_16_bits(tmp_path: Path) -> None:
    x = torch.randn(4, 64)

    def forms(module: nn.Module, limit: float = 0.05) -> tuple[list[bool], float]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        manifest = built(module, (x,), folder, "int8", max_error=limit)
        assert manifest.precision is not None
        graph = read_bundle(folder / "out" / packing.DERIVED_FILE, is_derived=True).graph
        products = [one for one in graph.nodes if one.target == packing.LINEAR_INT8]
        return [one.args[3] is None for one in products], manifest.precision.max_error

    assert forms(Outlying(50.0))[0] == [False, True]
    module = Outlying(0.0)
    found, error = forms(module)
    assert found == [False, False]
    found, less = forms(module, 0.95 * error)  # this limit needs 16 bits
    assert found == [True, True]
    assert less < 0.95 * error


class Mixing(nn.Module):
    """Module whose rows depend on each other; ``end`` computes the output from the rows."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(64, 64), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.linear(x) - x.mean(0))


def masked(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.masked_fill(torch.arange(64) == 5, value)


MASKS = [masked(-math.inf), masked(torch.finfo(torch.float32).min)]


@pytest.mark.parametrize("end", [nn.Identity(), lambda y: y.argmax(-1), *MASKS])
def test_a_model_whose_rows_look_at_each_other_is_not_batch_invariant(
    end: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    manifest = built(Mixing(end), (torch.randn(2, 64),), tmp_path, "int8", max_error=10.0)
    assert manifest.precision is not None
    assert manifest.precision.is_batch_invariant is False
    with pytest.raises(RegistrationRefused, match="cannot be batched"):
        built(Mixing(end), (torch.randn(2, 64),), tmp_path / "joined", "exact", batch=4)
