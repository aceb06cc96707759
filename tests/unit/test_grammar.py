"""Answers that follow a JSON schema, and the calls of tools in them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.gateway.openai.text_process import parsed
from pipeswitch.gateway.openai.tools import Function, ResponseFormat, Tool, calling
from pipeswitch.ipc.messages.worker import Choosing
from pipeswitch.programs.decoding.generation import packed_tokenizer
from pipeswitch.programs.decoding.grammar import Matcher, Tokenizers, check_schema
from pipeswitch.programs.decoding.sampling import Options

SIZE = 700
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["large", "small"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count", "names"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, {"name": "now"})]


def raw(tools: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps(one).encode()) for one in tools]


@pytest.fixture(scope="module")
def words() -> Any:
    pytest.importorskip("llguidance")
    from tests.models.words import trained

    return trained("bytes")


def matcher_of(words: Any, schema: str, answer: Sequence[int] = (), digest: str = "d") -> Matcher:
    ends, tokenizers = (words.token_to_id("<end>"),), Tokenizers()
    tokenizers.packed["d"] = packed_tokenizer(words.to_str())
    return Matcher(tokenizers.get(digest, SIZE, ends), schema, ends, answer, SIZE)


@pytest.mark.parametrize("seed", range(5))
def test_any_allowed_tokens_make_an_answer_that_follows_its_schema(words: Any, seed: int) -> None:
    """Another worker takes over after any token, and allows the same ones."""
    chance, end = random.Random(seed), words.token_to_id("<end>")
    text, answer = json.dumps(SCHEMA), list[int]()
    matcher = matcher_of(words, text)
    while end not in answer:
        allowed = matcher.allowed()
        assert allowed.any()
        if chance.random() < 0.2:
            matcher = matcher_of(words, text, answer)
            assert np.array_equal(matcher.allowed(), allowed)
        choices = np.flatnonzero(allowed)
        heavy = [int(one) for one in choices if words.decode([int(one)]).strip()] or [end]
        answer.append(chance.choice(heavy if len(answer) > 20 else [int(one) for one in choices]))
        matcher.take(answer[-1])
        assert len(answer) < 400
    found = json.loads(words.decode(answer[:-1]))
    assert set(found) == {"kind", "count", "names"}
    assert found["kind"] in ("large", "small")
    assert 0 <= found["count"] <= 99


def test_a_token_that_does_not_follow_the_schema_is_refused(words: Any) -> None:
    matcher = matcher_of(words, "{}")
    refused = int(np.flatnonzero(~matcher.allowed())[1])
    with pytest.raises(InvalidInput):
        matcher.take(refused)
    for schema in ('{"type": "objec"}', '{"$ref": "#/nowhere"}'):
        with pytest.raises(InvalidInput) as caught:
            matcher_of(words, schema).allowed()
        assert caught.value.data["param"] == "response_format"
    with pytest.raises(InvalidInput):
        matcher_of(words, "{}", digest="another")


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInput) as caught:
        Tokenizers().get("d", SIZE, (1,))
    assert "pipeswitch[grammar]" in caught.value.hint


def test_a_schema_needs_an_end_token_and_leaves_no_room_for_what_contradicts_it() -> None:
    check_schema("{}", [3])
    for text, ends in (("{", [3]), ("[]", [3]), ("[" * 9000, [3]), ("{}", [])):
        with pytest.raises(InvalidInput):
            check_schema(text, ends)
    for options in ({"until": 3}, {"scores_prompt": True, "logprobs": 1}):
        with pytest.raises(InvalidInput):
            Options(json_schema="{}", **options).check(SIZE)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Options(json_schema=" " * 9000).check(SIZE)


def test_large_requests_are_not_batched() -> None:
    """Together they would not fit in a packet to a worker."""
    assert not Choosing().is_large
    assert not Choosing(options={"json_schema": "{}"}, answer=(1,) * 99).is_large
    assert Choosing(options={"json_schema": " " * 8000}).is_large
    assert Choosing(answer=(1,) * 2000).is_large
    assert Choosing(seen=((1, 2),) * 2000).is_large


def test_a_response_format_is_a_schema() -> None:
    def schema(**fields: Any) -> str:
        return calling(msgspec.convert(fields, ResponseFormat), (), None).schema

    assert schema(type="text") == ""
    assert json.loads(schema(type="json_object")) == {"type": "object"}
    assert json.loads(schema(type="json_schema", json_schema={"schema": SCHEMA})) == SCHEMA
    for fields in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a"}}):
        with pytest.raises(InvalidInput):
            schema(**fields)


def test_tools_are_called_by_the_choice() -> None:
    forced = Tool(type="function", function=Function(name="now"))
    assert calling(None, raw(TOOLS), "none").names == ()
    auto = calling(None, raw(TOOLS), None)
    assert (auto.names, auto.schema, auto.is_forced) == (("weather", "now"), "", False)
    assert json.loads(auto.rendered) == TOOLS
    both = json.loads(calling(None, raw(TOOLS), "required").schema)["anyOf"]
    assert [one["properties"]["name"]["const"] for one in both] == ["weather", "now"]
    assert both[0]["properties"]["arguments"] == WEATHER["parameters"]
    [one] = json.loads(calling(None, raw(TOOLS), forced).schema)["anyOf"]
    assert one["properties"]["name"]["const"] == "now"
    json_object = ResponseFormat(type="json_object")
    for tools, choice, form in (
        ([], "required", None),
        ([], forced, None),
        (TOOLS, Tool(type="function", function=Function(name="required")), None),
        (TOOLS, "sometimes", None),
        (TOOLS, "required", json_object),
        ([{"type": "function"}], "auto", None),
        ([{"type": "retrieval", "function": WEATHER}], "auto", None),
    ):
        with pytest.raises(InvalidInput):
            calling(form, raw(tools), choice)


def test_calls_are_found_in_a_text_and_a_text_that_is_no_call_stays() -> None:
    auto, forced = calling(None, raw(TOOLS), None), calling(None, raw(TOOLS), "required")
    call = '{"name": "weather", "arguments": {"city": {"name": "Ulm"}}}'
    block = f"<tool_call>\n{call}\n</tool_call>"
    rest, calls = auto.calls_in(f'Let me see.\n{block}\n<tool_call>{{"name": "now"}}</tool_call>')
    assert rest == "Let me see."
    assert [one["function"]["name"] for one in calls] == ["weather", "now"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": {"name": "Ulm"}}
    assert len({one["id"] for one in calls}) == 2
    assert forced.calls_in(call)[1][0]["function"] == calls[0]["function"]
    for text in (
        "Hello",
        "",
        block[:-3],
        "<tool_call>{]}</tool_call>",
        '<tool_call>{"name": "other"}</tool_call>',
        '<tool_call>{"name": []}</tool_call>',
    ):
        assert auto.calls_in(text) == (text, [])
    assert forced.calls_in(call[:-9]) == (call[:-9], [])


def test_a_template_gets_a_calls_arguments_as_an_object() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "9", "tool_call_id": "a"},
    ]
    found = parsed(json.dumps(chat).encode())
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found[0]["content"] == ""
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(InvalidInput):
        parsed(json.dumps(chat).encode())
