"""Weights that are served as the user meant them, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeswitch.base.errors import InvalidInput, RegistrationRefused
from pipeswitch.client.model_sources import check_program_options
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.sources import load_source
from pipeswitch.programs.spec import BuildSpec

PACKAGE = "operators_weights"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 4))


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is 8 bytes off torch's alignment, as tensors of a mapped file may be."""
    memory = bytearray(tensor.nbytes + 128)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64 + 8
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return copy.view(tensor.shape).copy_(tensor)


def mapped() -> nn.Module:
    module = plain()
    for parameter in module.parameters():
        parameter.data = misaligned(parameter.data)
    return module


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = {"plain": plain, "tied": Tied, "lazy": lazy, "mapped": mapped}
    monkeypatch.setitem(sys.modules, PACKAGE, SimpleNamespace(**makers))  # type: ignore[arg-type]


X = {"x": ((2, 8), "float32")}


def spec_of(name: str, state: dict[str, torch.Tensor], folder: Path) -> BuildSpec:
    path = folder / "it.safetensors"
    save_file({key: value.clone().contiguous() for key, value in state.items()}, path)
    return BuildSpec(name="it", source=f"{PACKAGE}:{name}", weights=str(path), inputs=X)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_what_a_wrapper_puts_before_names_is_no_part_of_them(prefix: str, tmp_path: Path) -> None:
    state = plain().state_dict()
    named = {prefix + name: value for name, value in state.items()}
    state_read = load_source(spec_of("plain", named, tmp_path)).module.state_dict()
    assert all(torch.equal(state_read[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda s: {**s, "2.bias": None}, "missing 2.bias"),
        (lambda s: {**s, "extra": torch.ones(2)}, "unexpected extra"),
        (lambda s: {f"net.{name}": value for name, value in s.items()}, "missing 0.bias"),
        (lambda s: {**s, "0.weight": torch.ones(16, 8, dtype=torch.int8)}, "int8"),
        (lambda s: {**s, "0.weight": torch.ones(8, 16)}, "size mismatch"),
        (
            lambda s: {
                f"module.{name}" * (name != "2.bias") or name: value for name, value in s.items()
            },
            "missing",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    changed: Any, words: str, tmp_path: Path
) -> None:
    state = {name: v for name, v in changed(plain().state_dict()).items() if v is not None}
    with pytest.raises(RegistrationRefused, match=words):
        load_source(spec_of("plain", state, tmp_path))


def test_a_tied_weight_is_in_the_file_once_or_twice_alike(tmp_path: Path) -> None:
    state = Tied().state_dict()
    once = {"table.weight": state["table.weight"]}
    for state_given in (once, state):
        state_read = load_source(spec_of("tied", state_given, tmp_path)).module.state_dict()
        assert torch.equal(state_read["head.weight"], state["table.weight"])
    unlike = {**state, "head.weight": state["head.weight"] + 1}
    with pytest.raises(RegistrationRefused, match=r"table.weight, head.weight"):
        load_source(spec_of("tied", unlike, tmp_path))


def test_weights_that_the_first_call_would_make_up_are_refused(tmp_path: Path) -> None:
    spec = BuildSpec(name="it", source=f"{PACKAGE}:lazy", weights="random:1", inputs=X)
    with pytest.raises(RegistrationRefused, match=r"0\.weight"):
        build(spec, tmp_path / "out", lambda stage, done: None)
    with pytest.raises(RegistrationRefused, match=r"0\.weight"):
        export_module_to_bundle(lazy(), torch.ones(2, 8), tmp_path / "it.bundle")


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForMaskedLM"])
def test_a_checkpoint_without_the_classes_head_is_refused_by_its_names(
    kind: str, tmp_path: Path
) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
    )
    BertModel(config).save_pretrained(tmp_path)
    whole = BuildSpec(name="it", source=f"hf:{tmp_path}#BertModel", weights="pretrained")
    assert load_source(whole).module
    spec = BuildSpec(name="it", source=f"hf:{tmp_path}#{kind}", weights="pretrained")
    with pytest.raises(RegistrationRefused, match="missing cl"):
        load_source(spec)
    state = load_file(tmp_path / "model.safetensors")
    del state["pooler.dense.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RegistrationRefused, match=r"missing pooler\.dense\.weight"):
        load_source(whole)


@pytest.mark.parametrize("suffix", [".pt2", ".pt", ".bundle"])
@pytest.mark.parametrize("weights", ["random:5", "pretrained", "other.safetensors", "other.pt"])
def test_a_program_takes_no_other_weights(suffix: str, weights: str) -> None:
    with pytest.raises(InvalidInput):
        check_program_options(f"own{suffix}", weights, None)


def test_a_program_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        check_program_options("own.pt2", "", X)
    check_program_options("own.pt", "", X)
    export_module_to_bundle(plain(), torch.ones(2, 8), tmp_path / "it.bundle")
    spec = BuildSpec(name="it", source=str(tmp_path / "it.bundle"), weights="random:5")
    with pytest.raises(RegistrationRefused, match="its own"):
        build(spec, tmp_path / "out", lambda stage, done: None)


def test_weights_of_a_mapped_file_are_aligned_before_anything_is_compared(tmp_path: Path) -> None:
    spec = BuildSpec(name="it", source=f"{PACKAGE}:mapped", inputs=X)
    assert {w.data_ptr() % 64 for w in load_source(spec).module.parameters()} == {0}
    module = mapped()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = export_module_to_bundle(module, torch.ones(2, 8), tmp_path / "it.bundle")
    assert {w.data_ptr() % 64 for w in module.parameters()} == {0}
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert any("aligned" in note for note in report["notes"])


def test_weights_that_others_share_stay_where_they_are(tmp_path: Path) -> None:
    module, everything = plain(), torch.zeros(300)
    module[0].weight.data = everything[2 : 2 + 128].view(16, 8)
    export_module_to_bundle(module, torch.ones(2, 8), tmp_path / "it.bundle")
    everything.fill_(1.0)
    assert float(module[0].weight.detach().sum()) == 128
