"""Language models as one program with a state, whose tokens must equal those of transformers.

A test begins with a folder of configuration, weights and tokenizer. From it, the program is built,
written, read, and run by our executor. The tests themselves keep the rows of its cache.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from process_tools import checked_server

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.extras.text import decoder as decoder_module
from pipeswitch.extras.text.decoder import Decoder
from pipeswitch.extras.text.decoding import generation_settings as generation_module
from pipeswitch.extras.text.decoding.generation_settings import (
    packed_tokenizer,
    tokenizer_json,
)
from pipeswitch.extras.text.decoding.output import OutputProcessor, StopCriteria
from pipeswitch.extras.text.decoding.sampling import Sampling, next_token
from pipeswitch.programs.compiler.export import export_wrapped_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.graphs.bundle import Bundle, read_bundle
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running.tensor_views import cut, padded, padded_shape
from pipeswitch.programs.spec import BUNDLE_FILE, BuildSpec
from tests.models import loading
from tests.models.words import trained

transformers = pytest.importorskip("transformers")

PROMPT, NEW = 33, 200
VOCABULARY = 700
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen2": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False},
}


@dataclass
class Made:
    """A transformers model, and the program that was built from it."""

    model: Any
    tokenizer: Any
    manifest: Manifest
    bundle: Bundle
    path: Path  # path of the bundle
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # arguments: ids, count, used, cache
    width: int

    def greedy(self, ids: Sequence[int], new: int, piece: int = 512) -> list[int]:
        """Return the next ``new`` tokens; run the prompt in pieces of ``piece`` tokens."""
        window = torch.zeros(1, 512, self.width)
        tokens, done = list(ids), 0
        while len(tokens) < len(ids) + new:
            piece_ids = torch.tensor([tokens[done : done + piece]])
            count = torch.tensor([piece_ids.shape[1]])
            logits, rows = self.run(
                piece_ids, count, torch.tensor([done]), window[:, : max(done, 1)]
            )
            window[:, done : done + piece_ids.shape[1]] = rows
            done += piece_ids.shape[1]
            if done == len(tokens):
                tokens.append(next_token(logits[0].numpy(), Sampling(), done))
        return tokens[len(ids) :]


def plain_model(model_type: str, **more: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that answers do not repeat one word
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    model = plain_model(request.param)
    model.save_pretrained(folder / "model")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained("bytes"), eos_token="<end>", chat_template="{{ messages }}"
    )
    tokenizer.save_pretrained(folder / "model")
    spec = BuildSpec(
        name="chat",
        source=f"hf:{folder / 'model'}",
        generate=True,
        max_batch=8,
        weights=str(folder / "model" / "model.safetensors"),
        bucket_bytes=64 << 10,
    )
    manifest = build(spec, folder / "out", lambda stage, done: None)
    assert manifest.extra["notes"] == []
    assert len(manifest.groups) > 2
    bundle = read_bundle(folder / "out" / BUNDLE_FILE)
    bound = loading.bound(folder / "out", manifest)

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, rows = bound.run(inputs, lambda group: None)
        return logits, rows

    width = manifest.inputs[3].shape[2]
    assert isinstance(width, int)
    return Made(model, tokenizer, manifest, bundle, folder / "out" / BUNDLE_FILE, run, width)


def own(model: Any, ids: Sequence[int], new: int) -> list[int]:
    settings = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(torch.tensor([ids]), settings)
    return [int(token) for token in output[0][len(ids) :]]


def test_greedy_tokens_are_those_of_generate_wherever_it_starts_again(decoder: Made) -> None:
    ids = decoder.tokenizer("The data set has")["input_ids"]
    ids = (ids * PROMPT)[:PROMPT]
    expected = own(decoder.model, ids, NEW)
    assert len(expected) == NEW
    assert len(set(expected)) > 30
    assert decoder.greedy(ids, NEW) == expected
    assert decoder.greedy(ids, 40, piece=7) == expected[:40]
    # Check the prompt and the tokens up to each position, eight positions in one step.
    for first in range(0, NEW, 8):
        counts = torch.arange(PROMPT + first, PROMPT + first + 8)
        ids_in = torch.tensor([[*ids, *expected][: PROMPT + first + 7]] * 8)
        used = torch.zeros(8, dtype=torch.int64)
        logits, _ = decoder.run(
            ids_in, counts.clamp(max=ids_in.shape[1]), used, torch.zeros(8, 1, decoder.width)
        )
        assert logits.argmax(-1).tolist()[:7] == expected[first : first + 7]


def test_in_one_step_with_others_a_sequence_answers_as_alone(decoder: Made) -> None:
    """Compute prompts and single tokens after different pasts in one step, with padding."""
    torch.manual_seed(1)
    pasts, counts = [0, 1, 40, 97, 12], [17, 1, 1, 5, 1]
    ids = torch.randint(1, VOCABULARY, (5, max(counts)))
    cache = torch.randn(5, max(pasts), decoder.width)
    together, rows = decoder.run(ids, torch.tensor(counts), torch.tensor(pasts), cache)
    for index, (past, count) in enumerate(zip(pasts, counts, strict=True)):
        one = slice(index, index + 1)
        alone, own_rows = decoder.run(
            ids[one, :count],
            torch.tensor([count]),
            torch.tensor([past]),
            cache[one, : max(past, 1)],
        )
        scale = float(alone.abs().max())
        assert float((together[one] - alone).abs().max()) < 1e-5 * scale
        assert torch.allclose(rows[one, :count], own_rows, rtol=1e-4, atol=1e-4)
    cache[2, 40:] = 1e4  # changes only values that are not used, so bits must stay equal
    ids[3, 5:] = 1
    again, _ = decoder.run(ids, torch.tensor(counts), torch.tensor(pasts), cache)
    assert torch.equal(together, again)


def test_of_a_run_of_unequal_requests_each_gets_its_own_extents_and_what_pads_is_zeros() -> None:
    chance = random.Random(3)
    for axes in (1, 2, 3) * 20:
        shapes = [
            [chance.randint(1, 4) for _ in range(1 + axes)] for _ in range(chance.randint(1, 5))
        ]
        parts = [torch.rand(shape) for shape in shapes]
        whole = padded(parts, torch.full(padded_shape(parts), math.nan))
        for rows, part in zip(torch.split(whole, [*map(len, parts)]), parts, strict=True):
            assert torch.equal(cut(rows, part.shape), part)
            assert float(rows.sum()) == pytest.approx(float(part.sum()))


def test_one_whose_answers_depend_on_what_pads_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break the mask, so that all sequences but the first use padding rows: it must be noticed."""
    right = Decoder._mask

    def wrong(self: Decoder, step: Any, used: Any, cache: torch.Tensor) -> torch.Tensor:
        is_first = torch.arange(used.shape[0]) == 0
        return right(self, step, torch.where(is_first, used, cache.shape[1]), cache)

    monkeypatch.setattr(Decoder, "_mask", wrong)
    export_wrapped_to_bundle(plain_model("gpt2"), tmp_path / "chat.bundle", "generate", max_batch=4)
    spec = BuildSpec(name="chat", source=str(tmp_path / "chat.bundle"))
    with pytest.raises(RegistrationRefused, match="depends on the other requests of its batch"):
        build(spec, tmp_path / "out", lambda stage, done: None)


def test_its_bundle_says_what_its_tokens_mean(decoder: Made) -> None:
    generation = decoder.bundle.settings
    assert generation is not None
    assert (generation.vocabulary, generation.context, generation.eos_ids, generation.bos_id) == (
        700,
        256,
        (0,),
        0,
    )
    assert decoder.manifest.extra["generation"] == {
        "vocabulary": 700,
        "context": 256,
        "eos_ids": (0,),
        "bos_id": 0,
    }
    batching = decoder.manifest.batching
    assert batching is not None
    assert (batching.limit, batching.delay_ms) == (8, 0.0)
    assert decoder.manifest.extra["state"] == {"cache": ("cache_new", 1)}
    assert generation.chat_template == "{{ messages }}"
    from tokenizers import Tokenizer

    decode = Tokenizer.from_str(tokenizer_json(generation.tokenizer)).decode
    ids = decoder.tokenizer("A set of data")["input_ids"]
    answer = OutputProcessor(
        StopCriteria(max_new_tokens=20, eos_ids=generation.eos_ids), decode, ids
    )
    tokens = decoder.greedy(ids, 20)
    text = "".join(answer.push(token) for token in tokens[: tokens.index(0) if 0 in tokens else 20])
    assert text.strip("\ufffd") in decoder.tokenizer.decode(tokens)


def test_a_client_exports_its_own_model_and_keeps_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model("qwen2")
    before, attention = own(model, [5, 6, 7], 5), model.config._attn_implementation
    monkeypatch.setattr(decoder_module, "MAX_CACHE_BYTES", 100 * 192 * 4)  # room for 100 tokens
    report = export_wrapped_to_bundle(model, tmp_path / "chat.bundle", "generate", max_batch=4)
    assert report["dims"] == {"batch": [1, 4], "length": [1, 100], "past": [1, 100]}
    assert "context is 100 tokens, not 256" in report["notes"][0]
    assert model.config._attn_implementation == attention
    assert own(model, [5, 6, 7], 5) == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    spec = BuildSpec(name="chat", source=str(tmp_path / "chat.bundle"))
    build(spec, tmp_path / "out", lambda stage, done: None)
    generation = read_bundle(tmp_path / "out" / BUNDLE_FILE).settings
    assert generation is not None
    assert generation.tokenizer == b""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2, we read 1"),
        ({"vocabulary": 699}, "a decoder of 699 tokens"),
        ({"eos_ids": (700,)}, "outside the vocabulary"),
        ({"context": 512}, "a past of 1 to 512"),
        ({"bos_id": -1}, "outside the vocabulary"),
        ({"chat_template": "x" * 70_000}, "template"),
    ],
)
def test_what_a_bundle_may_not_say_of_its_tokens(
    decoder: Made, change: dict[str, Any], words: str
) -> None:
    assert decoder.bundle.settings is not None
    bad = msgspec.structs.replace(decoder.bundle.settings, **change)
    graph = decoder.bundle.graph
    with pytest.raises(RegistrationRefused, match=words):
        bad.check((*graph.inputs, *graph.outputs), graph.dims)


def test_a_bundle_that_says_other_things_than_its_graph_is_not_read(
    decoder: Made, tmp_path: Path
) -> None:
    path = tmp_path / "bad.bundle"
    text = rb"\"vocabulary\":700"
    written = decoder.path.read_bytes()
    assert written.count(text) == 1
    path.write_bytes(written.replace(text, rb"\"vocabulary\":699"))
    with pytest.raises(RegistrationRefused):
        read_bundle(path)


@pytest.mark.parametrize("cut", [0, 20])
def test_a_tokenizer_that_unfolds_without_end_is_refused(
    decoder: Made, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_tokenizer(json.dumps("x" * 10_000))
    monkeypatch.setattr(generation_module, "MAX_TOKENIZER_BYTES", 10_000 if not cut else 1 << 20)
    assert decoder.bundle.settings is not None
    bad = msgspec.structs.replace(decoder.bundle.settings, tokenizer=packed[: len(packed) - cut])
    with pytest.raises(RegistrationRefused):
        tokenizer_json(bad.tokenizer)


@pytest.mark.parametrize(
    ("model_type", "options", "chosen", "words"),
    [
        ("t5", {"d_model": 32, "num_layers": 1}, "", "it has an encoder"),
        (
            "llama4_text",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "attention_chunk_size": 16,
                "num_local_experts": 2,
                "intermediate_size_mlp": 64,
            },
            "",
            "chunked attention",
        ),
        (
            "mamba",
            {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50},
            "",
            "MambaForCausalLM keeps in layers 0 a recurrent",
        ),
        (
            "jamba",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "attn_layer_period": 2,
                "num_experts": 2,
                "attn_layer_offset": 1,
                "use_mamba_kernels": False,
            },
            "",
            "in layers 0, 2 a recurrent",
        ),
        (
            "lfm2",
            {**SMALL, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]},
            "",
            "of a convolution",
        ),
        (
            "falcon_h1",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "mamba_d_ssm": 32,
                "mamba_n_heads": 4,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
            },
            "",
            "beside keys and values",
        ),
        (
            "rwkv",
            {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50},
            "",
            "RwkvForCausalLM keeps no keys",
        ),
        ("bert", {**SMALL}, "", "not a causal language model"),
        ("gpt2", FAMILIES["gpt2"], "#GPT2Model", "GPT2Model has no logits"),
    ],
)
def test_what_keeps_another_state_is_refused_with_the_reason(
    model_type: str, options: dict[str, Any], chosen: str, words: str, tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model(model_type, **options).save_pretrained(tmp_path / "m")
    spec = BuildSpec(
        name="m", source=f"hf:{tmp_path / 'm'}{chosen}", weights="random:1", generate=True
    )
    with pytest.raises(RegistrationRefused, match=words) as caught:
        build(spec, tmp_path / "out", lambda stage, done: None)
    assert caught.value.part == "generate"


@pytest.mark.parametrize("keyword", ["indices", "position_bias", "block_table"])
def test_an_attention_that_takes_an_unknown_keyword_is_refused(
    keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass an argument whose effect the short text of the check would not show."""
    model, value = plain_model("llama"), torch.ones(1, dtype=torch.long)
    monkeypatch.setattr(model, "forward", partial(model.forward, **{keyword: value}))
    with pytest.raises(RegistrationRefused, match=keyword) as caught:
        Decoder(model).check()
    assert caught.value.part == "generate"


def test_what_answers_otherwise_with_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the decoder attend to one token too many: the check of its logits must fail."""
    module = Decoder(plain_model("llama"))
    monkeypatch.setattr(
        module,
        "_mask",
        lambda step, used, cache: torch.zeros(
            cache.shape[0], 1, step.shape[0], cache.shape[1] + step.shape[0]
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RegistrationRefused, match="answers other logits"):
            module.check()


def test_a_servers_sequence_answers_the_same_tokens(tmp_path: Path) -> None:
    """Serve a model from a folder and one from a client; their caches stay on the server."""
    transformers.AutoConfig.for_model("qwen2", **FAMILIES["qwen2"]).save_pretrained(tmp_path / "m")
    with checked_server(arena="16MiB", host_store="64MiB") as checked:
        client, model = checked.client, plain_model("qwen2")
        row = client.register("chat", model, generate=True, precision="exact")
        assert row["notes"] == []
        client.register("other", f"hf:{tmp_path / 'm'}", weights="random:1", generate=True)
        with pytest.raises(RegistrationRefused):
            client.register("not", torch.nn.Linear(2, 2), generate=True)
        prompt, new = [5, 6, 7, 8, 9], 30
        with client.sequence("chat") as sequence:
            tokens, done = list(prompt), 0
            while len(tokens) < len(prompt) + new:
                ids = np.array([tokens[done:]])
                inputs = {"count": np.array([ids.shape[1]]), "used": np.array([done])}
                logits = sequence.infer(ids=ids, **inputs)["logits"]
                done = len(tokens)
                tokens.append(next_token(logits[0], Sampling(), done))
        assert tokens[len(prompt) :] == own(model, prompt, new)


def test_a_folder_is_served_whatever_last_bits_its_weights_places_give(tmp_path: Path) -> None:
    """Include models whose logits, at a batch of one, differ in the last bits."""
    with checked_server(arena="64MiB", host_store="128MiB") as checked:
        for layers in (1, 2, 3):
            sizes = {"n_layer": layers, "n_embd": 64, "n_head": 4, "n_positions": 256}
            config = transformers.GPT2Config(vocab_size=256, eos_token_id=None, **sizes)
            folder, name = tmp_path / f"{layers}", f"m{layers}"
            transformers.GPT2LMHeadModel(config).save_pretrained(folder)
            row = checked.client.register(name, f"hf:{folder}", weights="pretrained", generate=True)
            assert row["batching"]["limit"] == 8
            with checked.client.generate(name, [1, 2, 3], max_new_tokens=4) as answer:
                assert len([*answer]) == 4


@pytest.mark.parametrize("vocabulary", [3, 100])
def test_a_vocabulary_may_be_smaller_than_the_numbers_that_are_tried(vocabulary: int) -> None:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=vocabulary, **ends, **sizes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with checked_server(arena="64MiB", host_store="128MiB") as checked:
        row = checked.client.register("small", model, generate=True)
        assert row["batching"]["limit"] == 8
