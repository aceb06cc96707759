"""Text over HTTP through OpenAI's unmodified client, which must equal the text from the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
import psutil
import pytest
import torch
from process_tools import Checked, checked_server, until

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, SequenceNotFound
from pipeswitch.base.roles import ANYONE
from pipeswitch.extras.text import tokenizers
from pipeswitch.extras.text.decoding.generation_settings import packed_tokenizer
from pipeswitch.extras.text.decoding.model_config import LanguageModelConfig
from pipeswitch.extras.text.decoding.output import StopCriteria
from pipeswitch.extras.text.decoding.sampling import Sampling
from pipeswitch.extras.text.tokenizer_worker import InvalidPrompt, StartGeneration, TokensGenerated
from pipeswitch.extras.text.tokenizer_worker import TokenizerWorker as TextProcess
from tests.extras.text.unit.test_answer import RANGES
from tests.models.words import trained

openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")

CONTEXT = 2048  # so long that a client can hang up during an answer
TEMPLATE = """{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}
  {{- raise_exception('no role ' + message.role) }}
{%- endif %}
<{{ message.role }}>{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PROMPT = "The data set has"
SAID: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
]


def made() -> tuple[Any, Any]:
    """Return a small model, which does not repeat one word for ever, and its tokenizer."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=700,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=None,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained("bytes"), eos_token="<end>", chat_template=TEMPLATE
    )
    return model, tokenizer


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    aliases = {"PIPESWITCH_GATEWAY__ALIASES": "gpt-4o=chat,org/m=chat,gone=absent"}
    with checked_server(
        arena="64MiB", host_store="256MiB", http=True, environment=aliases
    ) as checked:
        model, tokenizer = made()
        checked.client.register(
            "chat", model, generate=True, tokenizer=tokenizer, precision="exact"
        )
        yield checked


@pytest.fixture
def ai(running: Checked) -> Iterator[Any]:
    url = f"http://{running.running.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
        yield client
    until(lambda: running.client.sequences() == [], "no sequence is left")


def post(running: Checked, path: str, body: Any, key: str = "EMPTY") -> tuple[int, Any, Any]:
    """Send a POST request; return the status, the JSON (or a stream's events), and the headers."""
    connection = http.client.HTTPConnection(running.running.http_address, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if "event-stream" in str(answer.headers["Content-Type"]):
        return answer.status, [json.loads(one[6:]) for one in text.splitlines() if one], {}
    return answer.status, json.loads(text), answer.headers


def test_a_completion_is_what_the_sdk_generates(running: Checked, ai: Any) -> None:
    ours = running.client.generate("chat", PROMPT, max_new_tokens=40)
    text, ids = ours.text, made()[1](PROMPT)["input_ids"]
    options: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = ai.completions.create(**options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 40)
    chunks = [
        *ai.completions.create(**options, stream=True, stream_options={"include_usage": True})
    ]
    assert "".join(one.choices[0].text for one in chunks[:-1]) == text
    assert (chunks[-1].usage, chunks[-2].choices[0].finish_reason) == (whole.usage, "length")
    by_ids = ai.completions.create(**{**options, "prompt": ids})
    assert by_ids.choices[0].token_ids == ours.tokens
    stop = text[8:12]
    cut = ai.completions.create(**options, stop=stop)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    drawn = [
        ai.completions.create(**{**options, "temperature": 1.0, "seed": seed}).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    parameters = {"max_tokens": 40, "temperature": 0}
    triton = {"text_input": PROMPT, "parameters": parameters}
    _, body, _ = post(running, "/v2/models/chat/generate", triton)
    assert body == {"model_name": "chat", "model_version": "1", "text_output": text}
    _, events, _ = post(
        running, "/v2/models/chat/generate_stream", {"text_input": PROMPT, **parameters}
    )
    assert "".join(one["text_output"] for one in events) == text


def test_a_chat_is_rendered_as_transformers_does(running: Checked, ai: Any) -> None:
    tokenizer = made()[1]
    plain = [SAID[0], {"role": "user", "content": PROMPT}]
    rendered = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    ours = running.client.generate("chat", ids, max_new_tokens=30)
    tokens = [one.id for one in ours]
    options: Any = {"model": "chat", "messages": SAID, "temperature": 0}
    whole = ai.chat.completions.create(**options, max_completion_tokens=30)
    assert whole.choices[0].message.content == tokenizer.decode(tokens, skip_special_tokens=True)
    assert whole.usage.prompt_tokens == len(ids)
    chunks = []
    for chunk in ai.chat.completions.create(**options, max_tokens=30, stream=True):
        if not chunks:  # at the first chunk, drop the sequence: the tokens must continue
            with contextlib.suppress(SequenceNotFound):
                name = chunk.id.removeprefix("chatcmpl-")
                running.client._ask("sequences", body={"end": name, "tenant": ANYONE})
        chunks.append(chunk)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == (
        whole.choices[0].message.content
    )
    long: Any = {"role": "user", "content": "ab1" * 660}
    unbound = ai.chat.completions.create(**{**options, "messages": [long]})
    assert unbound.usage.prompt_tokens > 1000
    assert unbound.usage.total_tokens == CONTEXT  # the answer ends because the context is full
    assert [one.id for one in ai.models.list()] == ["chat", "gpt-4o", "org/m"]
    assert ai.models.retrieve("chat").id == "chat"
    for name in ("gpt-4o", "org/m"):
        assert ai.models.retrieve(name).id == name
    alias = {**options, "model": "gpt-4o", "extra_body": {"keep_alive": "5m", "ttl": 60}}
    other = ai.chat.completions.create(**alias, max_completion_tokens=30)
    assert other.choices == whole.choices
    with pytest.raises(openai.NotFoundError, match="absent"):
        ai.chat.completions.create(**{**options, "model": "gone"})


IDS: dict[str, Any] = {"stop_token_ids": ([[-1], [700], [1 << 62], [5, -1]], [[0, 699]])}
LOCAL = {"held", "until", "scores_prompt", "json_schema"}  # options without a field over HTTP
DOORS = ("/v1/completions", "/v1/chat/completions", "/v2/models/chat/generate")


def bodies(door: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name of an option, a body with one of its values, and whether it is refused."""
    for name in {**RANGES, **IDS}.keys() - LOCAL - ({"logprobs"} if "v2" in door else set()):
        refused, allowed = {**RANGES, **IDS}[name]
        for value in (*refused, *allowed):
            fields = {"max_tokens": 1, name: value}
            if door == "/v1/chat/completions":
                body = {"model": "chat", "messages": SAID} | fields
                body |= {"logprobs": True, "top_logprobs": value} if name == "logprobs" else {}
            elif door == "/v1/completions":
                body = {"model": "chat", "prompt": "a"} | fields
            else:
                body = {"text_input": "a", "parameters": fields}
            if name == "seed" or (name, value) in (("top_k", -1), ("top_p", 0.0)):
                continue  # each protocol has its own meaning
            with contextlib.suppress(ValueError):  # JSON has neither NaN nor infinity
                json.dumps(body, allow_nan=False)
                yield name, body, value in refused


@pytest.mark.parametrize("door", DOORS)
def test_options_out_of_their_ranges_are_refused_by_name(running: Checked, door: str) -> None:
    for name, body, is_refused in bodies(door):
        status, reply, _ = post(running, door, body)
        assert status == (400 if is_refused else 200), (body, reply)
        if is_refused and "v1" in door:
            assert reply["error"]["param"] in (name, "top_logprobs"), (body, reply)


def test_the_sdk_refuses_options_out_of_their_ranges(running: Checked) -> None:
    for name in RANGES.keys() - {"held", "scores_prompt", "json_schema"}:
        for value in RANGES[name][0]:
            with pytest.raises(InvalidInput, match=name):
                running.client.generate("chat", [1, 2], max_new_tokens=1, **{name: value})


def test_what_is_not_done_is_said_in_openais_form(running: Checked, ai: Any) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    good: Any = {"model": "chat", "prompt": PROMPT}
    for path, body, status, param, words in (
        (text, {**good, "suffix": "a"}, 400, "suffix", "not supported"),
        (text, {**good, "n": 65}, 400, "n", "1 to 64 answers"),
        (text, {**good, "ignore_eos": 1}, 400, "ignore_eos", "Expected `bool"),
        (text, {**good, "min_p": 2}, 400, "min_p", "not from"),
        (text, {**good, "min_tokens": 20}, 400, "min_tokens", "max_tokens"),
        (text, {**good, "logit_bias": {"700": 1}}, 400, "logit_bias", "not a token"),
        (text, {**good, "stop_token_ids": [-1], "min_tokens": 1}, 400, "stop_token_ids", "token"),
        (text, {**good, "prompt": [5], "echo": True}, 400, "echo", "texts"),
        (text, {**good, "temprature": 1}, 400, "temprature", "temperature"),
        (text, {**good, "max_tokens": "4"}, 400, "max_tokens", "Expected `int"),
        (text, {**good, "max_tokens": 0}, 400, "max_tokens", "below 1"),
        (text, {**good, "top_p": 2}, 400, "top_p", "top_p"),
        (text, {**good, "prompt": "a" * 140_000}, 400, None, "context length is 2048"),
        (text, {**good, "prompt": ["a", {}]}, 400, "prompt", "one text"),
        (text, {"model": "chat", "messages": SAID}, 400, "prompt", "no messages"),
        (text, {**good, "model": "chart"}, 404, None, "chart"),
        (text, b"[" * 5000, 400, None, "invalid request"),
        (text, {**good, "prompt": [1, 10**30]}, 400, None, "not valid"),
        (text, {**good, "prompt": "\ud800"}, 400, None, ""),
        (text, b" " * ((1 << 20) + 1), 413, None, "the limit"),
        (chat, {"model": "chat", "messages": []}, 400, "messages", "1 to 1024"),
        (chat, {"model": "chat", "messages": [{"role": "tool"}]}, 400, None, "no role tool"),
        (
            chat,
            {"model": "chat", "messages": [{"role": "user", "content": [{}]}]},
            400,
            "messages",
            "content must be text",
        ),
        ("/v1/v1/chat/completions", {}, 404, None, "use /v1/chat/completions: "),
        ("/v1/models/m:predict", {}, 404, None, "use POST /v2/models/m/infer"),
        ("/v1/embeddings", {"model": "chat", "input": "a"}, 400, None, "does not embed texts"),
        ("/v1/embeddings", {"model": "chat", "input": [{}]}, 400, "input", "one text"),
        (
            "/v1/embeddings",
            {"model": "chat", "input": "a", "dimensions": 3},
            400,
            "dimensions",
            "not supported",
        ),
    ):
        answer_status, reply, _ = post(running, path, body)
        assert (answer_status, reply["error"]["param"]) == (status, param), reply
        assert words in reply["error"]["message"]
        assert reply["error"].keys() == {"message", "type", "param", "code"}
    assert ai.with_options(api_key="sk-0123456789abcdef").models.list().data
    with pytest.raises(openai.NotFoundError, match="no model"):
        ai.models.retrieve("other")
    status, reply, _ = post(
        running, "/v2/models/chat/generate", {"text_input": "a", "bad_words": "b"}
    )
    assert (status, reply["code"]) == (400, "InvalidInput")


def test_answers_to_several_prompts_come_in_their_order(running: Checked, ai: Any) -> None:
    fields: Any = {"model": "chat", "max_tokens": 9, "temperature": 0}
    prompts = [PROMPT, "Once", PROMPT[:7]]
    ids = [made()[1](prompt)["input_ids"] for prompt in prompts]
    alone = [ai.completions.create(**fields, prompt=prompt) for prompt in prompts]
    tokenizers = [one.choices[0].text for one in alone]
    for prompt in (prompts, ids):
        whole = ai.completions.create(**fields, prompt=prompt)
        assert [(one.index, one.text) for one in whole.choices] == [*enumerate(tokenizers)]
        usage, options = whole.usage, {"include_usage": True}
        assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, ids)), 27)
        came, chunks = ["", "", ""], []
        stream = ai.completions.create(**fields, prompt=prompt, stream=True, stream_options=options)
        for chunk in stream:
            chunks.append(chunk)
            for choice in chunk.choices:
                came[choice.index] += choice.text
        assert (came, chunks[-1].usage) == (tokenizers, usage)
    with pytest.raises(openai.BadRequestError, match="does not fit"):
        ai.completions.create(**fields, prompt=[PROMPT, [5] * 3000])


def test_several_answers_to_one_chat_differ_as_their_seeds_do(running: Checked, ai: Any) -> None:
    options: Any = {"model": "chat", "messages": SAID, "max_tokens": 9, "temperature": 1.0}
    create = ai.chat.completions.create
    alone = [create(**options, seed=seed).choices[0].message.content for seed in (5, 6, 7)]
    whole = create(**options, seed=5, n=3)
    assert [one.message.content for one in whole.choices] == alone
    came = ["", "", ""]
    for chunk in create(**options, seed=5, n=3, stream=True):
        for choice in chunk.choices:
            came[choice.index] += choice.delta.content or ""
    assert came == alone


def test_options_of_sampling_do_what_they_say(running: Checked, ai: Any) -> None:
    options: Any = {"model": "chat", "prompt": [4, 5], "temperature": 0, "max_tokens": 30}

    def ids(**more: Any) -> Any:
        return ai.completions.create(**{**options, **more}).choices[0].token_ids

    plain = ids()
    assert plain[0] not in ids(logit_bias={plain[0]: -100})
    assert ids(logit_bias={"9": 100}) == [9] * 30
    turns = ids(frequency_penalty=2, presence_penalty=2, logit_bias={"9": 20, "8": 19})
    assert set(turns[:2]) == {8, 9}
    assert len(set(ids(extra_body={"repetition_penalty": 50}))) == 30
    for one in ({"top_k": 1}, {"min_p": 1.0}):
        assert ids(temperature=1.0, extra_body=one) == plain
    stop = {"stop_token_ids": [plain[3]]}
    assert ids(extra_body=stop) == plain[: plain.index(plain[3]) + 1]
    assert plain[3] not in ids(extra_body={**stop, "min_tokens": 12})[:12]
    options["prompt"] = PROMPT
    text = PROMPT + ai.completions.create(**options).choices[0].text
    assert ai.completions.create(**options, echo=True).choices[0].text == text
    chunks = ai.completions.create(**options, echo=True, stream=True)
    assert "".join(one.choices[0].text for one in chunks) == text


def chances_of(ids: list[int]) -> torch.Tensor:
    """Return the log probabilities of the token after each id, as transformers computes them."""
    with torch.no_grad():
        return torch.log_softmax(made()[0](torch.tensor([ids])).logits[0].double(), -1)


def batched(chunks: list[Any], name: str) -> list[Any]:
    chances = [one.choices[0].logprobs for one in chunks]
    return [row for one in chances if one is not None for row in getattr(one, name)]


def test_logprobs_are_transformers_own_in_each_form(running: Checked, ai: Any) -> None:
    prompt: list[int] = made()[1](PROMPT)["input_ids"]
    options: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    whole = ai.completions.create(**options, logprobs=3).choices[0]
    logprobs = whole.logprobs
    assert "".join(logprobs.tokens) == whole.text
    ours = [*running.client.generate("chat", PROMPT, max_new_tokens=9, logprobs=3)]
    expected = chances_of([*prompt, *[one.id for one in ours]])[len(prompt) - 1 :]
    for number, one in enumerate(ours):
        assert one.logprob == pytest.approx(float(expected[number][one.id]), abs=1e-3)
        assert [id for id, _ in one.top] == torch.topk(expected[number], 3).indices.tolist()
        assert (
            logprobs.token_logprobs[number]
            == one.logprob
            == max(logprobs.top_logprobs[number].values())
        )
    chunks = [*ai.completions.create(**options, logprobs=3, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert batched(chunks, name) == getattr(logprobs, name)
    chat: Any = {"model": "chat", "messages": SAID, "max_tokens": 5, "logprobs": True}
    choice = ai.chat.completions.create(**chat, top_logprobs=2).choices[0]
    rows = choice.logprobs.content
    # A token may be a part of a character. The chat samples, and its text has no special tokens.
    whole_bytes = b"".join(bytes(one.bytes) for one in rows if one.token != "<end>")
    assert whole_bytes.decode(errors="replace") == choice.message.content
    assert [len(one.top_logprobs) for one in rows] == [2] * 5
    with pytest.raises(InvalidInput):
        running.client.generate("chat", [1, 2], logprob=2)


@pytest.mark.parametrize("new", [0, 4])
def test_echo_with_logprobs_scores_the_prompt(running: Checked, ai: Any, new: int) -> None:
    """Make the calls of lm-eval's ``local-completions``, with lists of ids and sums of logprobs."""
    text = PROMPT + " been told of the large and the small words of all that there is, and of it"
    ids: list[int] = made()[1](text * 3)["input_ids"]
    assert len(ids) > 64  # so many ids need several runs
    options: Any = {
        "model": "chat",
        "max_tokens": new,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
    }
    prompts: Any = [ids, ids[:1], ids[3:9]]
    answers = ai.completions.create(**options, prompt=prompts, seed=1)
    for prompt, choice in zip(prompts, answers.choices, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(prompt) + new
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        expected = chances_of(prompt)
        for number, one in enumerate(prompt[1:]):
            own, top = logprobs.token_logprobs[number + 1], logprobs.top_logprobs[number + 1]
            assert own == pytest.approx(float(expected[number][one]), abs=1e-3)
            assert (own == max(top.values())) == (int(expected[number].argmax()) == one)
        assert choice.finish_reason == "length"
        assert choice.text == "".join(logprobs.tokens)
    assert answers.usage.completion_tokens == 3 * new
    chunks = [*ai.completions.create(**options, prompt=PROMPT, stream=True)]
    whole = ai.completions.create(**options, prompt=PROMPT).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert batched(chunks, "token_logprobs") == whole.logprobs.token_logprobs


FORM: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["large", "small"]}, "count": {"enum": [1, 22, 333]}},
    "required": ["kind", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # this model would write spaces for ever
}


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the extra grammar")
def test_answers_follow_their_schemas_when_workers_die(running: Checked, ai: Any) -> None:
    more: Any = {"model": "chat", "messages": SAID, "max_tokens": 99, "stream": True}
    end = {"stop_token_ids": [made()[1].convert_tokens_to_ids("<end>")]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}
    begun = [
        ai.chat.completions.create(seed=seed, response_format=form, extra_body=end, **more)
        for seed in range(4)
    ]
    for pid in running.worker_pids().values():
        psutil.Process(pid).kill()
    for stream in begun:
        chunks = [*stream]
        value = json.loads("".join(one.choices[0].delta.content or "" for one in chunks))
        assert {*value} == {"kind", "count"}
        assert chunks[-1].choices[0].finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "objec"}
    for extra in ({"response_format": {"type": "json_object"}}, {"response_format": form, **end}):
        status, body, _ = post(running, "/v1/chat/completions", {**more, **extra})
        assert (status, body["error"]["param"]) == (400, "response_format"), body


WHOLE: Any = {"type": "integer"}
COSTLY: dict[str, Any] = {
    "one large multiple": {**WHOLE, "multipleOf": 1_000_003},
    "a multiple of two numbers": {"allOf": [{**WHOLE, "multipleOf": 9973}, {"multipleOf": 9967}]},
    "one of many multiples": {**WHOLE, "anyOf": [{"multipleOf": 9000 + one} for one in range(100)]},
    "behind a long text": {
        "type": "array",
        "prefixItems": [{"const": "x" * 60}, {**WHOLE, "multipleOf": 1_000_033}],
        "minItems": 2,
    },
}


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the extra grammar")
def test_a_costly_schema_never_reaches_a_worker_by_whatever_way(running: Checked) -> None:
    """Send schemas that would take minutes, as a format, a tool, and an option of the SDK."""
    model, tokenizer = made()
    tokenizer.chat_template = "{{ tools | tojson }}" + TEMPLATE
    running.client.register("costly", model, generate=True, tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("<end>")
    chat: Any = {"model": "costly", "messages": SAID, "stop_token_ids": [end], "max_tokens": 60}
    plain = {**chat, "stop_token_ids": None, "max_tokens": 2}
    assert post(running, "/v1/chat/completions", plain)[0] == 200  # the worker has the model
    workers = [psutil.Process(pid) for pid in running.worker_pids().values()]
    before_s = sum(sum(one.cpu_times()[:2]) for one in workers)
    for number, schema in enumerate(COSTLY.values()):
        schema = {"type": "object", "properties": {f"a{number}": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        ways: list[tuple[str, Any]] = [
            ("response_format", {"response_format": form}),
            ("response_format", {"response_format": {"type": "json_object", "schema": schema}}),
            ("tools", {"tools": [tool], "tool_choice": "required"}),
            ("tools", {"tools": [tool], "tool_choice": {**tool, "function": {"name": "f"}}}),
        ]
        for param, way in ways:
            status, body, _ = post(running, "/v1/chat/completions", {**chat, **way})
            assert (status, body.get("error", {}).get("param")) == (400, param), (way, body)
            assert "Of" in body["error"]["message"]  # the part of the schema
        options = {"json_schema": json.dumps(schema), "logprobs": 1}
        with pytest.raises(InvalidInput):
            running.client.generate("costly", [5, 6], options=options).text  # noqa: B018
    assert sum(sum(one.cpu_times()[:2]) for one in workers) - before_s < 2.0
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}
    status, body, _ = post(running, "/v1/chat/completions", {**chat, "response_format": form})
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop"), body
    running.client.unregister("costly")


def test_tools_are_called_by_openais_client_whole_and_streamed(running: Checked, ai: Any) -> None:
    """Request tool calls from a model with random weights, which follows only the grammar."""
    pydantic = pytest.importorskip("pydantic")
    line = pydantic.create_model("Line", is_gift=(bool, ...), size=(Literal["S", "L"], ...))
    order = pydantic.create_model("Order", first=(line, ...), second=(line, ...))  # in $defs
    model, tokenizer = made()
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.first.size }}{% endfor %}{% endfor %}"
    )
    running.client.register("caller", model, generate=True, tokenizer=tokenizer)
    tools = [openai.pydantic_function_tool(one) for one in (order, pydantic.create_model("no"))]
    named: Any = {"type": "function", "function": {"name": "Order"}}
    end = {"stop_token_ids": [tokenizer.convert_tokens_to_ids("<end>")]}
    options: Any = {"model": "caller", "messages": SAID, "extra_body": end, "tools": tools}
    options |= {"tool_choice": named, "parallel_tool_calls": False}
    choice = ai.chat.completions.parse(**options, seed=1).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert isinstance(call.function.parsed_arguments, order)
    with ai.chat.completions.stream(**options, seed=1) as stream:
        chunks = [one.chunk for one in stream if one.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    deltas = [one.choices[0].delta.tool_calls for one in chunks if one.choices]
    assert len([one for one in deltas if one]) > 3  # arguments arrive in several pieces
    for seed in range(3):
        some = ai.chat.completions.create(**{**options, "tool_choice": "required"}, seed=seed, n=2)
        for one in some.choices:
            assert one.message.tool_calls[0].function.name in ("Order", "no")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sent"}
    later = [*SAID, choice.message.model_dump(exclude={"parsed"}), result]
    free = {**options, "tool_choice": "auto", "messages": later, "max_tokens": 5}
    answer = ai.chat.completions.create(**free).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
    for more, param in (
        ({"model": "chat"}, "tools"),  # this model's template does not use tools
        ({"extra_body": {}}, "tools"),  # a schema needs an end token, which is missing here
        ({"tool_choice": "sometimes"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.chat.completions.create(**{**options, **more})
        assert caught.value.param == param
    running.client.unregister("caller")


def test_a_prompt_that_is_too_long_has_openais_code(running: Checked) -> None:
    long = "x1y2" * 600
    chat: Any = {"messages": [{"role": "user", "content": long}]}
    for extra in ({"prompt": long}, {"prompt": [5] * CONTEXT}, {"prompt": "x" * 200_000}, chat):
        path = "/v1/chat/completions" if extra is chat else "/v1/completions"
        _, body, _ = post(running, path, {"model": "chat", **extra})
        assert body["error"]["code"] == "context_length_exceeded"


def test_a_stop_string_of_a_special_token_ends_the_answer(running: Checked, ai: Any) -> None:
    model, tokenizer = made()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    over, weight = tokenizer.convert_tokens_to_ids("<end>"), model.get_output_embeddings().weight
    options: Any = {"model": "over", "prompt": [9, 8], "max_tokens": 30, "temperature": 0}
    plain = ai.completions.create(**{**options, "model": "chat"}).choices[0].token_ids
    with torch.no_grad():
        weight[over] = weight[plain[12]] * 1.01  # so that ``over`` replaces the token plain[12]
    running.client.register("over", model, generate=True, tokenizer=tokenizer)
    ids = ai.completions.create(**options).choices[0].token_ids
    assert over in ids
    stopped = ai.completions.create(**options, stop="<end>").choices[0]
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", ids[: ids.index(over) + 1])
    chat = ai.chat.completions.create(model="over", messages=SAID, max_tokens=1)
    assert chat.choices[0].finish_reason == "length"  # the default template was used
    running.client.unregister("over")


def test_who_hangs_up_ends_the_sequence(running: Checked, ai: Any) -> None:
    options: Any = {"model": "chat", "messages": SAID, "temperature": 0, "stream": True}
    with contextlib.ExitStack() as stack:  # keeps eight long answers open at once
        for _ in range(8):
            stream = stack.enter_context(ai.chat.completions.create(**options))
            assert next(iter(stream)).choices
        assert [row["model"] for row in running.client.sequences()] == ["chat"] * 8
    until(lambda: running.client.sequences() == [], "their sequences are gone")
    with pytest.raises(openai.APITimeoutError):  # hang up while waiting for a whole answer
        ai.chat.completions.create(**{**options, "stream": False}, timeout=0.2)
    until(lambda: running.client.sequences() == [], "its sequence is gone")


def test_streams_side_by_side_lose_nothing(running: Checked) -> None:
    url = f"http://{running.running.http_address}/v1"

    async def text_of(client: Any, seed: int) -> tuple[str, Any]:
        fields = {"model": "chat", "prompt": PROMPT, "max_tokens": 24, "seed": seed}
        options = {"include_usage": True}
        stream = await client.completions.create(**fields, stream=True, stream_options=options)
        chunks = [one async for one in stream]
        return "".join(c.text for one in chunks for c in one.choices), chunks[-1].usage

    async def all_of(seeds: range) -> list[tuple[str, Any]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            return await asyncio.gather(*(text_of(client, seed) for seed in seeds))

    texts = asyncio.run(all_of(range(12)))
    alone = asyncio.run(all_of(range(5, 6)))
    assert texts[5] == alone[0]
    assert len({text for text, _ in texts}) > 6
    assert {usage.completion_tokens for _, usage in texts} == {24}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 9999999999 }}", "MemoryError"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        (ENDLESS, "took too long"),
    ],
)
def test_a_hostile_template_costs_its_own_process_alone(
    template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also let a caller hang up while the process ends: the next request must get a new process."""
    facts = LanguageModelConfig(
        version=1,
        digest="d",
        vocabulary=700,
        context=CONTEXT,
        chat_template=template,
        tokenizer=packed_tokenizer(trained("bytes").to_str()),
    )
    begin = StartGeneration(
        answer=1,
        messages=b'[{"role": "user"}]',
        sampling=Sampling(),
        ending=StopCriteria(max_new_tokens=4),
    )

    async def asks() -> Any:
        talk = await tokenizers.TokenizerClient.open(facts)
        plain = msgspec.structs.replace(begin, messages=None, prompt=PROMPT)
        assert (await talk.ask(plain)).prompt_count == len(made()[1](PROMPT)["input_ids"])
        if template == ENDLESS:
            monkeypatch.setattr(tokenizers, "TEXT_S", 0.5)
            hung_up = asyncio.create_task(talk.ask(begin))
            await asyncio.sleep(0)
            hung_up.cancel()
        try:
            return await talk.ask(begin)
        finally:
            await talk.close()

    with pytest.raises(PipeSwitchError, match=words):
        asyncio.run(asks())


def text_processes(checked: Checked) -> list[psutil.Process]:
    processes = []
    for one in psutil.Process(checked.running.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process may just have ended
            if "pipeswitch.extras.text.tokenizer_worker" in one.cmdline():
                processes.append(one)
    return processes


def test_an_answer_goes_on_when_its_text_process_ends(running: Checked, ai: Any) -> None:
    """Kill the text process several times: its successor must continue with the same text."""
    options: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 400, "temperature": 0}
    whole = ai.completions.create(**options)
    chunks = []
    for chunk in ai.completions.create(**options, stream=True):
        chunks.append(chunk)
        if len(chunks) in (2, 60, 120):
            for process in text_processes(running):
                process.kill()
    assert "".join(one.choices[0].text for one in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_answer_goes_on_when_its_text_process_has_nothing_left(
    running: Checked, ai: Any
) -> None:
    """Let the text process have no memory, no descriptor or no thread left."""
    options: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    whole = ai.completions.create(**options)
    chunks = []
    for chunk in ai.completions.create(**options, stream=True):
        chunks.append(chunk)
        if len(chunks) in (2, 100):
            for process in text_processes(running):
                for kind in (psutil.RLIMIT_DATA, psutil.RLIMIT_NOFILE):
                    process.rlimit(kind, (0, 0))
    assert "".join(one.choices[0].text for one in chunks) == whole.choices[0].text
    for process in text_processes(running):
        process.kill()
    assert ai.completions.create(**options).choices[0].text == whole.choices[0].text


def test_a_text_process_that_cannot_be_started_is_one_clear_error(running: Checked) -> None:
    gateway = psutil.Process(running.gateway_pid())
    connection = http.client.HTTPConnection(running.running.http_address, timeout=60)

    def status() -> int:
        body = json.dumps({"model": "chat", "prompt": PROMPT, "max_tokens": 4})
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    assert status() == 200
    for process in text_processes(running):
        process.kill()
    until(lambda: not text_processes(running), "it has ended")
    limit = gateway.rlimit(psutil.RLIMIT_NOFILE)
    gateway.rlimit(psutil.RLIMIT_NOFILE, (gateway.num_fds(), limit[1]))
    try:
        assert status() == 503
    finally:
        gateway.rlimit(psutil.RLIMIT_NOFILE, limit)
    assert status() == 200
    connection.close()


def test_a_text_process_without_memory_for_a_token_ends_and_refuses_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If memory runs out, a prompt must be refused, but at a token the process must end."""
    worker = TextProcess(LanguageModelConfig(version=1, digest="d", vocabulary=9, context=CONTEXT))
    begin = StartGeneration(
        answer=1, prompt=[1], sampling=Sampling(), ending=StopCriteria(max_new_tokens=4)
    )
    worker.handle(begin)

    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "_step", fails)
    assert isinstance(worker.handle(begin), InvalidPrompt)
    with pytest.raises(MemoryError):
        worker.handle(TokensGenerated(answer=1, tokens=[1]))
    with pytest.raises(MemoryError):
        worker.handle(msgspec.structs.replace(begin, so_far=[1]))


def test_one_callers_long_prompts_wait_for_anothers_turn() -> None:
    """Tokens must go first, then callers in turns, even if one caller has long prompts."""
    facts = LanguageModelConfig(
        version=1,
        digest="d",
        vocabulary=700,
        context=CONTEXT,
        tokenizer=packed_tokenizer(trained("bytes").to_str()),
    )
    order: list[str] = []

    async def asks() -> None:
        talk = await tokenizers.TokenizerClient.open(facts)
        number = iter(range(1, 100))

        async def begin(caller: str, prompt: str) -> int:
            answer = next(number)
            begin_message = StartGeneration(
                answer=answer,
                prompt=prompt,
                sampling=Sampling(),
                ending=StopCriteria(max_new_tokens=4),
            )
            with contextlib.suppress(InvalidInput):
                await talk.ask(begin_message, caller)
            order.append(caller)
            return answer

        first = await begin("alice", PROMPT)
        order.clear()
        long = [asyncio.create_task(begin("mallory", "a b " * 30_000)) for _ in range(12)]
        await asyncio.sleep(0)
        short = asyncio.create_task(begin("alice", PROMPT))
        await asyncio.sleep(0)
        await talk.ask(TokensGenerated(answer=first, tokens=[1]), "alice")
        order.append("token")
        await asyncio.gather(short, *long)
        await talk.close()

    asyncio.run(asks())
    assert order.index("token") <= 1
    assert order.index("alice") <= 3
    assert order.count("mallory") == 12


def test_more_models_than_text_processes_take_turns(tmp_path: Any) -> None:
    """Models must take turns at one text process, and answers must continue in the next turn."""
    config = tmp_path / "pipeswitch.toml"
    config.write_text("[gateway]\ntext_processes = 1\n")
    options: Any = {"arena": "64MiB", "host_store": "256MiB", "http": True}
    with checked_server(**options, args=("--config", str(config))) as checked:
        model, tokenizer = made()
        for number in range(3):
            with torch.no_grad():
                next(model.parameters()).add_(0.01)
            checked.client.register(
                f"m{number}", model, generate=True, tokenizer=tokenizer, precision="exact"
            )
        checked.client.register("ids", model, generate=True, precision="exact")
        url = f"http://{checked.running.http_address}/v1"

        async def text(client: Any, name: str) -> str:
            prompt: Any = [1, 2, 3] if name == "ids" else PROMPT
            options = {"model": name, "prompt": prompt, "max_tokens": 900, "temperature": 0}
            stream = await client.completions.create(**options, stream=True)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"
            assert len(text_processes(checked)) <= 2  # one runs, and another may be ending
            return "".join(chunk.choices[0].text for chunk in chunks)

        async def together() -> list[str]:
            names = ("m0", "m1", "m2", "ids")
            async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
                return await asyncio.gather(*(text(client, name) for name in names))

        texts = asyncio.run(together())
        assert len({*texts}) == 4
        for number in range(3):
            ours = checked.client.generate(f"m{number}", PROMPT, max_new_tokens=900)
            assert ours.text == texts[number]


def test_an_authors_settings_are_followed_or_noted(running: Checked, ai: Any) -> None:
    model, tokenizer = made()
    options: Any = {"messages": SAID, "seed": 3}
    plain = ai.chat.completions.create(
        model="chat", **options, temperature=0.7, top_p=0.5, max_tokens=6
    )
    greedy = ai.completions.create(model="chat", prompt=[4, 5], temperature=0, max_tokens=9)
    end = greedy.choices[0].token_ids[3]
    settings = model.generation_config
    settings.do_sample, settings.temperature, settings.top_p = True, 0.7, 0.5
    settings.max_new_tokens, settings.no_repeat_ngram_size = 6, 3
    settings.top_k = 700  # as many as the vocabulary has tokens
    settings.eos_token_id = [end, 9999]
    row = running.client.register(
        "own", model, generate=True, tokenizer=tokenizer, precision="exact"
    )
    answer = ai.chat.completions.create(model="own", **options)
    text = answer.choices[0].message.content
    assert plain.choices[0].message.content.startswith(text)
    assert answer.usage.completion_tokens <= 6
    ended = ai.completions.create(model="own", prompt=[4, 5], temperature=0, max_tokens=9)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 4)
    ignored: Any = {"model": "own", "prompt": [4, 5], "temperature": 0, "max_tokens": 9}
    beyond = ai.completions.create(**ignored, extra_body={"ignore_eos": True})
    assert beyond.usage.completion_tokens == 9
    notes = " ".join(next(one["notes"] for one in running.client.models() if one["name"] == "own"))
    assert "no_repeat_ngram_size = 3" in notes
    assert "9999" in notes
    assert "top_p" not in notes
    assert "no_repeat_ngram_size" in " ".join(row["notes"])


def ended_by(act: Callable[[Checked], object], path: str) -> tuple[list[Any], bool]:
    """Run ``act`` during a stream; return the events, and True if the stream was complete."""
    options: Any = {"arena": "64MiB", "host_store": "256MiB", "http": True, "settles": False}
    with checked_server(**options) as checked:
        model, tokenizer = made()
        checked.client.register(
            "chat", model, generate=True, tokenizer=tokenizer, precision="exact"
        )
        fields: Any = {"model": "chat", "prompt": PROMPT, "max_tokens": 2000, "stream": True}
        if path != "/v1/completions":
            fields = {"text_input": PROMPT, "max_tokens": 2000}
        connection = http.client.HTTPConnection(checked.running.http_address, timeout=60)
        connection.request("POST", path, json.dumps(fields).encode())
        answer, body, is_whole = connection.getresponse(), b"", True
        assert answer.headers["Transfer-Encoding"] == "chunked"
        try:
            while piece := answer.read1():
                has_begun, body = b"\n\n" in body, body + piece
                if not has_begun and b"\n\n" in body:
                    act(checked)
        except (http.client.IncompleteRead, OSError):
            is_whole = False
        connection.close()
    lines = [line for line in body.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines], is_whole


def gateway_gets(number: int, checked: Checked) -> None:
    os.kill(checked.gateway_pid(), number)


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/models/chat/generate_stream"])
@pytest.mark.parametrize(
    ("act", "says_error"),
    [
        (partial(gateway_gets, signal.SIGKILL), False),
        (partial(gateway_gets, signal.SIGTERM), True),
        (lambda checked: checked.client.unregister("chat"), True),
    ],
    ids=["gateway killed", "gateway stopped", "model unregistered"],
)
def test_a_stream_that_is_cut_does_not_look_like_an_end(
    act: Callable[[Checked], object], says_error: bool, path: str
) -> None:
    events, is_whole = ended_by(act, path)
    assert len(events) < 1000
    assert ("error" in events[-1]) is says_error
    assert says_error or not is_whole


def test_a_server_that_is_stopped_finishes_the_answers_that_have_begun() -> None:
    events, is_whole = ended_by(
        lambda checked: checked.running.process.send_signal(signal.SIGTERM), "/v1/completions"
    )
    assert is_whole
    assert events[-1]["choices"][0]["finish_reason"] == "length"
