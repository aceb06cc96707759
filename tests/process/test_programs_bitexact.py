"""Programs over a shared mapping, whose outputs equal the plain module's, bit for bit.

Each model is built, bundled, loaded, bound over a read-only memfd and run. All bytes of the mapping
are 0xff at first, and a group's bytes appear when the program waits for the group. So a weight that
is read too early, or packed into the wrong group, changes the output.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from pipeswitch.base.errors import LocalProtocolError, RegistrationRefused, TaskPreempted
from pipeswitch.planning.grouping import Plan
from pipeswitch.programs.compiler import program as build_module
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.files import convert_pt2
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.sources import Loaded, load_source
from pipeswitch.programs.compiler.verify import load_image, same_bits, to_tensors
from pipeswitch.programs.interface.dims import Dim, at_batch
from pipeswitch.programs.interface.groups import layer_bytes, regrouped
from pipeswitch.programs.interface.layout import TENSOR_ALIGN_BYTES, Manifest
from pipeswitch.programs.interface.pytree import unflatten
from pipeswitch.programs.interface.synthetic_inputs import random_inputs
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.programs.running.tensor_views import bytes_over, tensor_over
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BuildSpec, load_manifest, weights_file
from tests.models import loading

REGION_OFFSET_BYTES = 2 << 20


class Arena:
    """A memfd that a program reads through a read-only mapping, filled group by group."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._image = load_image(folder / weights_file(manifest), manifest).numpy().tobytes()
        size = REGION_OFFSET_BYTES + max(manifest.total_bytes, mmap.PAGESIZE)
        self._fd = os.memfd_create("arena")
        os.ftruncate(self._fd, size)
        self._writable = mmap.mmap(self._fd, size)
        self._writable[:] = b"\xff" * size
        self.pool = bytes_over(mmap.mmap(self._fd, size, prot=mmap.PROT_READ))
        self.opened: list[int] = []

    def arrive(self, index: int) -> None:
        group = self._manifest.groups[index]
        start, end = group.offset_bytes, group.offset_bytes + group.size_bytes
        offset = REGION_OFFSET_BYTES
        self._writable[offset + start : offset + end] = self._image[start:end]
        self.opened.append(index)

    def reset(self) -> None:
        self._writable[:] = b"\xff" * len(self._writable)
        self.opened.clear()

    def close(self) -> None:
        self._writable.close()
        os.close(self._fd)


class Programs:
    """Programs, each over its own arena. A spec is built only once, because a build takes seconds.
    Tests only read the folder of a built program."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[bytes, Path] = {}
        self._arenas: list[Arena] = []

    def folder(self, spec: BuildSpec) -> Path:
        """Build the spec, unless it was built before; return its folder."""
        key = msgspec.json.encode(spec)
        if key not in self._folders:
            folder = self._root / str(len(self._folders))
            stages: list[str] = []
            manifest = build(spec, folder, lambda stage, done: stages.append(stage))
            assert list(dict.fromkeys(stages))[-2:] == ["verify", "pack"]
            assert load_manifest(folder) == manifest
            self._folders[key] = folder
        return self._folders[key]

    def __call__(self, spec: BuildSpec, plan: Plan = ()) -> tuple[Manifest, BoundProgram, Arena]:
        folder = self.folder(spec)
        manifest = regrouped(load_manifest(folder), plan)
        arena = Arena(folder, manifest)
        self._arenas.append(arena)
        loaded = loading.loaded(folder, manifest)
        return (
            manifest,
            loaded.bind(lambda tensor: tensor_over(arena.pool, tensor, REGION_OFFSET_BYTES)),
            arena,
        )

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


@pytest.fixture(scope="module")
def _all_programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def programs(_all_programs: Programs) -> Iterator[Programs]:
    yield _all_programs
    _all_programs.close()


def check_layout(manifest: Manifest) -> None:
    """Check that groups tile the region, and tensors lie aligned in their groups."""
    position = 0
    for group in manifest.groups:
        assert group.offset_bytes == position
        position += group.size_bytes
        for index in group.tensors:
            tensor = manifest.tensors[index]
            assert tensor.offset_bytes % TENSOR_ALIGN_BYTES == 0
            assert group.offset_bytes <= tensor.offset_bytes
            assert tensor.offset_bytes + tensor.size_bytes <= position
    assert position == manifest.total_bytes


def check_bits(
    plain: nn.Module, manifest: Manifest, bound: BoundProgram, arena: Arena, batches: list[int]
) -> None:
    check_layout(manifest)
    for batch in batches:
        inputs = to_tensors(manifest.inputs, at_batch(manifest.dims, batch))
        with torch.no_grad():
            expected = list(flatten_outputs(plain(*[x.clone() for x in inputs])).values())
        arena.reset()
        clones = [value.clone() for value in inputs]
        outputs = bound.run(inputs, arena.arrive)
        assert arena.opened == list(range(len(manifest.groups)))
        assert len(outputs) == len(expected)
        for ours, theirs in zip(outputs, expected, strict=True):
            assert same_bits(ours, theirs), f"differs at batch {batch}"
        assert all(same_bits(a, b) for a, b in zip(inputs, clones, strict=True))


# test_server_bitequal.py tests ten other models.
FAMILIES = [
    ("squeezenet1_1", 64),
    ("mnasnet0_5", 64),
    pytest.param("googlenet", 64, marks=pytest.mark.slow),
    pytest.param("resnext50_32x4d", 64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "side"), FAMILIES)
def test_a_torchvision_family_computes_the_plain_models_bits(
    name: str, side: int, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Loaded] = []  # reused, because a second load would take half of the test's time

    def load_once(spec: BuildSpec) -> Loaded:
        loaded.append(load_source(spec))
        return loaded[0]

    monkeypatch.setattr(build_module, "load_source", load_once)
    spec = BuildSpec(
        name=name,
        source=f"torchvision:{name}",
        weights="random:3",
        inputs={"x": ((2, 3, side, side), "float32")},
        bucket_bytes=4 << 20,
    )
    manifest, bound, arena = programs(spec)
    assert manifest.mode == "graph"
    assert manifest.outputs[0].shape == ("batch", 1000)
    assert manifest.batch == (1, 64)
    check_bits(loaded[0].module, manifest, bound, arena, [1, 2, 3])


# --- transformers, with small configurations in a local folder ------------------------------------

SMALL = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 128,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 128},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128},
}


PIXELS = {
    "image_size": 64,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TEXT = ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("model_type", "options", "chosen", "inputs", "outputs"),
    [
        ("bert", {}, "", TEXT, ["last_hidden_state", "pooler_output"]),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "", TEXT, ["logits"]),
        (
            "bert",
            {"architectures": ["BertForMaskedLM"]},
            "#BertForQuestionAnswering",
            TEXT,
            ["start_logits", "end_logits"],
        ),
        ("distilbert", {}, "", TEXT, ["last_hidden_state"]),
        ("gpt2", {"architectures": ["GPT2LMHeadModel"]}, "", TEXT, ["logits"]),
        ("vit", {"architectures": ["ViTForImageClassification"]}, "", ["pixel_values"], ["logits"]),
        ("vit", {}, "", ["pixel_values"], ["last_hidden_state", "pooler_output"]),
    ],
)
def test_a_transformer_is_what_its_configuration_names_and_answers_with_all_of_it(
    model_type: str,
    options: dict[str, Any],
    chosen: str,
    inputs: list[str],
    outputs: list[str],
    programs: Programs,
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SMALL.get(model_type, PIXELS)
    config = transformers.AutoConfig.for_model(model_type, **sizes, **options)
    config.save_pretrained(tmp_path / "config")
    source = f"hf:{tmp_path / 'config'}{chosen}"
    spec = BuildSpec(name=model_type, source=source, weights="random:1", bucket_bytes=16 << 10)
    manifest, bound, arena = programs(spec)
    assert manifest.mode == "graph"
    assert len(manifest.groups) > 2
    assert [value.name for value in manifest.inputs] == inputs
    assert [value.name for value in manifest.outputs] == outputs
    if inputs == TEXT:
        assert manifest.dims == (Dim("batch", 1, 64), Dim("length", 1, 512))
    else:
        assert manifest.dims == (Dim("batch", 1, 64),)
        fixed = "the model fixes height at 64, the model fixes width at 64"
        notes = [f"{name} is fixed: {fixed}" for name in ("height", "width")]
        assert manifest.extra["notes"] == notes
    check_bits(load_source(spec).module, manifest, bound, arena, [1, 2, 3])


def test_a_decoder_of_transformers_is_exported_without_its_cache(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gpt2", **SMALL["gpt2"])
    example = {"input_ids": torch.randint(0, 100, (1, 8))}
    report = export_module_to_bundle(transformers.GPT2LMHeadModel(config), example, tmp_path / "b")
    assert [value["name"] for value in report["outputs"]] == ["logits"]
    assert report["dims"]["batch"] == [1, 64]
    assert report["notes"] == ["use_cache=False: each request is computed alone"]


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("BertForNothing", "has no such model"),
        ("pipeline", "has no such model"),
        ("GPT2LMHeadModel", "is a bert, which does not match"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused(
    architecture: str, words: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("bert", **SMALL["bert"])
    config.architectures = [architecture]
    config.save_pretrained(tmp_path / "config")
    spec = BuildSpec(name="m", source=f"hf:{tmp_path / 'config'}", weights="random:1")
    with pytest.raises(RegistrationRefused, match=words):
        build(spec, tmp_path, lambda stage, done: None)


# --- odd models -----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.embed = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x)))


class Hidden(nn.Module):
    """Module with a non-persistent buffer and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.randn(8), persistent=False)
        self.shift = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + x.sum(dim=1, keepdim=True)


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"scores": y, "best": y.argmax(1), "nothing": None, "pair": (y, x)}


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 8)
        self.unused = nn.Linear(99, 99)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x) + self.embed(ids)
        return y, self.linear(y)


class InPlace(nn.Module):
    """Module that writes to its input, which is in the request's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].add_(1.0)
        return self.linear(x.relu_())


class Reversed(nn.Module):
    """Module that uses its layers in reverse order, and whose buffer is only returned, not used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.register_buffer("mean", torch.randn(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(self.first(x)), self.mean


class Folded(nn.Module):
    """Module with an output whose size is a multiple of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, 4))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(2, 8))


class Infinite(nn.Module):
    """Module with constants that JSON cannot represent, an integer buffer and a strided buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("order", torch.arange(8).flip(0))
        self.register_buffer("every", torch.randn(8, 2)[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)[:, self.order] + self.every
        return y.masked_fill(y < 0, float("-inf")).clamp(max=float("inf")).softmax(-1)


def conv(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 4, 3)
    ).to(dtype)


def channels_last() -> nn.Module:
    return conv().to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[int]]] = {
    "tied": (Tied, {"x": ((2, 16), "float32")}, [1, 2, 3]),
    "hidden": (Hidden, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "lstm": (Lstm, {"x": ((2, 5, 8), "float32")}, [1, 2, 3]),
    "nothing": (Nothing, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "same": (Same, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "named": (Named, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "scalar": (Scalar, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "several": (Several, {"x": ((2, 8), "float32"), "ids": ((2,), "int64")}, [1, 2, 3]),
    "in_place": (InPlace, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "reversed": (Reversed, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "folded": (Folded, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "fixed": (Fixed, {"x": ((2, 8), "float32")}, [2]),
    "infinite": (Infinite, {"x": ((2, 8), "float32")}, [1, 2, 3]),
    "declared_at_one": (Hidden, {"x": ((1, 8), "float32")}, [1, 2, 3]),
    "bfloat16": (lambda: conv(torch.bfloat16), {"x": ((2, 3, 9, 9), "bfloat16")}, [1, 2, 3]),
    "float16": (lambda: conv(torch.float16), {"x": ((2, 3, 9, 9), "float16")}, [1, 2, 3]),
    "float64": (lambda: conv(torch.float64), {"x": ((2, 3, 9, 9), "float64")}, [1, 2, 3]),
    "channels_last": (channels_last, {"x": ((2, 3, 9, 9), "float32")}, [1, 2, 3]),
}


class _Factories:
    """Substitute in ``sys.modules`` for an operator's package, with one factory per model."""

    def __getattr__(self, name: str) -> Callable[[], nn.Module]:
        for table in (MODELS, MODULE_MODE, REFUSED):
            if name in table:
                factory: Callable[[], nn.Module] = table[name][0]
                return factory
        raise AttributeError(name)


@pytest.fixture(autouse=True)
def _factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "operators_models", _Factories())


def factory_spec(name: str, inputs: dict[str, Any]) -> BuildSpec:
    return BuildSpec(
        name=name,
        source=f"operators_models:{name}",
        weights="random:5",
        inputs=inputs,
        max_batch=4,
        bucket_bytes=300,
    )


def test_a_tied_weight_lies_in_the_bundle_once(programs: Programs) -> None:
    manifest, _, _ = programs(factory_spec("tied", MODELS["tied"][1]))
    assert [tensor.name for tensor in manifest.tensors] == [
        "embed.weight",
        "inner.weight",
        "inner.bias",
    ]


def test_weights_are_ordered_by_first_use_and_unused_ones_stay_behind(programs: Programs) -> None:
    manifest, _, _ = programs(factory_spec("reversed", MODELS["reversed"][1]))
    assert [tensor.name for tensor in manifest.tensors] == [
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
        "mean",
    ]
    manifest, _, _ = programs(factory_spec("several", MODELS["several"][1]))
    assert not any("unused" in tensor.name for tensor in manifest.tensors)


def test_outputs_of_a_mapping_keep_their_names_and_none_is_left_out(programs: Programs) -> None:
    manifest, _, _ = programs(factory_spec("named", MODELS["named"][1]))
    assert [value.name for value in manifest.outputs] == ["scores", "best", "pair.0", "pair.1"]
    assert manifest.outputs[1].dtype == "int64"


def test_the_same_model_has_the_same_digest_and_another_seed_another(
    programs: Programs, tmp_path: Path
) -> None:
    spec = factory_spec("tied", MODELS["tied"][1])
    first, again = programs(spec)[0], build(spec, tmp_path / "again", lambda stage, done: None)
    other = programs(
        BuildSpec(name="o", source=spec.source, weights="random:6", inputs=spec.inputs, max_batch=4)
    )[0]
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_two_homes_of_one_program_compute_the_same_bits(programs: Programs) -> None:
    spec = factory_spec("tied", MODELS["tied"][1])
    manifest, bound, arena = programs(spec)
    folder = programs.folder(spec)
    image = load_image(folder / "program.bundle", manifest)
    moved = torch.cat([torch.zeros(4096, dtype=torch.uint8), image])
    elsewhere = loading.loaded(folder, manifest).bind(
        lambda tensor: tensor_over(moved.untyped_storage(), tensor, 4096)
    )
    inputs = to_tensors(manifest.inputs, at_batch(manifest.dims, 2))
    [here], [there] = bound.run(inputs, arena.arrive), elsewhere.run(inputs, lambda index: None)
    assert same_bits(here, there)


def test_a_preemption_between_groups_passes_through_and_the_next_run_is_whole(
    programs: Programs,
) -> None:
    spec = factory_spec("lstm", MODELS["lstm"][1])
    manifest, bound, arena = programs(spec)

    def preempt(index: int) -> None:
        if index == 1:
            raise TaskPreempted
        arena.arrive(index)

    with pytest.raises(TaskPreempted):
        bound.run(to_tensors(manifest.inputs, at_batch(manifest.dims, 2)), preempt)
    check_bits(load_source(spec).module, manifest, bound, arena, [2])


# --- module mode ----------------------------------------------------------------------------------


class Branching(nn.Module):
    """Module with data-dependent control flow, which cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if float(x.sum()) > 1e9:
            x = self.other(x)
        x = self.lstm(x)[0]
        return self.attention(x, x, x)[0] + self.token


class Recurrent(nn.Module):
    """Module whose LSTM uses another kernel, with other last bits, when gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(x)[0]
        return self.head(x) if float(x.sum()) < 1e9 else x


class Stray(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class Counting(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if float(x.sum()) > 0 else x


class Early(nn.Module):
    """Module that reads a submodule's weight before it calls the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.second.weight.sum()
        return self.second(x) if float(x.sum()) < 1e9 else x


class Nested(nn.Module):
    """Module with nested arguments and outputs, and a branch that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: Any, mask: Any = None) -> dict[str, Any]:
        h = self.first(x) + state["h"][0]
        h = self.second(h) if float(h.sum()) < 1e9 else h
        return {"out": h, "cache": [(h * 2, None)], "was_masked": mask}


MODULE_MODE: dict[str, Any] = {
    "branching": (Branching, {"x": ((2, 3, 8), "float32")}),
    "early": (Early, {"x": ((2, 8), "float32")}),
    "recurrent": (Recurrent, {"x": ((2, 7, 64), "float32")}),
    "nested": (Nested, {}),
    "stray": (Stray, {"x": ((2, 3, 8), "float32")}),
}


@pytest.mark.parametrize("name", ["branching", "early", "recurrent", "stray"])
def test_a_model_that_does_not_export_runs_in_module_mode_and_says_why(
    name: str, programs: Programs
) -> None:
    spec = factory_spec(name, MODULE_MODE[name][1])
    manifest, bound, arena = programs(spec)
    assert manifest.mode == "module"
    assert "export" in manifest.mode_reason
    assert len(manifest.triggers) == len(manifest.groups) > 1
    check_bits(load_source(spec).module, manifest, bound, arena, [2])
    check_bits(load_source(spec).module, manifest, bound, arena, [2])


def test_a_module_gets_its_arguments_and_gives_its_answer_nested(programs: Programs) -> None:
    shape = ((2, 8), "float32")
    takes = {
        "dict": [["x", "x"], ["state", {"dict": [["h", {"list": ["state.h.0"]}]]}], ["mask", None]]
    }
    spec = factory_spec("nested", {"x": shape, "state.h.0": shape})
    spec = msgspec.structs.replace(spec, takes=takes)
    manifest, bound, arena = programs(spec)
    assert manifest.mode == "module"
    x, h = to_tensors(manifest.inputs, {})
    with torch.no_grad():
        expected = load_source(spec).module(x, {"h": [h]})
    named = dict(zip(("out", "cache.0.0"), bound.run([x, h], arena.arrive), strict=True))
    answer = unflatten(manifest.returns, named)
    assert same_bits(answer["out"], expected["out"])
    assert same_bits(answer["cache"][0][0], expected["cache"][0][0])
    assert (answer["cache"][0][1], answer["was_masked"]) == (None, None)


# --- other groups, the same bytes ----------------------------------------------------------------


def plans_of(layer_count: int) -> list[Plan]:
    """Return plans: one group, a group per layer, a group per two layers, a first layer alone."""
    every = [(0,), tuple(range(layer_count)), tuple(range(0, layer_count, 2)), (0, 1)]
    return [plan for plan in dict.fromkeys(every) if plan[-1] < layer_count]


@pytest.mark.parametrize("name", [*MODELS, "branching", "early"])
def test_an_odd_model_computes_the_plain_models_bits_however_its_groups_are_cut(
    name: str, programs: Programs
) -> None:
    _, inputs, *rest = {**MODELS, **MODULE_MODE}[name]
    batches = rest[0] if rest else [2]
    spec = factory_spec(name, inputs)
    built, bound, arena = programs(spec)
    assert built.mode == ("graph" if rest else "module"), built.mode_reason
    assert bool(built.dims) == (batches == [1, 2, 3]), built.extra["notes"]
    plain = load_source(spec).module
    check_bits(plain, built, bound, arena, batches)
    sizes = layer_bytes(built)
    assert sum(sizes) == built.total_bytes
    for plan in plans_of(len(sizes)):
        manifest, bound, arena = programs(spec, plan)
        assert len(manifest.groups) == len(plan)
        ends = (*plan[1:], len(sizes))
        expected = [sum(sizes[a:b]) for a, b in zip(plan, ends, strict=True)]
        assert [group.size_bytes for group in manifest.groups] == expected
        assert (manifest.digest, manifest.tensors) == (built.digest, built.tensors)
        check_bits(plain, manifest, bound, arena, batches[-1:])


def test_the_groups_a_program_was_built_with_are_a_plan_like_any_other(programs: Programs) -> None:
    built, _, _ = programs(factory_spec("lstm", MODELS["lstm"][1]))
    starts = {layer.first_node: index for index, layer in enumerate(built.layers)}
    plan = tuple(starts[group.first_node] for group in built.groups)
    assert regrouped(built, plan) == regrouped(built, ()) == built


@pytest.mark.parametrize("plan", [(1,), (0, 0), (0, 99)])
def test_what_is_no_plan_for_a_program_is_refused(plan: Plan, programs: Programs) -> None:
    built, _, _ = programs(factory_spec("lstm", MODELS["lstm"][1]))
    with pytest.raises(LocalProtocolError, match="a plan for"):
        regrouped(built, plan)


# --- refusals -------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


class StillTraining(nn.Module):
    """Module that updates its running statistics in eval mode; the operator's schema hides this."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm
        return nn.functional.batch_norm(x, n.running_mean, n.running_var, training=True)


class Shapeless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x)


class Text(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "cat"


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such luck")


X = {"x": ((2, 8), "float32")}
REFUSED: dict[str, Any] = {
    "counter": (Counter, X, "calls"),
    "still_training": (StillTraining, X, "running_"),
    "shapeless": (Shapeless, X, ""),
    "random": (Random, X, ""),
    "complex": (Complex, X, ""),
    "text": (Text, X, "str"),
    "raising": (Raising, X, "no such luck"),
    "counting": (Counting, {"x": ((2, 3, 8), "float32")}, "calls"),
    "flat": (Flat, X, "none with weights to hook"),
    "no_module": (lambda: 7, X, "int"),
    "no_inputs": (Nothing, {}, "--input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_words(name: str, tmp_path: Path) -> None:
    _, inputs, words = REFUSED[name]
    with pytest.raises(RegistrationRefused) as caught:
        build(factory_spec(name, inputs), tmp_path, lambda stage, done: None)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "weights", "words"),
    [
        ("torchvision:resnet125", "random:0", "resnet"),
        ("torchvision:resnet18", "", "--weights"),
        ("torchvision:resnet18", "random:x", "random:SEED"),
        ("torchvision:resnet18", "none.safetensors", "cannot be read"),
        ("torchvision:resnet18", "weights.pth", "expected"),
        ("hf:nobody/nothing", "random:0", "bert-base-uncased"),
        ("no.such.package:factory", "", "cannot be imported"),
        ("rm -rf /", "", "expected torchvision:NAME"),
        ("none.bundle", "", "none.bundle"),
    ],
)
def test_a_source_that_cannot_be_had_is_refused_in_words(
    source: str, weights: str, words: str, tmp_path: Path
) -> None:
    spec = BuildSpec(name="m", source=source, weights=weights)
    with pytest.raises(RegistrationRefused, match=words):
        build(spec, tmp_path, lambda stage, done: None)


def test_weights_come_from_a_safetensors_file(programs: Programs, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    inputs = MODELS["hidden"][1]
    module = Hidden()
    path = tmp_path / "w.safetensors"
    save_file(module.state_dict(), path)
    spec = BuildSpec(name="m", source="operators_models:hidden", weights=str(path), inputs=inputs)
    manifest, _, _ = programs(spec)
    image = load_image(programs.folder(spec) / "program.bundle", manifest)
    tensors = {t.name: tensor_over(image.untyped_storage(), t, 0) for t in manifest.tensors}
    assert torch.equal(tensors["linear.weight"], module.linear.weight)


# --- bundles from a client ------------------------------------------------------------------------


def test_a_client_exports_a_bundle_that_the_server_builds(
    programs: Programs, tmp_path: Path
) -> None:
    module = Several()
    module.train()
    path = tmp_path / "mine.bundle"
    example = (torch.randn(2, 8), torch.tensor([1, 2]))
    summary = export_module_to_bundle(module, example, path, ["x", "ids"])
    assert module.training
    assert module.linear.training
    assert [value["name"] for value in summary["outputs"]] == ["y0", "y1"]
    manifest, bound, arena = programs(BuildSpec(name="mine", source=str(path)))
    assert manifest.source == "bundle"
    check_bits(module.eval(), manifest, bound, arena, [1, 2, 3])


def test_keyword_inputs_keep_their_names(tmp_path: Path) -> None:
    summary = export_module_to_bundle(
        Several(), {"ids": torch.tensor([1, 2]), "x": torch.randn(2, 8)}, tmp_path / "k.bundle"
    )
    assert [value["name"] for value in summary["inputs"]] == ["ids", "x"]


class Words(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * 2


@pytest.mark.parametrize(("module", "name"), [(Words(), "ids"), (nn.Sequential(Words()), "x")])
def test_a_lone_input_has_the_modules_own_name(
    module: nn.Module, name: str, tmp_path: Path
) -> None:
    summary = export_module_to_bundle(module, torch.ones(2, 3), tmp_path / "w.bundle")
    assert [value["name"] for value in summary["inputs"]] == [name]


def test_a_pt2_file_is_converted_on_the_client(programs: Programs, tmp_path: Path) -> None:
    module = Hidden().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (torch.randn(2, 8),)), tmp_path / "m.pt2")
    convert_pt2(tmp_path / "m.pt2", tmp_path / "m.bundle")
    manifest, bound, arena = programs(BuildSpec(name="m", source=str(tmp_path / "m.bundle")))
    check_bits(module, manifest, bound, arena, [2])


def test_made_up_integers_are_small_and_the_same_for_the_same_seed(programs: Programs) -> None:
    manifest, _, _ = programs(factory_spec("several", MODELS["several"][1]))
    three = at_batch(manifest.dims, 3)
    first, again = (
        random_inputs(manifest.inputs, three, 1),
        random_inputs(manifest.inputs, three, 1),
    )
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert 0 <= first[1].min() <= first[1].max() <= 100
    assert (first[0] != random_inputs(manifest.inputs, three, 2)[0]).any()
