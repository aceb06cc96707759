"""Anthropic's, OpenAI's (responses) and Ollama's unmodified clients: each protocol's own door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from process_tools import checked_server

from tests.extras.text.process.test_completions import CONTEXT, TEMPLATE, made, post
from tests.models.words import published

anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")
openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")

SAID: Any = [{"role": "user", "content": "The data set has"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"is_gift": {"type": "boolean"}, "size": {"enum": ["S", "L"]}},
    "required": ["is_gift", "size"],
    "additionalProperties": False,
}
TOOLS = "{{ tools | tojson if tools }}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.size }}"
CALLS += "{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    words = tmp_path_factory.mktemp("words")
    published(words, transformers.AutoModel, "bert")
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        model, tokenizer = made()
        options: Any = {"generate": True, "tokenizer": tokenizer, "precision": "exact"}
        checked.client.register("chat", model, **options)
        tokenizer.chat_template = TOOLS + TEMPLATE.replace("'assistant')", "'assistant', 'tool')")
        tokenizer.chat_template += CALLS
        over = tokenizer.convert_tokens_to_ids("<end>")
        model.config.eos_token_id = model.generation_config.eos_token_id = over
        checked.client.register("caller", model, **options)
        checked.client.register("words", f"hf:{words}", weights="pretrained")
        yield checked


@pytest.fixture(scope="module")
def http(running: Any) -> str:
    return f"http://{running.running.http_address}"


@pytest.fixture(scope="module")
def text(running: Any, http: str) -> str:
    """Return what ``/v1/chat/completions`` answers to SAID."""
    with openai.OpenAI(base_url=f"{http}/v1", api_key="any", max_retries=0) as ai:
        options: Any = {"model": "chat", "messages": SAID, "max_tokens": 12, "temperature": 0}
        return str(ai.chat.completions.create(**options).choices[0].message.content)


# ------------------------------------------------------------------------------- Anthropic

GREEDY: Any = {"extra_body": {"temperature": 0}}  # the newest client has no such argument
TOOL: Any = {"name": "order", "description": "Order.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def claude(http: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=http, api_key="any", max_retries=0) as client:
        yield client


def test_anthropics_client_gets_the_same_text_whole_and_streamed(claude: Any, text: str) -> None:
    options: Any = {"model": "chat", "messages": SAID, "max_tokens": 12, **GREEDY}
    whole = claude.messages.create(**options)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert [(one.type, one.text) for one in whole.content] == [("text", text)]
    assert whole.usage.output_tokens == 12
    with claude.messages.stream(**options) as stream:
        kinds = [one.type for one in stream]
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    stop = text[4:8]
    cut = claude.messages.create(**options, stop_sequences=["never there", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_anthropics_system_and_blocks_are_rendered_like_openais(claude: Any, http: str) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"type": "text", "text": "The data "}, {"type": "text", "text": "set has"}]
    few = {"temperature": 0, "top_p": 0.9, "top_k": 3}
    options: Any = {"model": "chat", "max_tokens": 5, "extra_body": few}
    with openai.OpenAI(base_url=f"{http}/v1", api_key="any", max_retries=0) as ai:
        chat: Any = [{"role": "system", "content": "Be brief."}, *SAID]
        expected = ai.chat.completions.create(**options, messages=chat)
    said: Any = [{"role": "user", "content": blocks}]
    one = claude.messages.create(**options, system=system, messages=said)
    assert one.content[0].text == expected.choices[0].message.content
    assert one.usage.input_tokens == expected.usage.prompt_tokens
    count = claude.messages.count_tokens(model="chat", system="Be brief.", messages=SAID)
    assert count.input_tokens == expected.usage.prompt_tokens


def test_anthropics_client_calls_tools(claude: Any) -> None:
    options: Any = {"model": "caller", "max_tokens": 200, "tools": [TOOL], **GREEDY}
    forced = {**options, "tool_choice": {"type": "tool", "name": "order"}}
    whole = claude.messages.create(**forced, messages=SAID)
    assert whole.stop_reason == "tool_use"
    [call] = whole.content
    assert (call.type, call.name) == ("tool_use", "order")
    assert {*call.input} == {"is_gift", "size"}
    with claude.messages.stream(**forced, messages=SAID) as stream:
        pieces = [one.partial_json for one in stream if one.type == "input_json"]
        streamed = stream.get_final_message()
    assert json.loads("".join(pieces)) == streamed.content[0].input == call.input
    assert len(pieces) > 2
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sent"}],
    }
    later = [
        *SAID,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]
    answer = claude.messages.create(**{**options, "max_tokens": 5}, messages=later)
    assert answer.usage.input_tokens > whole.usage.input_tokens
    for choice in ("auto", "none"):
        claude.messages.create(
            **{**options, "max_tokens": 5}, messages=SAID, tool_choice={"type": choice}
        )


def test_anthropics_errors_have_their_form(running: Any, claude: Any) -> None:
    options: Any = {"model": "chat", "messages": SAID, "max_tokens": 5}
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    for error, more in (
        (anthropic.NotFoundError, {"model": "chta"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x1y2" * CONTEXT}]}),
        (anthropic.BadRequestError, {"extra_body": {"nonsense": 1}}),
        (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "w"}]}),
        (anthropic.BadRequestError, {"tools": [TOOL]}),  # this model's template reads no tools
    ):
        with pytest.raises(error) as caught:
            claude.messages.create(**options | more)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["message"]
    status, body, _ = post(running, "/v1/messages", {"model": "chat", "messages": SAID})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "max_tokens" in body["error"]["message"]


def test_what_has_no_effect_is_named(claude: Any) -> None:
    options: Any = {"model": "chat", "messages": SAID, "max_tokens": 2048}
    plain = claude.messages.with_raw_response.create(**options, thinking={"type": "disabled"})
    assert "warning" not in plain.headers
    thinking = {"type": "enabled", "budget_tokens": 1024}
    named = claude.messages.with_raw_response.create(**options, thinking=thinking)
    assert "thinking" in named.headers["warning"]


# ------------------------------------------------------------------------------- responses


@pytest.fixture(scope="module")
def ai(http: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{http}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_responses_have_the_same_text_whole_and_streamed(ai: Any, text: str) -> None:
    options: Any = {"model": "chat", "max_output_tokens": 12, "temperature": 0}
    whole = ai.responses.create(**options, input=SAID[0]["content"])
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12
    events = [*ai.responses.create(**options, input=SAID, stream=True)]
    assert [one.sequence_number for one in events] == [*range(len(events))]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    again = [*SAID, *whole.output, {"role": "user", "content": "Go on."}]
    longer = ai.responses.create(**options, input=again, instructions="Be brief.")
    assert longer.usage.input_tokens > whole.usage.input_tokens


def test_responses_follow_a_schema_and_call_tools(ai: Any) -> None:
    options: Any = {"model": "caller", "max_output_tokens": 200, "temperature": 0}
    form = {"type": "json_schema", "name": "order", "schema": SCHEMA, "strict": True}
    answer = ai.responses.create(**options, input=SAID, text={"format": form})
    assert {*json.loads(answer.output_text)} == {"is_gift", "size"}
    assert answer.status == "completed"
    with ai.responses.stream(**options, input=SAID, text={"format": form}) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_text == answer.output_text
    tool = {"type": "function", "name": "order", "parameters": SCHEMA, "strict": True}
    options |= {"tools": [tool], "tool_choice": {"type": "function", "name": "order"}}
    [call] = ai.responses.create(**options, input=SAID).output
    assert (call.type, call.name) == ("function_call", "order")
    events = [*ai.responses.create(**options, input=SAID, stream=True)]
    [done] = [one for one in events if one.type == "response.function_call_arguments.done"]
    pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == done.arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sent"}
    free = {**options, "tool_choice": "auto", "max_output_tokens": 16}
    ai.responses.create(**free, input=[*SAID, call, result])


def test_responses_refuse_what_needs_a_store_and_name_what_has_no_effect(ai: Any) -> None:
    options: Any = {"model": "chat", "input": SAID, "max_output_tokens": 16}
    for more in (
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"extra_body": {"nonsense": 1}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.responses.create(**options | more)
        assert caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        ai.responses.create(**options | {"model": "chta"})
    create = ai.responses.with_raw_response.create
    assert "warning" not in create(**options, store=False, include=[]).headers
    tools = [{"type": "web_search"}]
    named = create(**options, tools=tools, reasoning={"effort": "low"}, max_tool_calls=3).headers
    for name in ("tools.web_search", "reasoning_effort", "max_tool_calls"):
        assert name in str(named.get_list("warning"))


def test_a_template_gets_the_settings_that_it_reads(ai: Any) -> None:
    create = ai.chat.completions.with_raw_response.create
    options: Any = {"messages": SAID, "max_tokens": 3, "temperature": 0}
    plain = create(**options, model="caller")
    high = create(**options, model="caller", reasoning_effort="high")
    assert high.parse().usage.prompt_tokens > plain.parse().usage.prompt_tokens
    assert "warning" not in high.headers
    more = {"chat_template_kwargs": {"enable_thinking": False, "messages": []}}
    other = create(**options, model="caller", reasoning_effort="high", extra_body=more)
    assert other.parse().usage == high.parse().usage
    assert "enable_thinking" in other.headers["warning"]
    assert "messages" in other.headers["warning"]
    low = create(**options, model="chat", reasoning_effort="low")
    assert "reasoning_effort" in low.headers["warning"]


# ------------------------------------------------------------------------------- Ollama


@pytest.fixture(scope="module")
def llama(http: str) -> Iterator[Any]:
    with ollama.Client(host=http) as client:
        yield client


def test_ollamas_client_lists_and_shows_models(llama: Any) -> None:
    assert {one.model for one in llama.list().models} == {"chat", "caller", "words"}
    shown = llama.show("caller:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert llama.show("chat").capabilities == ["completion"]
    assert llama.show("words").capabilities == ["embedding"]
    assert shown.modelinfo["pipeswitch.context_length"] == CONTEXT
    with pytest.raises(ollama.ResponseError, match='did you mean "chat"') as caught:
        llama.show("chta")
    assert caught.value.status_code == 404


def test_ollamas_client_gets_the_same_text_whole_and_streamed(llama: Any, text: str) -> None:
    options = {"num_predict": 12, "temperature": 0, "num_ctx": 4096}
    whole = llama.chat("chat", SAID, options=options)
    assert (whole.message.content, whole.done_reason, whole.eval_count) == (text, "length", 12)
    pieces = [*llama.chat("chat", SAID, options=options, stream=True)]
    assert "".join(one.message.content for one in pieces) == text
    assert [one.done for one in pieces].index(True) == len(pieces) - 1
    assert pieces[-1].eval_count == 12
    one = llama.generate("chat:latest", SAID[0]["content"], options=options)
    assert one.response == text
    lines = [*llama.generate("chat", SAID[0]["content"], options=options, stream=True)]
    assert "".join(one.response for one in lines) == text
    plain = llama.generate("chat", "The data", raw=True, options=options)
    assert plain.eval_count == 12
    stopped = llama.chat("chat", SAID, options={**options, "stop": [text[4:8]]})
    assert (stopped.message.content, stopped.done_reason) == (text[: text.index(text[4:8])], "stop")
    assert llama.generate("chat").done_reason == llama.chat("chat", []).done_reason == "load"


def test_ollamas_client_calls_tools_and_gets_json(llama: Any) -> None:
    options: Any = {"num_predict": 200, "temperature": 0}
    answer = llama.chat("caller", SAID, format=SCHEMA, options=options)
    assert {*json.loads(answer.message.content)} == {"is_gift", "size"}
    tool = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
    llama.chat("caller", SAID, tools=[tool], options={**options, "num_predict": 4})
    call = {"function": {"name": "order", "arguments": {"is_gift": True, "size": "S"}}}
    later = [
        *SAID,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sent", "tool_name": "order"},
    ]
    llama.chat("caller", later, tools=[tool], options={**options, "num_predict": 4})
    with pytest.raises(ollama.ResponseError, match="template does not show tools"):
        llama.chat("chat", SAID, tools=[tool])
    with pytest.raises(ollama.ResponseError, match="images"):
        llama.chat("chat", [{**SAID[0], "images": [b"png"]}])
    with pytest.raises(ollama.ResponseError, match="suffix"):
        llama.generate("chat", "a", suffix="b")


def test_ollamas_client_embeds(llama: Any, ai: Any) -> None:
    ours = ai.embeddings.create(model="words", input=["Once", "The data"]).data
    answer = llama.embed("words", ["Once", "The data"])
    assert [[*one] for one in answer.embeddings] == [one.embedding for one in ours]
    assert len(llama.embed("words:latest", "Once").embeddings) == 1


def test_ollamas_version_and_options_without_effect(running: Any) -> None:
    options = {"num_ctx": 9, "num_predict": 2}
    body = {"model": "chat", "messages": SAID, "stream": False, "options": options}
    status, answer, headers = post(running, "/api/chat", body)
    assert (status, answer["done"]) == (200, True)
    assert "options.num_ctx" in headers["Warning"]
    assert "num_predict" not in headers["Warning"]
    status, answer, _ = post(running, "/api/chat", {**body, "nonsense": 1})
    assert (status, "nonsense" in answer["error"]) == (400, True)
    assert "pipeswitch run" in post(running, "/api/pull", {"model": "x"})[1]["error"]
