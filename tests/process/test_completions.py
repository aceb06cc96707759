"""Text over HTTP, asked by OpenAI's own client, unmodified: what it says is what the SDK says."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from process_tools import Checked, checked_server, until

from tests.models.words import trained

openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")

CONTEXT = 320
TEMPLATE = """{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}
  {{- raise_exception('no role ' + message.role) }}
{%- endif %}
<{{ message.role }}>{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
HOSTILE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PROMPT = "The data set has"
SAID: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
]


def made(template: str, seed: int) -> tuple[Any, Any]:
    """A small model whose answers are no one word again and again, and a tokenizer."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        "qwen2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=700, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=None,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained("bytes"), eos_token="<end>", chat_template=template
    )
    return model, tokenizer


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        for name, template, seed in (("chat", TEMPLATE, 7), ("slow", HOSTILE, 8)):
            model, tokenizer = made(template, seed)
            checked.client.register(name, model, generate=True, tokenizer=tokenizer)
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_left(running: Checked) -> Iterator[None]:
    yield
    until(lambda: running.stats()["pool_slabs"] == 0, "no sequence is left")


@pytest.fixture
def ai(running: Checked) -> Iterator[Any]:
    url = f"http://{running.running.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_a_completion_is_what_the_sdk_generates(running: Checked, ai: Any) -> None:
    ours = running.client.generate("chat", PROMPT, max_new_tokens=40)
    text, ids = ours.text, running.client
    asked: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = ai.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    prompt_ids = made(TEMPLATE, 7)[1](PROMPT)["input_ids"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt_ids), 40)
    chunks = [*ai.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert "".join(one.choices[0].text for one in chunks[:-1]) == text
    assert chunks[-1].usage == whole.usage
    by_ids = ai.completions.create(**{**asked, "prompt": prompt_ids})
    assert by_ids.choices[0].token_ids == ours.tokens
    stop = text[8:12]
    cut = ai.completions.create(**asked, stop=stop)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
