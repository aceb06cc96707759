"""Tokens of language models: alone, beside others, after kills, and of a new version."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import checked_server, kill

transformers = pytest.importorskip("transformers")


def decoder(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_a_version_may_come_from_the_file_of_save_pretrained(tmp_path: Path) -> None:
    decoder(1).save_pretrained(tmp_path / "one")
    decoder(2).save_pretrained(tmp_path / "two")
    with checked_server() as checked:
        client = checked.client
        client.register("lm", f"hf:{tmp_path / 'one'}", weights="pretrained", generate=True)
        client.register("lm", weights=tmp_path / "two" / "model.safetensors", as_version=True)
        tokens = [one.id for one in client.generate("lm", [1, 2, 3], max_new_tokens=4)]
        expected = decoder(2).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
        assert tokens == expected[0, 3:].tolist()


@pytest.mark.parametrize("form", ["", "bf16", "int8"])
def test_a_language_model_says_the_same_tokens_whatever_dies(form: str) -> None:
    torch.manual_seed(6)
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    config = transformers.GPT2Config(eos_token_id=None, **sizes)
    with checked_server(arena="32MiB") as checked:
        client = checked.client
        model = transformers.GPT2LMHeadModel(config).eval()
        row = client.register("chat", model, generate=True, precision=form)
        assert (row["precision"] or {"name": "fast"})["name"] == (form or "fast")
        with client.generate("chat", [1, 2, 3, 4], max_new_tokens=20) as answer:
            expected = [token.id for token in answer]
        assert len(expected) == 20
        with client.generate("chat", [1, 2, 3, 4], max_new_tokens=20) as answer:
            again = []
            for token in answer:
                again.append(token.id)
                if len(again) == 7:
                    for pid in checked.worker_pids().values():
                        kill(pid, signal.SIGKILL)
        assert again == expected


def test_answers_in_bf16_that_are_computed_alone_have_the_same_tokens_beside_others() -> None:
    torch.manual_seed(6)
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(eos_token_id=None, **sizes))
    prompts = [[1, 2, 3, 4], [9, 8, 7], [5] * 12]
    with checked_server(arena="32MiB") as checked:
        client = checked.client
        client.register("chat", model.eval(), generate=True, precision="bf16", max_batch=1)

        def answer(prompt: list[int]) -> list[int]:
            with client.generate("chat", prompt, max_new_tokens=60) as stream:
                return [token.id for token in stream]

        alone = [answer(prompt) for prompt in prompts]
        assert [answer(prompt) for prompt in prompts] == alone
        with ThreadPoolExecutor(6) as pool:
            assert [*pool.map(answer, prompts * 2)] == alone * 2
        assert len({*map(tuple, alone)}) == len(prompts)
