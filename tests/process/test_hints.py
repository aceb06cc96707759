"""Hints of refused registrations: if a user follows the hint literally, the model is served.

Each module is built like in a registration, loaded like in a worker, and compared bit for bit with
a module that was created separately.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import pipeswitch as ps
from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.client.model_sources import LocalSource
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.files import convert, convert_weights
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.sources import load_source
from pipeswitch.programs.compiler.verify import same_bits
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running import factories
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.programs.spec import BUNDLE_FILE, BuildSpec
from tests.models import loading

T = torch.Tensor
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
PACKAGE = "operators_hints"
SEED = 7
X = {"x": ((2, 4), "float32")}


class Base(nn.Module):
    """Module with a layer, then ``after``. A branch on a value excludes an export (module mode)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.made()

    def made(self) -> None:
        """Create the attributes that ``after`` needs."""

    def after(self, y: T) -> Any:
        return y

    def forward(self, x: T) -> Any:
        y = self.after(self.layer(x))
        return y if x.sum() > -1e9 else y * 2


class Item(Base):
    def made(self) -> None:
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1, 3)]

    def after(self, y: T) -> T:
        return y * self.rates[1]


class Filters(Base):
    def made(self) -> None:
        self.register_buffer("bank", torch.from_numpy(np.eye(4, dtype="float32")) + torch.eye(4))
        self.window = torch.from_numpy(np.hanning(4).astype("float32"))  # is no buffer

    def after(self, y: T) -> T:
        return y @ self.bank * self.window


class Drawn(Base):
    """Module with a random structure, which must be equal in a worker."""

    def made(self) -> None:
        self.order = torch.randperm(4).tolist()
        self.more = [*np.random.permutation(4), random.randrange(4)]

    def after(self, y: T) -> T:
        return y[:, self.order][:, self.more]


class Orthogonal(Base):
    def made(self) -> None:
        self.layer = torch.nn.utils.parametrizations.orthogonal(self.layer)


class Recurrent(Base):
    def made(self) -> None:
        self.cells = nn.LSTM(4, 4)
        self.scale = float(self.cells.weight_ih_l0.new_ones(3).sum())

    def after(self, y: T) -> T:
        return self.cells(y)[0] * self.scale


class Unread(Base):
    def made(self) -> None:
        alignment = torch.eye(4, dtype=torch.bool).to_sparse()
        self.register_buffer("alignment", alignment, persistent=False)
        self.other = torch.eye(3).to_sparse()  # is no buffer


class Forces(Base):
    def after(self, y: T) -> T:
        with torch.enable_grad():
            y = y.detach().requires_grad_(True)
            return -torch.autograd.grad(torch.tanh(self.layer(y)).sum(), y)[0]


class ByKeyword(Base):
    def forward(self, x: T, *, scale: T) -> T:  # type: ignore[override]
        return super().forward(x) * scale


SERVED = [Item, Filters, Drawn, Orthogonal, Recurrent, Unread, Forces]


class Sparse(Base):
    def made(self) -> None:
        self.register_buffer("a", torch.eye(4).to_sparse())

    def after(self, y: T) -> T:
        return torch.sparse.mm(self.a, y.t()).t()


class SparseAsDense(Base):
    def made(self) -> None:
        self.register_buffer("a", torch.eye(4).to_sparse().to_dense())

    def after(self, y: T) -> T:
        return torch.mm(self.a, y.t()).t()


class SparseInParts(Base):
    def made(self) -> None:
        a = torch.eye(4).to_sparse().coalesce()
        self.register_buffer("i", a.indices())
        self.register_buffer("v", a.values())

    def after(self, y: T) -> T:
        return torch.sparse.mm(torch.sparse_coo_tensor(self.i, self.v, (4, 4)), y.t()).t()


class Rotary(Base):
    def made(self) -> None:
        self.table = torch.polar(torch.ones(2), torch.tensor([0.3, 0.7]))

    def turned(self, y: T, table: T) -> T:
        return torch.view_as_real(torch.view_as_complex(y.reshape(-1, 2, 2)) * table).flatten(1)

    def after(self, y: T) -> T:
        return self.turned(y, self.table)


class RotaryInPairs(Rotary):
    def made(self) -> None:
        super().made()
        self.table = torch.view_as_real(self.table)

    def after(self, y: T) -> T:
        return self.turned(y, torch.view_as_complex(self.table))


class Complex(Base):
    def after(self, y: T) -> T:
        return torch.view_as_complex(y.reshape(-1, 2, 2))


class ComplexInPairs(Complex):
    def after(self, y: T) -> T:
        return torch.view_as_real(super().after(y))


class Many(Base):
    def after(self, y: T) -> Any:
        return torch.stack([y + i for i in range(70)])

    def forward(self, x: T) -> Any:
        return list(super().forward(x))


class ManyStacked(Many):
    def forward(self, x: T) -> Any:
        return torch.stack(super().forward(x))


class Hidden(Base):
    def made(self) -> None:
        self.register_buffer("h", torch.zeros(2, 4))

    def after(self, y: T) -> T:
        return y + self.h.zero_()


class HiddenAnew(Hidden):
    def after(self, y: T) -> T:
        return y + torch.zeros_like(self.h)


class MaxNorm(Base):
    def made(self) -> None:
        self.table = nn.Embedding(50, 4, max_norm=0.5)

    def after(self, y: T) -> T:
        return y + self.table(torch.arange(2))


class MaxNormOnce(MaxNorm):
    def made(self) -> None:
        super().made()
        self.table(torch.arange(50))
        self.table.max_norm = None


# Each row: a class that is refused, a part of the hint, and the class after following the hint.
FOLLOWED: list[tuple[type[Base], str, type[Base]]] = [
    (Sparse, "a.to_dense()", SparseAsDense),
    (Sparse, "torch.sparse_coo_tensor", SparseInParts),
    (Rotary, "torch.view_as_real(table) in the constructor", RotaryInPairs),
    (Complex, "return torch.view_as_real(y)", ComplexInPairs),
    (Many, "torch.stack", ManyStacked),
    (Hidden, "torch.zeros_like(self.h)", HiddenAnew),
    (MaxNorm, "set max_norm to None", MaxNormOnce),
]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.__name__: kind for kind in globals().values() if isinstance(kind, type)}
    package: Any = SimpleNamespace(**kinds, plain=plain, __spec__=None)
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    monkeypatch.setattr(factories, "code_of", lambda source, before: {})


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def fresh(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    return kind().eval().requires_grad_(False)


def built(spec: BuildSpec, folder: Path) -> tuple[Manifest, BoundProgram]:
    manifest = build(spec, folder, lambda stage, done: None)
    random.seed(1)  # because random generators have other states in a worker
    return manifest, loading.bound(folder, manifest)


def by_factory(
    kind: Callable[[], nn.Module], folder: Path, inputs: Mapping[str, Any] = X
) -> tuple[Manifest, BoundProgram]:
    spec = BuildSpec(
        name="it",
        source=f"{PACKAGE}:{kind.__name__}",
        weights=f"random:{SEED}",
        inputs=dict(inputs),
        allow_module_mode=True,
    )
    return built(spec, folder)


def is_served_right(bound: BoundProgram, module: nn.Module, *inputs: T, **named: T) -> bool:
    with torch.no_grad():
        expected = module(*inputs, **named)
    outputs = bound.run([*inputs, *named.values()], lambda index: None)
    return all(map(same_bits, outputs, [expected] if isinstance(expected, T) else expected))


@pytest.mark.parametrize("kind", SERVED)
def test_a_factory_that_module_mode_is_told_for_is_served(kind: type[Base], tmp_path: Path) -> None:
    """Follow the hint of a module that does not export: register a factory."""
    module = fresh(kind)
    with pytest.raises(RegistrationRefused) as refused:
        export_module_to_bundle(module, torch.randn(2, 4), tmp_path / "it.bundle")
    assert "package.module:function" in refused.value.hint
    manifest, bound = by_factory(kind, tmp_path / "out")
    assert manifest.mode == "module"
    for _ in range(2):
        assert is_served_right(bound, module, torch.randn(2, 4))


def test_a_sparse_tensor_that_nobody_reads_stays_behind_and_a_note_says_so(tmp_path: Path) -> None:
    manifest, _ = by_factory(Unread, tmp_path)
    assert manifest.extra["left_behind"] == ["alignment", "other"]
    assert "alignment is sparse" in manifest.extra["notes"][0]


@pytest.mark.parametrize(("kind", "words", "after"), FOLLOWED)
def test_each_hint_is_followed_once(
    kind: type[Base], words: str, after: type[Base], tmp_path: Path
) -> None:
    with pytest.raises(RegistrationRefused) as refused:
        by_factory(kind, tmp_path / "refused")
    assert words in refused.value.hint
    _, bound = by_factory(after, tmp_path / "served")
    assert is_served_right(bound, fresh(after), torch.randn(2, 4))


class StandardizedConvolution(nn.Conv2d):
    def forward(self, x: T) -> T:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class FullPrecision(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(4, 4), options

    def forward(self, x: T) -> T:
        with torch.autocast(device_type=x.device.type, **self.options):
            y = self.layer(x.float())
            with torch.enable_grad():
                z = y.relu()
        return y + z


class Gathered(nn.Module):
    def forward(self, x: T, at: T) -> T:
        return torch.gather(x, 1, at, sparse_grad=True)


IDS = torch.tensor([[1, 2, 0], [3, 3, 1]])
NORM = partial(nn.BatchNorm1d, 4, track_running_stats=False)
GRAPHS: dict[str, tuple[Callable[[], nn.Module], tuple[T, ...]]] = {
    "standardized": (partial(StandardizedConvolution, 3, 4, 1), (torch.randn(2, 3, 5, 5),)),
    "no statistics": (NORM, (torch.randn(2, 4, 6),)),
    "sparse gradients": (partial(nn.Embedding, 50, 4, sparse=True, padding_idx=0), (IDS,)),
    "by frequency": (partial(nn.Embedding, 50, 4, scale_grad_by_freq=True), (IDS,)),
    "sparse gather": (Gathered, (torch.randn(2, 4), IDS)),
    "autocast that is off": (partial(FullPrecision, enabled=False), (torch.randn(2, 4),)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_call_without_state_is_served_as_a_graph(name: str, tmp_path: Path) -> None:
    kind, inputs = GRAPHS[name]
    module = fresh(kind)
    export_module_to_bundle(module, inputs, tmp_path / "it.bundle")
    manifest, bound = built(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path)
    assert manifest.mode == "graph"
    assert is_served_right(bound, module, *inputs)


def test_autocast_that_is_on_is_refused_in_these_words(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused, match=r"torch\.autocast"):
        export_module_to_bundle(FullPrecision(), torch.randn(2, 4), tmp_path / "it.bundle")


def test_requests_whose_rows_are_normalized_together_are_not_joined(tmp_path: Path) -> None:
    module = fresh(NORM)
    export_module_to_bundle(module, torch.randn(4, 4), tmp_path / "it.bundle")
    with pytest.raises(RegistrationRefused):
        built(BuildSpec(name="it", source=str(tmp_path / "it.bundle"), batch=4), tmp_path)


class Step(nn.Module):
    def forward(self, sample: T, context: T, t: T) -> T:
        return sample * t + context


@pytest.mark.parametrize("t", [torch.tensor(7.0), torch.tensor([7.0])], ids=["scalar", "one"])
def test_a_number_has_no_say_about_the_batch(t: T, tmp_path: Path) -> None:
    inputs = (torch.randn(2, 4), torch.randn(2, 4), t)
    report = export_module_to_bundle(Step(), inputs, tmp_path / "it.bundle")
    assert report["dims"] == {"batch": [1, 64]}
    assert not report["notes"]
    _, bound = built(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path)
    assert is_served_right(bound, Step(), torch.randn(3, 4), torch.randn(3, 4), t + 1)


def test_the_note_of_a_fixed_batch_says_what_opens_it(tmp_path: Path) -> None:
    class Scored(nn.Module):
        def forward(self, rows: T, of: T, table: T) -> T:
            return (rows + of) @ table

    inputs = (torch.randn(2, 4), torch.randn(2, 4), torch.randn(4, 3))
    report = export_module_to_bundle(Scored(), inputs, tmp_path / "it.bundle")
    assert 'equal ranges for all of the inputs that change together, {"a"' in report["notes"][0]
    dynamic = {name: {0: (1, 64)} for name in ("rows", "of")}
    report = export_module_to_bundle(Scored(), inputs, tmp_path / "it.bundle", dynamic=dynamic)
    assert report["dims"] == {"batch": [1, 64]}


class Lengths(nn.Module):
    """Module that refuses a length above the extent, and a length of 0."""

    def forward(self, x: T, lengths: T) -> T:
        if not torch.compiler.is_exporting():
            assert int(lengths.max()) <= x.shape[1]
            assert int(lengths.min()) > 0
        return x * (torch.arange(x.shape[1]) < lengths[:, None])


def test_counts_are_cut_to_the_ends_of_a_range(tmp_path: Path) -> None:
    dynamic = {"x": {1: (2, 40)}}
    inputs = (torch.randn(2, 16), torch.tensor([16, 9]))
    report = export_module_to_bundle(Lengths(), inputs, tmp_path / "it.bundle", dynamic=dynamic)
    assert report["dims"]["length"] == [2, 40], report["notes"]


class Mixed(nn.Module):
    def forward(self, *args: T, **kwargs: T) -> T:
        return args[0] - args[1] * kwargs["z"]


def test_arguments_by_place_and_by_keyword_mix(tmp_path: Path) -> None:
    a, b, z = (torch.randn(2, 4) for _ in range(3))
    report = export_module_to_bundle(Mixed(), {0: a, 1: b, "z": z}, tmp_path / "it.bundle")
    assert [one["name"] for one in report["inputs"]] == ["x0", "x1", "z"]
    _, bound = built(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path)
    assert is_served_right(bound, Mixed(), a, b, z=z)
    exported = torch.export.export(Mixed(), (a, b), {"z": z})
    torch.export.save(exported, tmp_path / "it.pt2")
    report = convert(str(tmp_path / "it.pt2"), tmp_path / "it.bundle")
    assert [one["name"] for one in report["inputs"]][2:] == ["z"]


def test_a_factory_gets_what_it_takes_by_keyword_alone(tmp_path: Path) -> None:
    inputs = {**X, "scale": ((2, 4), "float32")}
    x, scale = torch.randn(2, 4), torch.randn(2, 4)
    _, bound = by_factory(ByKeyword, tmp_path / "module", inputs)
    assert is_served_right(bound, fresh(ByKeyword), x, scale=scale)
    places = {"0": ((2, 4), "float32"), "1": ((2, 4), "float32"), "z": ((2, 4), "float32")}
    _, bound = by_factory(Mixed, tmp_path / "graph", places)
    assert is_served_right(bound, Mixed(), x, scale, z=x)


@pytest.mark.parametrize("mode", ["module", "graph"])
def test_a_version_is_the_same_program_with_a_files_weights(mode: str, tmp_path: Path) -> None:
    """Build the version like the server: from a factory, or from the served bundle."""
    kind = Item if mode == "module" else plain
    manifest, _ = by_factory(kind, tmp_path / "one")
    assert manifest.mode == mode
    torch.manual_seed(1)
    module = kind().eval().requires_grad_(False)
    state = {f"_orig_mod.{name}": value for name, value in module.state_dict().items()}
    save_file(state, tmp_path / "other.safetensors")
    weights = str(tmp_path / "other.safetensors")
    bundle = str(tmp_path / "one" / BUNDLE_FILE)
    source = f"{PACKAGE}:{kind.__name__}" if mode == "module" else bundle
    spec = BuildSpec(name="it 2", source=source, weights=weights, inputs=X, allow_module_mode=True)
    _, bound = built(spec, tmp_path / "two")
    assert is_served_right(bound, module, torch.randn(2, 4))


def test_a_module_without_data_is_told_how_to_get_it(tmp_path: Path) -> None:
    module, state, x = plain().eval().to("meta"), fresh(plain).state_dict(), torch.randn(2, 4)
    with pytest.raises(RegistrationRefused, match="meta device") as refused:
        export_module_to_bundle(module, x, tmp_path / "it.bundle")
    assert 'module.to_empty(device="cpu")' in refused.value.hint
    module.to_empty(device="cpu")
    module.load_state_dict(state)
    export_module_to_bundle(module, x, tmp_path / "it.bundle")
    _, bound = built(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path)
    assert is_served_right(bound, module, x)


def test_a_frozen_torchscript_file_is_served(tmp_path: Path) -> None:
    module, path = fresh(plain), str(tmp_path / "frozen.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.script(module)), path)
    convert(path, tmp_path / "it.bundle", {"input": ((2, 4), "float32")})
    _, bound = built(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path)
    assert is_served_right(bound, module, torch.randn(2, 4))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def torch_file(folder: Path) -> bytes:
    torch.save(plain().state_dict(), folder / "whole.pt")
    return (folder / "whole.pt").read_bytes()


def safetensors_file(folder: Path) -> bytes:
    save_file(plain().state_dict(), folder / "whole.safetensors")
    return (folder / "whole.safetensors").read_bytes()


ODD_FILES: dict[str, tuple[str, Callable[[Path], bytes], str, str]] = {
    "pointer": ("it.pt", lambda f: POINTER, "Git LFS pointer", "git lfs pull"),
    "a pointer to safetensors": ("it.safetensors", lambda f: POINTER, "Git LFS pointer", "git lfs"),
    "a pointer to a program": ("it.pt2", lambda f: POINTER, "Git LFS pointer", "git lfs"),
    "empty": ("it.pt", lambda f: b"", "empty", "again"),
    "empty safetensors": ("it.safetensors", lambda f: b"", "empty", "again"),
    "cut": ("it.pt", lambda f: torch_file(f)[:-200], "cut short", "again"),
    "cut safetensors": ("it.safetensors", lambda f: safetensors_file(f)[:-20], "of", "again"),
    "cut header": ("it.safetensors", lambda f: safetensors_file(f)[:40], "cut short", "again"),
    "page": ("it.pt", lambda f: b"<!DOCTYPE html><html>", "web page", "download"),
    "other format": ("it.safetensors", torch_file, "torch.save", "FILE.pt"),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_is_named_for_what_it_is(name: str, tmp_path: Path) -> None:
    file, content, reason, hint = ODD_FILES[name]
    path = tmp_path / file
    path.write_bytes(content(tmp_path))
    is_program = file.endswith(".pt2")
    local = LocalSource(str(path) if is_program else f"{PACKAGE}:plain")
    request = RegisterRequest(source="", weights="" if is_program else str(path))

    def upload(*_: Any) -> str:
        raise AssertionError("it was sent")

    with pytest.raises(RegistrationRefused) as refused, local.sent(request, upload, None):
        pass
    assert reason in refused.value.reason
    assert hint in refused.value.hint
    assert str(path) in refused.value.part


def test_an_upload_that_is_cut_is_not_called_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / f"{'0' * 64}.safetensors"
    path.write_bytes(safetensors_file(tmp_path)[:-20])
    spec = BuildSpec(name="it", source=f"{PACKAGE}:plain", weights=str(path), inputs=X)
    with pytest.raises(RegistrationRefused, match="cut short") as refused:
        load_source(spec)
    assert refused.value.part == "weights"


def test_sparse_weights_and_programs_among_weights_are_named(tmp_path: Path) -> None:
    state, path = plain().state_dict(), tmp_path / "it.pt"
    torch.save({**state, "0.weight": state["0.weight"].to_sparse()}, path)
    with pytest.raises(RegistrationRefused, match=r"0\.weight is sparse") as refused:
        convert_weights(path, tmp_path / "out.safetensors")
    assert "to_dense()" in refused.value.hint
    torch.jit.save(torch.jit.script(plain()), str(path))
    with pytest.raises(RegistrationRefused):
        convert_weights(path, tmp_path / "out.safetensors")


def test_a_part_that_was_compiled_has_the_modules_names(tmp_path: Path) -> None:
    state = {name.replace("0.", "0._orig_mod."): v for name, v in plain().state_dict().items()}
    save_file(state, tmp_path / "it.safetensors")
    path = str(tmp_path / "it.safetensors")
    loaded = load_source(BuildSpec(name="it", source=f"{PACKAGE}:plain", weights=path, inputs=X))
    assert torch.equal(loaded.module.state_dict()["0.weight"], state["0._orig_mod.weight"])


@pytest.mark.parametrize(
    ("inputs", "named", "names"),
    [
        ((1.0, 2.0), {}, ["0", "1"]),
        (([1.0, 2.0], [3.0]), {}, ["0", "1"]),
        ((np.ones(2), np.ones(3)), {}, ["", ""]),
        ((np.ones(2),), {"z": 1.0}, ["0", "z"]),
        ((1.0, {"h": np.ones(2)}), {"z": 1.0}, ["0", "1.h", "z"]),
        ((), {"x": 1.0}, ["x"]),
        ((None,), {"x": 1.0}, ["x"]),
    ],
)
def test_a_request_is_written_as_the_modules_own_call(
    inputs: tuple[Any, ...], named: dict[str, Any], names: list[str]
) -> None:
    request = ps.Client._request("m", inputs, None, "", 0, named)
    assert [one.name for one in request["inputs"]] == names


class Wrapped(Base):
    """Module with a weight of a library's own tensor class, like torchao's int4."""

    def made(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        weight = self.layer.weight.detach()
        two: Any = TwoTensor(weight, weight.clone())  # type: ignore[no-untyped-call]
        self.layer.weight = nn.Parameter(two, requires_grad=False)

    def after(self, y: T) -> T:
        return torch.as_tensor(getattr(y, "a", y))


def test_a_weight_of_a_librarys_class_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused, match="TwoTensor of torch") as refused:
        by_factory(Wrapped, tmp_path)
    assert refused.value.part == "weight 'layer.weight'"
    assert "register the module before" in refused.value.hint


class Halves(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def _compiled_within(module: Halves) -> nn.Module:
    module[0] = torch.compile(module[0])
    module.compile()
    module.forward = torch.compile(module.forward)
    return module


@pytest.mark.parametrize("compiled", [torch.compile, _compiled_within])
def test_a_compiled_module_is_exported_as_it_was_before(
    compiled: Callable[[Any], Any], tmp_path: Path
) -> None:
    report = export_module_to_bundle(compiled(Halves()), torch.randn(3, 8), tmp_path / "m.bundle")
    assert (report["notes"], report["dims"]) == ([], {"batch": [1, 64]})
    names = {tensor.name for tensor in read_bundle(tmp_path / "m.bundle").tensors}
    assert names == {*Halves().state_dict()}


def test_what_is_no_module_is_told_how_to_become_one(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    exported = torch.export.export(Halves(), (x,))
    for source, hint in ((torch.relu, "nn.Module"), (exported, "torch.export.save")):
        with pytest.raises(RegistrationRefused) as refused:
            export_module_to_bundle(source, x, tmp_path / "m.bundle")
        assert hint in refused.value.hint
