"""GGUF files and sharded weights, as people have them on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import checked_server, command
from safetensors.torch import save_file
from torch import nn

from pipeswitch.base.errors import ModelNotFound, PipeSwitchError, RegistrationRefused
from pipeswitch.extras.text import builders

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
WIDTH, TOKENS = 64, 96
FACTS: dict[str, Any] = {
    **dict.fromkeys(("context_length", "embedding_length", "feed_forward_length"), WIDTH),
    **dict.fromkeys(("head_count", "head_count_kv", "block_count"), 2),
    "layer_norm_rms_eps": 1e-5,
    "vocab_size": TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tokenizer_model": "gpt2",
    "token_list": ["<s>", "</s>", "ab", *map(chr, range(33, 30 + TOKENS))],
    "token_types": [3, 3] + [1] * (TOKENS - 2),
    "token_merges": ["a b"],
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
MATRICES = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
PROMPT = [5, 6, 7]


def written(path: Path, kind: str = "Q8_0", architecture: str = "llama") -> Path:
    """Write a seeded random Llama with a tokenizer and a chat template."""
    random, quantized = np.random.default_rng(3), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in FACTS.items():
        getattr(writer, f"add_{key}")(value)

    def add(name: str, *shape: int) -> None:
        values = random.normal(len(shape) == 1, 0.3, shape).astype(np.float32)
        raw_type = quantized if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        rows = gguf.quants.quantize(values, raw_type)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=raw_type)

    add("token_embd", TOKENS, WIDTH)
    add("output_norm", WIDTH)
    add("output", TOKENS, WIDTH)
    for block in ("blk.0", "blk.1"):
        add(f"{block}.attn_norm", WIDTH)
        add(f"{block}.ffn_norm", WIDTH)
        for name in MATRICES:
            add(f"{block}.{name}", WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_answers_as_transformers_loads_it(tmp_path: Path) -> None:
    for name, kind in (kinds := {"q8": "Q8_0", "q4": "Q4_0", "plain": "F32"}).items():
        (tmp_path / name).mkdir()
        written(tmp_path / name / "tiny.gguf", kind)
    with checked_server(arena="64MiB", host_store="256MiB") as checked:
        client = checked.client
        row = client.register("q8", f"hf:{tmp_path}/q8/tiny.gguf", generate=True)
        assert any("(F32, Q8_0)" in note for note in row["notes"])
        client.register("q4", f"hf:{tmp_path}/q4", generate=True, precision="exact")
        words = "register", "plain", f"hf:{tmp_path}/plain/tiny.gguf", "--generate"
        done = command("--host", checked.running.ipc_address, *words)
        assert done.returncode == 0, done.stderr
        small = {"generate": True, "precision": "int8"}
        row = client.register("small", f"hf:{tmp_path}/q8/tiny.gguf", **small)
        assert row["precision"]["name"] == "int8"
        for name in kinds:
            cls = transformers.AutoModelForCausalLM
            model = cls.from_pretrained(tmp_path / name, gguf_file="tiny.gguf")
            expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
            tokens = [token.id for token in client.generate(name, PROMPT, max_new_tokens=6)]
            assert tokens == expected[0, len(PROMPT) :].tolist()[: len(tokens)], name
        facts = client._ask("generation", model="q8", body={"version": 0, "tokenizer": True})
        assert (bool(facts["chat_template"]), facts["eos_ids"]) == (True, [1])
        assert client.generate("q8", "ab", max_new_tokens=2).text


def test_a_wrong_gguf_file_is_refused_in_words(tmp_path: Path) -> None:
    data = written(tmp_path / "good.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "other.gguf").write_bytes(b"GGUX" + data[4:])
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder.gguf").mkdir()
    written(tmp_path / "odd.gguf", architecture="rwkv9")
    cases = {
        "/cut.gguf": "cut short",
        "/other.gguf": "magic",
        "/empty.gguf": "it is empty",
        "/odd.gguf": "rwkv9",
        "/none.gguf": "nothing at",
        "/folder.gguf": "nothing at|no such file",
        "": "several GGUF files: cut.gguf",
    }
    with checked_server() as checked:
        for file, text in cases.items():
            with pytest.raises(PipeSwitchError, match=text) as refusal:
                checked.client.register("m", f"hf:{tmp_path}{file}", generate=True)
            assert refusal.value.hint
        with pytest.raises(PipeSwitchError, match="needs --generate"):
            checked.client.register("m", f"hf:{tmp_path}/good.gguf", weights="pretrained")


def test_a_gguf_file_that_is_too_large_as_float32_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "q4.gguf", "Q4_0")
    monkeypatch.setattr(builders, "available_bytes", lambda: 2 * path.stat().st_size)
    with pytest.raises(RegistrationRefused, match="as float32 its weights take"):
        builders._read_gguf(path, "q4.gguf")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_one_file_of_weights(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, other, x = nn.Linear(8, 4), nn.Linear(8, 4), torch.randn(2, 8)
    index = tmp_path / f"model.{kind}.index.json"
    places = {name: f"{name}.{kind}" for name in other.state_dict()}
    for name, value in other.state_dict().items():
        save = save_file if kind == "safetensors" else torch.save
        save({"bias": torch.zeros(4), name: value}, tmp_path / places[name])
    with checked_server() as checked:
        client = checked.client
        client.register("net", net.eval(), example_inputs=(x,))
        wrong = {
            "is missing": "none.bin",
            "lack y": f"bias.{kind}",
            "not an index": 5,
            "cannot be": "x.bin",
        }
        (tmp_path / "x.bin").write_bytes(b"no shard")
        for text, place in wrong.items():
            index.write_text(json.dumps({"weight_map": {**places, "y": place}}))
            with pytest.raises(RegistrationRefused, match=text):
                client.register("net", weights=index, as_version=True)
        index.write_text(json.dumps({"weight_map": places}))
        client.register("net", weights=index, as_version=True)
        client.register("like", like="net@1", weights=index)
        with pytest.raises(ModelNotFound, match='no model "nit"'):
            client.register("m", like="nit", weights=index)
        for name in ("net", "like"):
            assert torch.equal(client.infer(name, x).value, other(x).detach())
        assert client.show("net")["source"].startswith(f"file {index.name}")
        before = client.show("net")["file"]
        save({"bias": torch.ones(4)}, tmp_path / places["bias"])
        client.register("net", weights=index, as_version=True)
        after = client.show("net")["file"]
        assert (after["name"], after["sha256"] == before["sha256"]) == (index.name, False)
