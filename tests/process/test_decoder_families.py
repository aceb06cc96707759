"""Families of language models: greedy tokens are those of ``generate()``, past every window.

Each is a small model of transformers with seeded random weights that goes the whole way: a folder,
a build, and a run by our executor, or by a server.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import checked_server

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.build.attention import Step
from pipeswitch.programs.build.decoder import Decoder, decoder
from pipeswitch.programs.build.program import build
from pipeswitch.programs.build.verify import load_image
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.running.executor import GraphProgram
from pipeswitch.programs.running.views import tensor_over
from pipeswitch.programs.spec import BUNDLE_FILE, BuildSpec

transformers = pytest.importorskip("transformers")

PROMPT, NEW, LONG = 33, 200, 384
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WORDS = {"vocab_size": 300, "tie_word_embeddings": False, **IDS}
BODY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **WORDS}
PLAIN = {**BODY, "intermediate_size": 96, "max_position_embeddings": LONG}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {**GROUPED, "sliding_window": 16}
SOME = {**WINDOW, "num_hidden_layers": 4}  # layers with the window
GEMMA = {**SOME, "query_pre_attn_scalar": 16}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {**GROUPED, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
HEADS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {**PLAIN, **HEADS, **ROUTED, "v_head_dim": 16, "moe_intermediate_size": 32}
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": LONG, **WORDS}
BOTH = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
GIVES = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}
SHARED = {**WINDOW, **BOTH, **GIVES, "num_kv_shared_layers": 2}
ALTUP = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6}
LOCAL = {"window_size": 16, "attention_types": [[["global", "local"], 2]], "num_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    # Full attention: learned positions, rotary ones of all or a part of each head.
    "gptj": {**OLD, "rotary_dim": 8},
    "gpt_neox": PLAIN,
    "phi": PLAIN,
    "opt": {**BODY, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": LONG},
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "stablelm": {**GROUPED, "partial_rotary_factor": 0.25},
    "cohere": GROUPED,
    "olmo2": GROUPED,
    "granite": GROUPED,
    "smollm3": GROUPED,
    "glm4": GROUPED,
    # Windows, in all layers or in some; soft caps; sinks; layers that share keys.
    "mistral": WINDOW,
    "phi3": {**WINDOW, "original_max_position_embeddings": LONG},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "starcoder2": WINDOW,
    "cohere2": SOME,
    "olmo3": SOME,
    "exaone4": {**SOME, "sliding_window_pattern": 4},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 3},
    "gemma3n_text": {**SHARED, **ALTUP, "intermediate_size": [96] * 6},
    "gemma4_text": {**SHARED, "global_head_dim": 16},
    "gpt_oss": {**SOME, **FOUR},
    # Experts.
    "mixtral": {**WINDOW, **FOUR},
    "granitemoe": {**GROUPED, **FOUR},
    "qwen2_moe": {**MANY, "shared_expert_intermediate_size": 48},
    "qwen3_moe": MANY,
    "olmoe": MANY,
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    # Their own attention: ALiBi, and a local one.
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, **WORDS},
    "falcon": {**BODY, "max_position_embeddings": LONG, "alibi": True},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": LONG, **WORDS},
    "gpt_neo": {**BODY, **LOCAL, "max_position_embeddings": LONG},
}
Run = Callable[..., Sequence[torch.Tensor]]


def plain_model(family: str, **more: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that answers are no one word again and again
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
            elif "sinks" in name:  # of no weight otherwise
                parameter.fill_(2.0)
    return model


def own(model: Any, ids: Sequence[int], new: int) -> list[int]:
    settings = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(torch.tensor([ids]), settings)
    return [int(token) for token in found[0][len(ids) :]]


def prompt(length: int, first: int = 5) -> list[int]:
    return [(first + 37 * at) % 290 + 5 for at in range(length)]


def built(model: Path, path: Path) -> tuple[Run, int]:
    """Register a folder as a builder does; return a step of it, and the width of a token's row."""
    spec = BuildSpec(
        name="m", source=f"hf:{model}", weights="pretrained", generate=True, max_batch=4
    )
    manifest = build(spec, path / "out", lambda stage, done: None)
    assert manifest.batching is not None
    assert manifest.batching.limit == 4
    file = path / "out" / BUNDLE_FILE
    image = load_image(file, manifest).untyped_storage()
    program = GraphProgram(manifest, read_bundle(file).graph, "cpu")
    bound = program.bind(lambda tensor: tensor_over(image, tensor, 0))
    width = manifest.inputs[3].shape[2]
    assert isinstance(width, int)
    return lambda *given: bound.run(given, lambda group: None), width


def together(run: Run, width: int, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Answer all in the same steps, each padded to the longest; the prompts in one step."""
    count = len(prompts)
    rows, tokens = torch.full((count, LONG, width), 3.0), [list(one) for one in prompts]
    done = [0] * count
    for _ in range(new):
        given = [one[at:] for one, at in zip(tokens, done, strict=True)]
        ids = torch.zeros(count, max(map(len, given)), dtype=torch.long)
        for at, one in enumerate(given):
            ids[at, : len(one)] = torch.tensor(one)
        counts = torch.tensor([len(one) for one in given])
        past = rows[:, : max(*done, 1)]
        logits, fresh = run(ids, counts, torch.tensor(done), past)
        for at, one in enumerate(given):
            rows[at, done[at] : done[at] + len(one)] = fresh[at, : len(one)]
            done[at] += len(one)
            tokens[at].append(int(logits[at].argmax()))
    return [one[len(asked) :] for one, asked in zip(tokens, prompts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_batch_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """Two prompts of other lengths in the same steps; the longer one begins with the shorter."""
    model = plain_model(family)
    model.save_pretrained(tmp_path / "model")
    asked = [prompt(PROMPT), prompt(PROMPT - 14)]
    found = together(*built(tmp_path / "model", tmp_path), asked, NEW)
    wanted = [own(model, one, NEW) for one in asked]
    assert len({*wanted[0]}) > 5
    assert found == wanted


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gemma3n_text"])
def test_a_wrong_window_is_found_before_it_answers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if layers attended to all tokens: equal up to the window, and other logits behind it."""
    module = Decoder(plain_model(family))
    assert {*module.spec.windows} <= {0, 16}
    module.check()
    monkeypatch.setattr(Step, "window", lambda step, layer, asked: 0)
    with pytest.raises(RegistrationRefused, match="answers other logits"):
        module.check()


def test_a_mask_hides_what_is_unused_later_or_behind_the_window() -> None:
    used = torch.tensor([5, 2])
    step = Step(torch.arange(3), used, 6)
    full = step.full(torch.float32)
    mask = step.mask(full, 4, 2)
    assert mask.shape == (2, 1, 6, 9)
    for row, count in enumerate(used.tolist()):
        for new in range(3):
            places = [*range(6), *(count + at for at in range(3))]  # of each column's token
            own_place = count + new
            wanted = [
                (column < count or column >= 6) and own_place - 4 < place <= own_place
                for column, place in enumerate(places)
            ]
            assert (mask[row, 0, new] == 0).tolist() == wanted
            assert torch.equal(mask[row, 0, new], mask[row, 0, new + 3])
    assert step.mask(full, 4, 2) is mask
    assert step.mask(full, 0, 1) is full


def test_a_layer_whose_window_is_not_that_of_its_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = plain_model("gemma2")
    monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 9)
    with pytest.raises(RegistrationRefused, match="layer 0 attends to 9 tokens") as caught:
        decoder(model)
    assert caught.value.hint


def test_a_client_registers_experts_as_they_come_and_keeps_its_model(tmp_path: Path) -> None:
    """One server, four kinds of attention; prompts that share a prefix, and two at once."""
    families = ("mistral", "gpt_oss", "qwen3_moe", "bloom")
    with checked_server(arena="32MiB", host_store="64MiB") as checked:
        client = checked.client
        for family in families:
            model = plain_model(family)
            before = model.config._experts_implementation, model.config._attn_implementation
            client.register(family, model, generate=True, precision="exact")
            after = model.config._experts_implementation, model.config._attn_implementation
            assert after == before
            start = prompt(60)
            asked = [start, start + prompt(9, 99), start + prompt(20, 7), prompt(12, 50)]
            first = [token.id for token in client.generate(family, asked[0], max_new_tokens=40)]
            streams = [client.generate(family, one, max_new_tokens=40) for one in asked[1:]]
            rest = [[token.id for token in stream] for stream in streams]
            assert [first, *rest] == [own(model, one, 40) for one in asked]


def quantized(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def test_a_quantized_checkpoint_is_loaded_as_plain_tensors(tmp_path: Path) -> None:
    """Here eight-bit floats with a scale for each block, as DeepSeek and Qwen publish them."""
    from safetensors.torch import load_file, save_file

    model = plain_model("qwen3")
    model.save_pretrained(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    for name in [one for one in weights if "_proj" in one]:
        scale = weights[name].abs().max() / 448
        eight = (weights[name] / scale).to(torch.float8_e4m3fn)
        model.get_parameter(name).data = eight.float() * scale
        weights |= {name: eight, f"{name}_scale_inv": scale.reshape(1, 1)}
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantized(tmp_path / "m", {**settings, "activation_scheme": "dynamic"})
    asked = [prompt(20), prompt(9)]
    found = together(*built(tmp_path / "m", tmp_path), asked, 30)
    assert found == [own(model, one, 30) for one in asked]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "squeezed"},
    ],
)
def test_a_quantized_checkpoint_of_another_kind_is_refused_by_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    plain_model("qwen3").save_pretrained(tmp_path / "m")
    quantized(tmp_path / "m", settings)
    spec = BuildSpec(name="m", source=f"hf:{tmp_path / 'm'}", weights="pretrained", generate=True)
    with pytest.raises(RegistrationRefused, match=settings["quant_method"]) as caught:
        build(spec, tmp_path / "out", lambda stage, done: None)
    assert "precision='int8'" in caught.value.hint
