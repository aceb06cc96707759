"""Families of language models: greedy tokens must equal those of ``generate()``, beyond windows.

Each model is a small transformers model with seeded random weights. It is saved in a folder, built,
and run by our executor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from process_tools import checked_server

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.extras.text.attention import AttentionStep
from pipeswitch.extras.text.decoder import Decoder, decoder
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.graphs.cached_attention import DecodeRows
from pipeswitch.programs.spec import BuildSpec
from tests.extras.text.process.test_decoder import own
from tests.models import loading

transformers = pytest.importorskip("transformers")

PROMPT, NEW, LONG = 33, 200, 384
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WORDS = {"vocab_size": 300, "tie_word_embeddings": False, **IDS}
BODY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **WORDS}
PLAIN = {**BODY, "intermediate_size": 96, "max_position_embeddings": LONG}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {**GROUPED, "sliding_window": 16}
SOME = {**WINDOW, "num_hidden_layers": 4}  # not all four layers have the window
GEMMA = {**SOME, "query_pre_attn_scalar": 16}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {**GROUPED, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
BOTH = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
GIVES = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}
SHARED = {**WINDOW, **BOTH, **GIVES, "num_kv_shared_layers": 2}
ALTUP = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6}
LOCAL = {"window_size": 16, "attention_types": [[["global", "local"], 2]], "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    # Full attention: learned positions, or rotary positions of all or a part of each head.
    **dict.fromkeys(("gpt_neox", "phi"), PLAIN),
    **dict.fromkeys(("qwen3", "gemma", "cohere", "olmo2", "granite", "smollm3", "glm4"), GROUPED),
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, **WORDS},
    "opt": {**BODY, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": LONG},
    "stablelm": {**GROUPED, "partial_rotary_factor": 0.25},
    # Windows in all layers or in some; soft caps; sinks; layers that share keys.
    **dict.fromkeys(("mistral", "starcoder2"), WINDOW),
    **dict.fromkeys(("cohere2", "olmo3"), SOME),
    "phi3": {**WINDOW, "original_max_position_embeddings": LONG},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
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
    "qwen3_moe": {**MANY, "norm_topk_prob": True},
    "olmoe": MANY,
    # Their own attention: ALiBi, and local attention.
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, **WORDS},
    "falcon": {**BODY, "max_position_embeddings": LONG, "alibi": True},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": LONG, **WORDS},
    "gpt_neo": {**BODY, **LOCAL, "max_position_embeddings": LONG},
}
Run = Callable[..., Sequence[torch.Tensor]]


def plain_model(family: str) -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    # The default attention of transformers 5.17 ignores a soft cap.
    own_attention = "eager" if "attn_logit_softcapping" in FAMILIES[family] else None
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=own_attention
    ).eval()
    with torch.no_grad():  # so that answers do not repeat one word
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
            elif "sinks" in name:  # with smaller values, sinks would have no effect
                parameter.fill_(2.0)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute these tiny steps on one thread: on a busy machine two wait 80 times as long."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def prompt(length: int, first: int = 5) -> list[int]:
    return [(first + 37 * at) % 290 + 5 for at in range(length)]


def built(model: Path, path: Path) -> tuple[Run, int]:
    """Build a folder's model like a builder; return its step function, and a cache row's width."""
    spec = BuildSpec(
        name="m", source=f"hf:{model}", weights="pretrained", generate=True, max_batch=4
    )
    manifest = build(spec, path / "out", lambda stage, done: None)
    assert manifest.batching is not None
    assert manifest.batching.limit == 4
    bound = loading.bound(path / "out", manifest)
    width = manifest.inputs[3].shape[2]
    assert isinstance(width, int)
    return lambda *arguments: bound.run(arguments, lambda group: None), width


def together(run: Run, width: int, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Answer all prompts in common steps, padded to the longest; return each one's new tokens."""
    rows = torch.full((len(prompts), LONG, width), 3.0)
    tokens, done = [list(one) for one in prompts], [0] * len(prompts)
    for _ in range(new):
        rests = [torch.tensor(one[at:]) for one, at in zip(tokens, done, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rests, batch_first=True)
        counts = torch.tensor([len(one) for one in rests])
        with DecodeRows(done if ids.shape[1] == 1 else []):  # a worker computes a step like this
            logits, fresh = run(ids, counts, torch.tensor(done), rows[:, : max(done) + 1])
        for at, one in enumerate(rests):
            rows[at, done[at] : done[at] + len(one)] = fresh[at, : len(one)]
            done[at] += len(one)
            tokens[at].append(int(logits[at].argmax()))
    return [one[len(prompt_ids) :] for one, prompt_ids in zip(tokens, prompts, strict=True)]


# Families that only ``pytest -m soak`` runs; a related family above always runs.
RARE: Final = (
    *("gemma", "cohere", "olmo2", "granite", "smollm3", "glm4", "stablelm", "starcoder2"),
    *("cohere2", "olmo3", "exaone4", "gemma4_text", "granitemoe", "olmoe", "qwen2_moe"),
)


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.soak) if one in RARE else one for one in FAMILIES],
)
def test_greedy_tokens_of_a_batch_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """Run two prompts of different lengths in the same steps; they begin with equal tokens."""
    model = plain_model(family)
    model.save_pretrained(tmp_path / "model")
    prompts = [prompt(PROMPT), prompt(PROMPT - 14)]
    actual = together(*built(tmp_path / "model", tmp_path), prompts, NEW)
    expected = [own(model, one, NEW) for one in prompts]
    assert len({*expected[0]}) > 5
    assert actual == expected


@pytest.mark.soak
def test_a_server_answers_families_with_shared_prefixes_side_by_side() -> None:
    """Send prompts with a common start to several models; the client's models must not change."""
    start = prompt(60)
    prompts = [start, start + prompt(9, 99), start + prompt(20, 7), prompt(12, 50)]
    with checked_server(arena="32MiB", host_store="64MiB") as checked:
        for family in ("mistral", "gpt_oss", "qwen3_moe", "bloom"):
            model = plain_model(family)
            model.generation_config.eos_token_id = None  # ``own`` ignores it, too
            expected = [own(model, one, 40) for one in prompts]
            checked.client.register(family, model, generate=True, precision="exact")
            ask = partial(checked.client.generate, family, max_new_tokens=40)
            first = [token.id for token in ask(start)]
            streams = [ask(one) for one in prompts[1:]]
            assert [first, *[[token.id for token in one] for one in streams]] == expected
            assert own(model, prompts[3], 5) == expected[3][:5]
        assert checked.stats()["tokens_reused"] >= 4 * 48  # the blocks of each family's prefix


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gemma3n_text"])
def test_a_wrong_window_is_found_before_it_answers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let layers attend to all tokens: logits must be equal up to the window, and differ beyond."""
    module = Decoder(plain_model(family))
    assert {*module.spec.windows} <= {0, 16}
    module.check()
    monkeypatch.setattr(AttentionStep, "window", lambda step, layer, width: 0)
    with pytest.raises(RegistrationRefused, match="answers other logits"):
        module.check()


def test_a_layer_whose_window_is_not_that_of_its_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = plain_model("gemma2")
    monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 9)
    with pytest.raises(RegistrationRefused, match="layer 0 attends to 9 tokens") as caught:
        decoder(model)
    assert caught.value.hint


ROTATION = {"rope_theta": 1e4, "factor": 3.0}
FACTORS = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(("rope", "context"), [("dynamic", LONG), ("longrope", 128)])
def test_rotations_that_depend_on_a_texts_length_are_served_while_they_are_constant(
    rope: str, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {**ROTATION, **(FACTORS if rope == "longrope" else {}), "rope_type": rope}
    config = {**GROUPED, "rope_parameters": parameters, "original_max_position_embeddings": 128}
    monkeypatch.setitem(FAMILIES, "phi3" if rope == "longrope" else "llama", config)
    model = plain_model("phi3" if rope == "longrope" else "llama")
    model.save_pretrained(tmp_path / "m")
    assert (decoder(model).context, model.model.rotary_emb.rope_type) == (context, rope)
    prompts = [prompt(20), prompt(9)]
    actual = together(*built(tmp_path / "m", tmp_path), prompts, 40)
    assert actual == [own(model, one, 40) for one in prompts]


def quantized(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a weight, and its float8 tensors as in checkpoints of DeepSeek and Qwen."""
    scale = weight.abs().max() / 448
    eight = (weight / scale).to(torch.float8_e4m3fn)
    return eight.float() * scale, {"": eight, "_scale_inv": scale.reshape(1, 1)}


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a weight, and its 4-bit tensors as in GPT-OSS, with one exponent per 32 numbers."""
    count, size, outputs = weight.shape
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (count, outputs, size))
    powers = torch.randint(123, 126, (count, outputs, size // 32))
    plain = values[codes % 8] * (1 - 2.0 * (codes // 8))
    plain = plain * torch.exp2(powers - 127.0).repeat_interleave(32, -1)
    pairs = codes.view(count, outputs, -1, 16, 2)
    blocks = (pairs[..., 0] | (pairs[..., 1] << 4)).byte()
    return plain.transpose(1, 2), {"_blocks": blocks, "_scales": powers.byte()}


@pytest.mark.parametrize(("family", "method"), [("qwen3", "fp8"), ("gpt_oss", "mxfp4")])
def test_a_quantized_checkpoint_is_loaded_as_plain_tensors(
    family: str, method: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = plain_model(family)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    which = r"_proj\.weight$" if method == "fp8" else r"_proj$"
    for name in [one for one in weights if re.search(which, one)]:
        plain, parts = (eight_bits if method == "fp8" else four_bits)(weights.pop(name))
        model.get_parameter(name).data = plain
        weights |= {name + end: part.contiguous() for end, part in parts.items()}
    save_file(weights, file, metadata={"format": "pt"})
    how = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    quantized(tmp_path / "m", {"quant_method": method, **(how if method == "fp8" else {})})
    prompts = [prompt(20), prompt(9)]
    actual = together(*built(tmp_path / "m", tmp_path), prompts, 30)
    assert actual == [own(model, one, 30) for one in prompts]


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "squeezed"])
def test_a_quantized_checkpoint_of_another_kind_is_refused_by_name(
    method: str, tmp_path: Path
) -> None:
    plain_model("qwen3").save_pretrained(tmp_path / "m")
    quantized(tmp_path / "m", {"quant_method": method, "bits": 4, "load_in_4bit": True})
    with pytest.raises(RegistrationRefused, match=method) as caught:
        built(tmp_path / "m", tmp_path)
    assert "precision='int8'" in caught.value.hint
