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

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
WIDTH, TOKENS = 64, 96
PROMPT = [5, 6, 7]


def written(path: Path, kind: str = "Q8_0", architecture: str = "llama") -> Path:
    """Write a seeded random Llama with a tokenizer and a chat template."""
    random, quantized = np.random.default_rng(3), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "ab", *map(chr, range(33, 30 + TOKENS))])
    writer.add_token_types([3, 3] + [1] * (TOKENS - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")

    def add(name: str, *shape: int) -> None:
        values = random.normal(len(shape) == 1, 0.3, shape).astype(np.float32)
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(f"{name}.weight", values)
        else:
            rows = gguf.quants.quantize(values, quantized)
            writer.add_tensor(f"{name}.weight", rows, raw_dtype=quantized)

    add("token_embd", TOKENS, WIDTH)
    add("output_norm", WIDTH)
    add("output", TOKENS, WIDTH)
    for block in ("blk.0", "blk.1"):
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"{block}.{name}", WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_answers_as_transformers_loads_it(tmp_path: Path) -> None:
    kinds = {"q8": "Q8_0", "q4": "Q4_0", "plain": "F32"}
    for name, kind in kinds.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name / "tiny.gguf", kind)
    with checked_server(arena="64MiB", host_store="256MiB") as checked:
        client = checked.client
        rows = {
            "q8": client.register("q8", f"hf:{tmp_path}/q8/tiny.gguf", generate=True),
            "q4": client.register("q4", f"hf:{tmp_path}/q4", generate=True, precision="exact"),
        }
        words = "register", "plain", f"hf:{tmp_path}/plain/tiny.gguf", "--generate"
        done = command("--host", checked.running.ipc_address, *words, "--precision", "int8")
        assert done.returncode == 0, done.stderr
        for name in kinds:
            cls = transformers.AutoModelForCausalLM
            model = cls.from_pretrained(tmp_path / name, gguf_file="tiny.gguf")
            expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
            tokens = [token.id for token in client.generate(name, PROMPT, max_new_tokens=6)]
            assert tokens == expected[0, len(PROMPT) :].tolist()[: len(tokens)], name
        [note] = [one for one in rows["q8"]["notes"] if "tiny.gguf" in one]
        assert "F32, Q8_0" in note
        facts = client._ask("generation", model="q8", body={"version": 0, "tokenizer": True})
        assert facts["chat_template"]
        assert facts["eos_ids"] == [1]
        assert client.generate("q8", "ab", max_new_tokens=2).text


def test_a_wrong_gguf_file_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "good.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "other.gguf").write_bytes(b"GGUX" + data[4:])
    (tmp_path / "empty.gguf").touch()
    written(tmp_path / "odd.gguf", architecture="rwkv9")
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "/cut.gguf": ("cut short", {}),
        "/other.gguf": ("magic", {}),
        "/empty.gguf": ("it is empty", {}),
        "/odd.gguf": ("rwkv9", {}),
        "/none.gguf": ("no folder|no such file", {}),
        "": ("several GGUF files: cut.gguf", {}),
        "/good.gguf": ("is a language model", {"generate": False, "weights": "pretrained"}),
    }
    with checked_server() as checked:
        for file, (text, options) in cases.items():
            with pytest.raises(PipeSwitchError, match=text) as refusal:
                checked.client.register(
                    "m", f"hf:{tmp_path}{file}", **{"generate": True, **options}
                )
            assert refusal.value.hint or file == "/odd.gguf"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_one_file_of_weights(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, other, x = nn.Linear(8, 4), nn.Linear(8, 4), torch.randn(2, 8)
    index = tmp_path / f"model.{kind}.index.json"
    places = {name: f"{name}.{kind}" for name in other.state_dict()}
    for name, value in other.state_dict().items():
        save = save_file if kind == "safetensors" else torch.save
        save({name: value}, tmp_path / places[name])
    with checked_server() as checked:
        client = checked.client
        client.register("net", net.eval(), example_inputs=(x,))
        for text, more in (
            ("are missing|is missing", {"y": "none.bin"}),
            ("lack y", {"y": f"bias.{kind}"}),
        ):
            index.write_text(json.dumps({"weight_map": {**places, **more}}))
            with pytest.raises(RegistrationRefused, match=text):
                client.register("net", weights=index, as_version=True)
        index.write_text("[]")
        with pytest.raises(RegistrationRefused, match="not an index"):
            client.register("net", weights=index, as_version=True)
        index.write_text(json.dumps({"weight_map": places}))
        client.register("net", weights=index, as_version=True)
        client.register("like", like="net@1", weights=index)
        with pytest.raises(ModelNotFound, match='no model "nit"'):
            client.register("m", like="nit", weights=index)
        for name in ("net", "like"):
            assert torch.equal(client.infer(name, x).value, other(x).detach())
        assert client.show("net")["source"].startswith(f"file {index.name}")
