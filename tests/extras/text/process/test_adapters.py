"""Adapters that peft merges when a model is registered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import checked_server
from safetensors.torch import load_file, save_file

from pipeswitch.base.errors import PermissionDenied, RegistrationRefused
from pipeswitch.programs.compiler import adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and peft
LORA = {
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["c_attn"],
    "init_lora_weights": False,
    "fan_in_fan_out": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True, "use_rslora": True},
    "with.module": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**size, tie_word_embeddings=False)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def adapter(base: Path, name: str, **options: Any) -> tuple[Path, torch.nn.Module]:
    """Save an adapter; return its folder, and the model into which peft merged it."""
    folder = base.parent / name
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    torch.manual_seed(len(name))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **options}))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 10
    wrapped.save_pretrained(folder)
    return folder, wrapped.merge_and_unload().eval()


def test_adapters_of_one_base_answer_as_merged_and_only_the_first_is_exported(base: Path) -> None:
    ids = torch.randint(0, 64, (1, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with checked_server() as checked, torch.no_grad():
        client, source = checked.client, {"source": f"hf:{base}", "weights": "pretrained"}
        for kind, options in KINDS.items():
            folder, merged = adapter(base, kind, **options)
            client.register(kind, adapter=folder, **source)
            torch.testing.assert_close(client.infer(kind, inputs)["logits"], merged(ids).logits)
            source = {"like": kind}
        assert client.show("dora")["shared_bytes"] > 0


def test_without_peft_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    with pytest.raises(RegistrationRefused, match=r"pip install 'pipeswitch\[adapters\]'"):
        adapters.merged(torch.nn.Identity(), "folder")


def test_what_cannot_be_merged_is_refused_with_the_reason(base: Path) -> None:
    folder, _ = adapter(base, "short")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    del tensors[name]
    save_file({**tensors, "other": torch.zeros(1)}, file)
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(model, prompt).save_pretrained(base.parent / "prompt")
    (base.parent / "none").mkdir()
    source = {"source": f"hf:{base}", "weights": "pretrained"}
    with checked_server() as checked:
        for kind, text in (("short", name), ("prompt", "PROMPT_TUNING"), ("none", "adapter_")):
            with pytest.raises(RegistrationRefused, match=text):
                checked.client.register("m", **source, adapter=base.parent / kind)
        with checked.running.client(tcp=True) as other, pytest.raises(PermissionDenied):
            other.register("m", "hf:gpt2", weights="pretrained", adapter=folder)
