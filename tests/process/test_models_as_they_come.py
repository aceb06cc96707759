"""Models of users: served in graph or module mode, or refused with one sentence of advice."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, RegistrationRefused
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.client.model_sources import LocalSource
from pipeswitch.frontend.intake import validation
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.files import convert, convert_weights
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.recurrent import _stft
from pipeswitch.programs.compiler.verify import same_bits
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.programs.running.factories import without_cache
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BuildSpec
from tests.models import loading

SEED = 5


class Found(nn.Module):
    """``torch.where`` with one argument, whose output size depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        places = torch.where(h > 0)
        return torch.zeros_like(h).index_put(places, h[places] * 2)


class Experts(nn.Module):
    """Mixture of four experts; each expert computes only the tokens that the gate sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 16)
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.reshape(x.shape)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(30, 8), nn.LSTM(8, 16, batch_first=True)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(
            self.layer(packed)[0], batch_first=True, total_length=ids.shape[1]
        )
        return padded


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(48))
        self.layer = nn.Linear(33, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = self.window * torch.hamming_window(48)
        spectrum = torch.stft(x, 64, 16, 48, window, return_complex=True)
        return self.layer(spectrum.abs().transpose(1, 2))


class OneKey(nn.Module):
    """Heads that share keys and values, as in Falcon."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return output.transpose(1, 2).flatten(2)


class Detector(nn.Module):
    """Module that replaces its anchors (no buffers) in each call; returns rows over a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.anchors = [torch.randn(3, 4), torch.randn(2, 4)]
        self.offsets = {"first": (torch.randn(4), 2)}

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        self.anchors = [one.to(images[0].dtype) for one in self.anchors]
        shift, times = self.offsets["first"]
        rows = self.layer(images[0].mean() + torch.cat(self.anchors) * times) + shift
        mask = rows[:, 0] > images[0].amax()
        return [{"boxes": rows[mask], "scores": rows[mask, 0]}]


class Appends(Detector):
    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        self.anchors[0] += 1
        return super().forward(images)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralForCausalLM(mixtral_config(transformers))


def mixtral_config(transformers: Any) -> Any:
    return transformers.MixtralConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=100,
        num_local_experts=4,
        architectures=["MixtralForCausalLM"],
    )


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "found": Found,
    "experts": Experts,
    "packed": Packed,
    "sounds": Sounds,
    "mixtral": mixtral,
    "quantized": lambda: quantized(),
    "one_key": OneKey,
    "detector": Detector,
    "appends": Appends,
    "plain": lambda: plain(),
}
PACKAGE = "as_they_come"


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the factories into ``sys.modules``, as if they were an operator's package."""
    monkeypatch.setitem(sys.modules, PACKAGE, SimpleNamespace(**FACTORIES))  # type: ignore[arg-type]


def fresh(name: str) -> nn.Module:
    """Make the named module with the weights that the builder gives it."""
    torch.manual_seed(SEED)
    return FACTORIES[name]().eval().requires_grad_(False)


def served(name: str, folder: Path, **options: Any) -> tuple[Manifest, BoundProgram]:
    """Build a program as a registration does, and load it as a worker does."""
    spec = BuildSpec(
        name=name,
        source=f"{PACKAGE}:{name}",
        weights=f"random:{SEED}",
        allow_module_mode=True,
        bucket_bytes=300,
        **options,
    )
    return loaded(spec, folder)


def loaded(spec: BuildSpec, folder: Path) -> tuple[Manifest, BoundProgram]:
    manifest = build(spec, folder, lambda stage, done: None)
    return manifest, loading.bound(folder, manifest)


def check_bits(bound: BoundProgram, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        expected = flatten_outputs(module(*inputs, **without_cache(module))).values()
    outputs = bound.run([value.clone() for value in inputs], lambda index: None)
    assert len(outputs) == len(expected)
    assert all(map(same_bits, outputs, expected))


IDS = ((2, 7), "int64")


@pytest.mark.parametrize(
    ("name", "inputs", "others"),
    [
        ("found", {"x": ((2, 8), "float32")}, [torch.randn(2, 8)]),
        ("experts", {"x": ((1, 5, 16), "float32")}, [torch.randn(1, 5, 16)]),
        (
            "packed",
            {"ids": IDS, "lengths": ((2,), "int64")},
            [torch.randint(0, 30, (2, 7)), torch.tensor([3, 6])],
        ),
        ("mixtral", {"input_ids": IDS}, [torch.randint(0, 100, (2, 7))]),
    ],
)
def test_what_depends_on_data_is_served_in_module_mode(
    name: str, inputs: Any, others: list[torch.Tensor], tmp_path: Path
) -> None:
    manifest, bound = served(name, tmp_path, inputs=inputs)
    assert manifest.mode == "module"
    assert "package.module" not in manifest.mode_reason, "that is what its owner has done"
    check_bits(bound, fresh(name), others)


@pytest.mark.parametrize(
    ("name", "inputs", "says"),
    [
        ("found", torch.randn(2, 8), "torch.where(mask, a, b)"),
        ("experts", torch.randn(1, 5, 16), "pipeswitch register NAME package.module:function"),
        ("packed", (torch.randint(0, 30, (2, 7)), torch.tensor([3, 7])), "leave packing out"),
        ("mixtral", torch.randint(0, 90, (1, 7)), "set_experts_implementation('batched_mm')"),
    ],
)
def test_who_has_the_module_alone_is_told_what_to_type(
    name: str, inputs: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(RegistrationRefused) as refused:
        export_module_to_bundle(fresh(name), inputs, tmp_path / "it.bundle")
    assert says in refused.value.hint


def test_experts_of_transformers_are_a_graph_of_any_length(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    mixtral_config(transformers).save_pretrained(tmp_path / "mixtral")
    spec = BuildSpec(name="it", source=f"hf:{tmp_path / 'mixtral'}", weights="random:1")
    manifest = build(spec, tmp_path / "out", lambda stage, done: None)
    assert [(dim.name, dim.low, dim.high) for dim in manifest.dims][1:] == [("length", 1, 512)]


def test_a_short_time_transform_is_a_graph(tmp_path: Path) -> None:
    manifest, bound = served("sounds", tmp_path, inputs={"x": ((1, 400), "float32")})
    assert manifest.mode == "graph", manifest.mode_reason
    check_bits(bound, fresh("sounds"), [torch.randn(3, 400)])


def test_heads_that_share_their_keys_are_a_graph(tmp_path: Path) -> None:
    manifest, bound = served("one_key", tmp_path, inputs={"x": ((1, (2, 20), 16), "float32")})
    assert [dim.name for dim in manifest.dims] == ["batch", "length"]
    for length in (2, 9, 20):
        check_bits(bound, fresh("one_key"), [torch.randn(3, length, 16)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"onesided": False},
        {"normalized": True},
        {"center": False},
        {"win_length": 20},
        {"win_length": 20, "window": torch.hann_window(20)},
        {"hop_length": 5},
        {"window": torch.hann_window(33), "pad_mode": "constant"},
        {"return_complex": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:stft with return_complex=False")
def test_windows_that_are_copied_have_the_transforms_bits(options: dict[str, Any]) -> None:
    options = {"return_complex": True, "window": None, **options}
    if options["window"] is None:
        options["window"] = torch.ones(options.get("win_length", 33))
    for x in (torch.randn(2, 300), torch.randn(300)):
        expected, actual = torch.stft(x, 33, **options), _stft(x, 33, **options)
        assert expected.shape == actual.shape
        parts = (torch.view_as_real(v) if v.is_complex() else v for v in (expected, actual))
        assert same_bits(*(part.contiguous() for part in parts))


# ---- int8 ----------------------------------------------------------------------------------------


class Rows8(torch.Tensor):
    """Int8 weights with a scale for each row, wrapped as quantization libraries do."""

    q: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Rows8:
        tensor = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)
        tensor.q, tensor.scale = q, scale
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Rows8:
        return Rows8(inner["q"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.q.to(x.dtype) * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return Rows8(args[0].q, args[0].scale)


def test_int8_weights_that_a_library_wraps_are_streamed_as_int8(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    for layer in (module[0], module[2]):
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        q = (layer.weight.detach() / scale).round().to(torch.int8)
        layer.weight = nn.Parameter(Rows8(q, scale), requires_grad=False)
    path = tmp_path / "it.bundle"
    report = export_module_to_bundle(module, torch.randn(2, 64), path)
    int8, floats = 64 * 32 + 32 * 4, 2 * (32 + 4)
    assert report["weight_bytes"] == int8 + 4 * floats
    spec = BuildSpec(name="it", source=str(path))
    _, bound = loaded(spec, tmp_path / "out")
    check_bits(bound, module, [torch.randn(3, 64)])


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns against this function
        return torch.ao.quantization.quantize_dynamic(Sounds(), {nn.Linear}, dtype=torch.qint8)


def test_what_is_quantized_for_an_engine_is_told_what_to_type(tmp_path: Path) -> None:
    module = quantized()
    with pytest.raises(RegistrationRefused, match="'layer'") as at_the_client:
        export_module_to_bundle(module, torch.randn(1, 400), tmp_path / "it.bundle")
    with pytest.raises(RegistrationRefused, match="'layer'") as at_the_server:
        served("quantized", tmp_path / "out", inputs={"x": ((1, 400), "float32")})
    for refused in (at_the_client, at_the_server):
        assert "quantize_(module, Int8WeightOnlyConfig())" in refused.value.hint


# ---- detectors -----------------------------------------------------------------------------------

IMAGES: dict[str, Any] = {
    "inputs": {"images.0": ((3, 6, 6), "float32")},
    "takes": {"dict": [["images", {"list": ["images.0"]}]]},
}


def test_tensors_that_are_no_buffers_come_with_the_weights(tmp_path: Path) -> None:
    manifest, bound = served("detector", tmp_path, **IMAGES)
    names = {tensor.name for tensor in manifest.tensors}
    assert names >= {"anchors.0", "anchors.1", "offsets.first.0", "layer.weight"}
    counts = set()
    for image in (torch.full((3, 6, 6), low) for low in (-9.0, 0.0, 9.0)):
        with torch.no_grad():
            [expected] = fresh("detector")([image])
        outputs = bound.run([image], lambda index: None)
        assert all(map(same_bits, outputs, expected.values()))
        counts.add(len(outputs[0]))
    assert {0, 5} <= counts, "as many boxes as the picture has"


def test_an_answer_may_have_more_rows_than_the_examples(tmp_path: Path) -> None:
    manifest, _ = served("detector", tmp_path, **IMAGES)
    assert validation._reply_bytes("it", manifest, {}) >= 2 * (64 << 10)


def test_one_that_a_call_changes_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused, match=r"anchors\.0"):
        served("appends", tmp_path, **IMAGES)


# ---- files ---------------------------------------------------------------------------------------


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    "saved",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "model_state_dict": state},
        lambda state: {f"module.{name}": value for name, value in state.items()},
    ],
)
def test_a_state_dict_is_the_weights_of_a_factory(saved: Any, tmp_path: Path) -> None:
    module = plain().eval()
    torch.save(saved(module.state_dict()), tmp_path / "it.pt")
    convert_weights(tmp_path / "it.pt", tmp_path / "it.safetensors")
    spec = BuildSpec(
        name="it",
        source=f"{PACKAGE}:plain",
        weights=str(tmp_path / "it.safetensors"),
        inputs={"x": ((2, 8), "float32")},
    )
    _, bound = loaded(spec, tmp_path / "out")
    check_bits(bound, module, [torch.randn(2, 8)])


@pytest.mark.parametrize("saved", [plain(), {"epoch": 3}, [1]])
def test_what_is_no_state_dict_is_told_how_to_save_one(saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "it.pt")
    with pytest.raises(RegistrationRefused) as refused:
        convert_weights(tmp_path / "it.pt", tmp_path / "it.safetensors")
    assert "torch.save(module.state_dict()" in refused.value.hint


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 8))])
def test_torchscript_is_served_with_its_own_bits(make: Any, tmp_path: Path) -> None:
    module = plain().eval()
    torch.jit.save(make(module), tmp_path / "it.pt")
    report = convert(str(tmp_path / "it.pt"), tmp_path / "it.bundle", {"x": ((1, 8), "float32")})
    assert report["dims"] == {"batch": [1, 64]}
    _, bound = loaded(BuildSpec(name="it", source=str(tmp_path / "it.bundle")), tmp_path / "out")
    check_bits(bound, module, [torch.randn(3, 8)])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("it.onnx", "onnx2torch.convert('it.onnx')"),
        ("it.safetensors", "--weights 'it.safetensors'"),
        ("state.pt", "--weights state.pt"),
        ("script.pt", "--input 1x3x224x224:float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_file_that_is_no_program_is_told_what_to_type(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(plain().state_dict(), "state.pt")
    torch.jit.save(torch.jit.script(plain()), "script.pt")
    request = RegisterRequest(source="")
    sent = LocalSource(name).sent(request, lambda *_: "put:it", None)
    with pytest.raises(PipeSwitchError) as refused, sent:
        pass
    assert says in refused.value.hint


# ---- lengths and examples in module mode ---------------------------------------------------------


def test_a_module_takes_lengths_that_requests_choose(tmp_path: Path) -> None:
    inputs = {"x": (((1, 4), (1, 9), 16), "float32")}
    manifest, bound = served("experts", tmp_path, inputs=inputs)
    assert manifest.mode == "module"
    assert [(dim.name, dim.low, dim.high) for dim in manifest.dims] == [
        ("batch", 1, 4),
        ("length", 1, 9),
    ]
    assert manifest.outputs[0].shape == ("batch", "length", 16)
    for batch, length in ((1, 1), (3, 9), (4, 5)):
        check_bits(bound, fresh("experts"), [torch.randn(batch, length, 16)])


def test_an_outputs_extent_that_no_dimension_is_has_room_for_the_largest(tmp_path: Path) -> None:
    manifest, bound = served("pairs", tmp_path, inputs={"x": ((1, (2, 6), 8), "float32")})
    assert manifest.outputs[0].shape == (1, 12, 8)
    check_bits(bound, fresh("pairs"), [torch.randn(1, 3, 8)])


class Pairs(Found):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x)] * 2, 1)


class Ordered(nn.Module):
    """Module whose integer inputs have limits that an export cannot guess: ``ends`` must grow."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if ends.tolist() != sorted(set(ends.tolist())):
            raise ValueError("ends do not grow")
        return torch.cat([self.layer(self.table(ids[:n])) for n in ends.tolist()]).mean(0)


FACTORIES |= {"pairs": Pairs, "ordered": Ordered}


def test_a_model_of_special_integers_is_checked_with_the_examples(tmp_path: Path) -> None:
    example = {"ids": torch.tensor([1, 8, 3, 4]), "ends": torch.tensor([2, 4])}
    save_file(example, tmp_path / "example.safetensors")
    inputs = {"ids": ((4,), "int64"), "ends": ((2,), "int64")}
    with pytest.raises(RegistrationRefused, match="ends do not grow"):
        served("ordered", tmp_path / "guessed", inputs=inputs)
    path = str(tmp_path / "example.safetensors")
    _, bound = served("ordered", tmp_path / "given", inputs=inputs, example=path)
    check_bits(bound, fresh("ordered"), [torch.tensor([5, 1, 1, 2]), torch.tensor([1, 3])])
    inputs["ends"] = ((3,), "int64")
    with pytest.raises(RegistrationRefused, match=r"example 'ends': it is torch.int64\[2\]"):
        served("ordered", tmp_path / "wrong", inputs=inputs, example=path)


def test_a_named_model_takes_its_example_from_a_client() -> None:
    sent: list[str] = []

    def upload(path: Any, kind: str, progress: Any) -> str:
        sent.extend(load_file(path))
        return "put:it"

    image, bare = np.zeros((3, 6, 6), np.float32), RegisterRequest(source="")
    with LocalSource("models:make", {"images": [image]}).sent(bare, upload, None) as request:
        pass
    assert (request.takes, request.example, sent) == (IMAGES["takes"], "put:it", ["images.0"])
    assert request.inputs == {"images.0": ((3, 6, 6), "float32")}
    with pytest.raises(InvalidInput), LocalSource("models:make", (image,)).sent(bare, upload, None):
        pass
