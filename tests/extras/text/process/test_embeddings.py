"""Embeddings over ``/v1`` through OpenAI's client, which must equal those of transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server

from pipeswitch.base.errors import InvalidInput
from tests.models.words import published

openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")
TEXTS = ["The data set has", "Once", "a b c d e f"]


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        yield checked


@pytest.mark.parametrize(
    ("kind", "mark", "pooling", "text"),
    [
        ("bert", "", "mean", {}),
        ("bert", "", "cls", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
        ("qwen2", "#Qwen2Model", "last", {}),
        ("qwen2", "#Qwen2Model", "mean", {"pooling_mode_mean_tokens": True}),
    ],
)
def test_an_embedding_is_the_pooled_and_normalized_hidden_state(
    running: Checked, tmp_path: Path, kind: str, mark: str, pooling: str, text: Any
) -> None:
    cls = transformers.AutoModelForCausalLM if mark else transformers.AutoModel
    tokenizer = published(tmp_path, cls, kind)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(text))
    name = f"{kind}-{pooling}"
    running.client.register(name, f"hf:{tmp_path}{mark}", weights="pretrained")
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    model, expected = transformers.AutoModel.from_pretrained(tmp_path).eval(), []
    for one in ids:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([one])).last_hidden_state[0]
        row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        expected.append((row / row.norm()).numpy())
    url = f"http://{running.running.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as ai:
        for texts in (TEXTS, ids):
            for form in ("float", "base64"):
                answer = ai.embeddings.create(model=name, input=texts, encoding_format=form)
                rows = [
                    np.frombuffer(base64.b64decode(one.embedding), np.float32)
                    if isinstance(one.embedding, str)
                    else one.embedding
                    for one in answer.data
                ]
                np.testing.assert_allclose(rows, expected, atol=1e-5)
                assert answer.usage.prompt_tokens == sum(map(len, ids))
                assert [one.index for one in answer.data] == [0, 1, 2]
        assert len(ai.embeddings.create(model=name, input=["Once"] * 100).data) == 100
        ai.embeddings.create(model=name, input=[5] * 512)  # the model's longest input
        for wrong in ([5] * 513, "x1y2" * 990, [700]):
            with pytest.raises(openai.BadRequestError):
                ai.embeddings.create(model=name, input=wrong)
        with pytest.raises(openai.BadRequestError):
            ai.completions.create(model=name, prompt="Once")
    with pytest.raises(InvalidInput):
        running.client.generate(name, "Once")


def test_a_request_has_up_to_2048_texts_and_its_rows_are_in_their_order(
    running: Checked, tmp_path: Path
) -> None:
    published(tmp_path, transformers.AutoModel, "bert")
    running.client.register("many", f"hf:{tmp_path}", weights="pretrained")
    url = f"http://{running.running.http_address}/v1"
    texts = [f"Once {number} a b c" for number in range(2048)]
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0, timeout=240) as ai:
        answer = ai.embeddings.create(model="many", input=texts)
        assert [one.index for one in answer.data] == [*range(2048)]
        for at in (0, 1023, 2047):
            [alone] = ai.embeddings.create(model="many", input=texts[at]).data
            np.testing.assert_allclose(answer.data[at].embedding, alone.embedding, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="2048"):
            ai.embeddings.create(model="many", input=[*texts, "Once"])
        with pytest.raises(openai.APIStatusError) as caught:
            ai.embeddings.create(model="many", input=["a" * 4096] * 2048)
        assert caught.value.status_code == 413


def test_a_model_of_texts_without_hidden_states_is_served_and_embeds_nothing(
    running: Checked, tmp_path: Path
) -> None:
    published(tmp_path, transformers.AutoModelForSequenceClassification, "bert")
    running.client.register("classes", f"hf:{tmp_path}", weights="pretrained")
    ids = np.array([[5, 6]], np.int64)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    assert running.client.infer("classes", inputs)["logits"].shape == (1, 2)
    with pytest.raises(InvalidInput):
        running.client._ask("generation", model="classes", body={"embedding": True})
