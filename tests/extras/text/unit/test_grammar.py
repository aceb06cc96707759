"""Answers that follow a JSON schema."""

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
from pipeswitch.extras.text.decoding import grammar
from pipeswitch.extras.text.decoding.generation_settings import packed_tokenizer
from pipeswitch.extras.text.decoding.sampling import Options
from pipeswitch.extras.text.tools import ResponseFormat, schema_of
from pipeswitch.ipc.messages.run import SamplingParams

SIZE = 700
FORM = {"kind": {"enum": ["large", "small"]}, "count": {"type": "integer", "maximum": 99}}
REST = {"type": "object", "required": [*FORM], "additionalProperties": False}


@pytest.fixture(scope="module")
def words() -> Any:
    pytest.importorskip("llguidance")
    from tests.models.words import trained

    return trained("bytes")


def matcher_of(
    words: Any, schema: str, answer: Sequence[int] = (), digest: str = "d"
) -> grammar.Matcher:
    ends, tokenizers = (words.token_to_id("<end>"),), grammar.Tokenizers()
    tokenizers.packed["d"] = packed_tokenizer(words.to_str())
    return grammar.Matcher(tokenizers.get(digest, SIZE, ends), schema, ends, answer, SIZE)


@pytest.mark.parametrize("seed", range(5))
def test_any_allowed_tokens_make_an_answer_that_follows_its_schema(words: Any, seed: int) -> None:
    """Another worker may continue after any token, and must allow the same next tokens."""
    chance, end = random.Random(seed), words.token_to_id("<end>")
    text, answer = json.dumps({**REST, "properties": FORM}), list[int]()
    matcher = matcher_of(words, text)
    while end not in answer:
        allowed = matcher.allowed()
        assert allowed.any()
        if chance.random() < 0.2:
            matcher = matcher_of(words, text, answer)
            assert np.array_equal(matcher.allowed(), allowed)
        choices = np.flatnonzero(allowed).tolist()
        heavy = [one for one in choices if words.decode([int(one)]).strip()] or [end]
        answer.append(int(chance.choice(heavy if len(answer) > 20 else choices)))
        matcher.take(answer[-1])
        assert len(answer) < 400
    value = json.loads(words.decode(answer[:-1]))
    assert value["kind"] in ("large", "small")
    assert value["count"] <= 99


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


UNUSABLE: dict[str, tuple[Any, str]] = {
    "an unknown type": ({"type": "objec"}, "objec"),
    "a schema of itself": ({"$ref": "#"}, "no text can follow it"),
    "an unknown place": ({"$ref": "#/nowhere"}, "/nowhere"),
    "a file": ({"items": {"$ref": "file:///etc/passwd"}, "type": "array"}, "does not fetch"),
    "a page": ({"$ref": "http://127.0.0.1:1/x"}, "does not fetch"),
    "a keyword": ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    "two keywords": ({"if": {}, "then": {}}, '"if", "then"'),
    "a format": ({"properties": {"a": {"format": "nope"}}}, "format: nope"),
    "an expression": ({"anyOf": [{"pattern": "(?=a)b"}]}, "look-around"),
    "many levels": (json.loads('{"not": ' * 7 + '{"a":' * 200 + "1" + "}" * 207), "recursion"),
    "no choice": ({"enum": []}, "Unsatisfiable"),
    "expressions": ({"pattern": "([ab]*a[ab]{14}){3}", "minLength": 99}, "[ab]*a"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_schema_is_refused_with_the_part_and_without_a_parsers_state(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    schema, expected = UNUSABLE[name]
    with pytest.raises(InvalidInput) as caught:
        grammar.try_schema(json.dumps(schema))
    assert expected in caught.value.message
    assert not {*"<\n"} & {*caught.value.message}
    assert len(caught.value.message) < 400
    assert capfd.readouterr() == ("", "")  # a caller must not be able to fill the log


def test_the_refusal_of_a_costly_schema_names_its_keywords() -> None:
    text = '{"allOf": [{"multipleOf": 7, "minLength": 2}, {"multipleOf": 9}], "type": "string"}'
    assert grammar.costly_refusal(text).message.endswith("look at allOf, multipleOf, minLength")
    assert grammar.costly_refusal("{}").message.endswith("its size")


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInput) as caught:
        grammar.try_schema("{}")
    assert "pipeswitch[grammar]" in caught.value.message


def test_a_schema_needs_an_end_token_and_leaves_no_room_for_what_contradicts_it() -> None:
    grammar.check_schema("{}", [3])
    assert grammar.ends_of((3, 4), (3, 4, 9)) == (3, 4)  # a model's own end tokens come first
    assert grammar.ends_of((), (9,)) == grammar.ends_of((3,), (9,)) == (9,)
    for text, ends in (
        ("{", [3]),
        ("[]", [3]),
        ("[" * 9000, [3]),
        ("{}", []),
    ):
        with pytest.raises(InvalidInput):
            grammar.check_schema(text, ends)
    for options in ({"until": 3}, {"scores_prompt": True, "logprobs": 1}, {"top_k": -1}):
        with pytest.raises(InvalidInput):
            Options(json_schema="{}", **options).check(SIZE)  # type: ignore[arg-type]


def test_an_answer_with_a_schema_joins_a_batch_after_its_first_token() -> None:
    schema = {"json_schema": "{}"}
    assert not SamplingParams(options={"logprobs": 1}).never_batch
    assert SamplingParams(options=schema).never_batch
    assert not SamplingParams(options=schema, answer=(1,)).never_batch
    for answer, size in (((1,), 8000), ((1,) * 2000, 2)):  # a batch would not fit into a packet
        assert SamplingParams(options={"json_schema": " " * size}, answer=answer).never_batch


def test_the_place_of_an_answer_is_kept_between_its_runs(words: Any) -> None:
    ends, tokenizers = (words.token_to_id("<end>"),), grammar.Tokenizers()
    tokenizers.packed["d"] = packed_tokenizer(words.to_str())
    text = json.dumps({**REST, "properties": FORM})
    place = "d", SIZE, ends, text
    first = tokenizers.matcher(*place, ())
    token = int(np.flatnonzero(first.allowed())[0])
    first.take(token)
    tokenizers.keep([first])
    other = tokenizers.matcher(*place, ())  # for a later answer with this schema
    assert other is not first
    assert tokenizers.matcher("d", SIZE, (*ends, 5), text, (token,)) is not first
    again = tokenizers.matcher(*place, (token,))
    assert again is first
    third = tokenizers.matcher(*place, (token,))  # two answers never share a matcher
    assert third is not first
    assert np.array_equal(third.allowed(), again.allowed())


def test_a_response_format_is_a_schema() -> None:
    def schema(**fields: Any) -> str:
        return schema_of(msgspec.json.decode(json.dumps(fields), type=ResponseFormat))

    assert json.loads(schema(type="json_object")) == {"type": "object"}
    assert json.loads(schema(type="json_schema", json_schema={"schema": REST})) == REST
    for kind in ("json_object", "json_schema"):  # llama.cpp's form
        assert json.loads(schema(type=kind, schema=REST)).items() > REST.items()
        assert json.loads(schema(type=kind, schema={"x-guidance": {}})) == {"x-guidance": {}}
    assert schema(type="text") == ""
    for fields in (
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}},
        {"type": "json_object", "json_schema": {"schema": {}}},
        {"type": "text", "schema": {}},
        {"type": "text", "json_schema": {"schema": {}}},
    ):
        with pytest.raises(InvalidInput):
            schema(**fields)
