"""Requests to paths below ``/v1`` and to Triton's ``generate``, and the memory of their bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import InvalidInput, QueueFull
from pipeswitch.extras.text import anthropic
from pipeswitch.extras.text.answer_formats import openai_body
from pipeswitch.extras.text.choices import chat_logprobs, check_count, logprob_count
from pipeswitch.extras.text.completions import (
    MAX_FIELDS,
    CompletionRequest,
    TritonRequest,
    _said,
)
from pipeswitch.extras.text.decoding.model_config import BYTE_OF, Decoding, Token
from pipeswitch.extras.text.tokenizer_worker import parsed
from tests.unit.test_gateway_oip import traced

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({**CHAT, **fields})


NESTED = b"{}," * 300_000 + b"{}"  # in memory, each empty dictionary takes 64 bytes


def test_a_refusal_names_the_limit() -> None:
    error = openai_body(QueueFull("full", limit="max_queue"))["error"]
    assert (error["code"], error["limit"]) == ("QueueFull", "max_queue")
    assert "limit" not in openai_body(InvalidInput("bad"))["error"]


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": "m", "messages": [{"role": "user", "x": [%s]}]}' % NESTED,
        b'{"model": "m", "messages": [%s]}' % NESTED,
        b'{"model": "m", "messages": [], "metadata": [%s]}' % NESTED,
        b'{"model": "m", "messages": [], "user": [%s]}' % (b"[" * 500 + b"]" * 500),
    ],
)
def test_a_decoded_request_is_no_larger_than_a_few_bodies(data: bytes) -> None:
    with traced() as memory:
        request = _said(data, CompletionRequest)
    assert request.model == "m"
    assert memory.held_bytes < 2 * len(data) + 50_000
    assert memory.peak_bytes < 4 * len(data) + 50_000


@pytest.mark.parametrize(
    "prompt",
    [
        NESTED,
        b"[]," * 300_000 + b"[]",
        b"1," * 1000 + NESTED,
        b'"a",' * 200_000 + b'"a"',
        b"[1]," * 64 + b"[2]",
        b'"a",{}',
        b"null",
    ],
)
def test_a_prompt_of_many_parts_is_refused_by_its_first_parts(prompt: bytes) -> None:
    data = b'{"model": "m", "prompt": [%s]}' % prompt
    with traced() as memory, pytest.raises(InvalidInput) as caught:
        _said(data, CompletionRequest)
    assert caught.value.data["param"] == "prompt"
    assert memory.peak_bytes < 2 * len(data) + 50_000


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([""], [""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * 64, ["a"] * 64),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_these(prompt: Any, read: Any) -> None:
    assert (
        _said(msgspec.json.encode({"model": "m", "prompt": prompt}), CompletionRequest).prompt
        == read
    )


@pytest.mark.parametrize(("prompts", "n"), [(1, 0), (1, -1), (1, 65), (33, 2)])
def test_a_request_asks_for_a_bounded_number_of_answers(prompts: int, n: int) -> None:
    check_count(64 // max(n, 1), 1)
    with pytest.raises(InvalidInput) as caught:
        check_count(prompts, n)
    assert caught.value.data["param"] == "n"


def test_a_chat_of_many_fields_is_refused_before_they_are_decoded() -> None:
    for messages in (
        b'[{"role": "user", "x": [%s]}]' % NESTED,
        b"[%s]" % b",".join([b'{"content": "a", "x": [%s]}' % (b"{}," * 4000 + b"{}")] * 30),
    ):
        with traced() as memory, pytest.raises(InvalidInput, match="beside"):
            parsed(messages)
        assert memory.peak_bytes < len(messages)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (body(stop=["ab"] * 17), "stop"),  # too many, as they take memory while a request waits
        (body(**{f"x{number}": None if number % 2 else 0 for number in range(900)}), None),
        (body(logit_bias={str(number): 0 for number in range(1000)}), "logit_bias"),
        (body(max_tokens="many"), "max_tokens"),
        (b'{"messages": []}', None),
        (b"[" * 5000, None),
        (b'{"model": "\xff"}', "model"),
        (b'{"model": "m", "response_format": {"schema": {"a": "\xff"}}}', "response_format"),
        (b'{"messages": [{"content": [{"type": "tool_use", "input": "\xff"}]}]}', "messages"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        _said(data, CompletionRequest)
    assert caught.value.data.get("param") == param
    if b"\xff" in data:
        with pytest.raises(InvalidInput, match=f"'{param}' is not UTF-8"):
            anthropic.DIALECT.read(data)


def test_a_field_that_is_null_is_as_if_it_were_left_out() -> None:
    unset = {f"x{number}": None for number in range(2 * MAX_FIELDS)}
    request = _said(body(seed=None, n=None, **unset), CompletionRequest)
    assert request.seed is None
    assert parsed(bytes(request.messages)) == CHAT["messages"]


def test_tritons_parameters_stand_beside_the_text() -> None:
    data = b'{"text_input": "a", "seed": 1, "parameters": {"max_tokens": 3, "top_k": null}}'
    request = _said(data, TritonRequest)
    assert (request.text_input, request.max_tokens, request.seed) == ("a", 3, 1)


@pytest.mark.parametrize("name", [*TritonRequest.__struct_fields__, "bad_words", "no_such_field"])
@pytest.mark.parametrize("value", [b"1", b"2", b"false"])
def test_a_field_that_also_is_in_tritons_parameters_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        _said(
            b'{"%b": 1, "parameters": {"%b": %b}}' % (name.encode(), name.encode(), value),
            TritonRequest,
        )
    assert caught.value.data["param"] == name
    assert "body" in caught.value.message
    assert "parameters" in caught.value.message


@pytest.mark.parametrize(
    "messages",
    [
        b"[]",
        b"{}",
        b"3",
        b"[3]",
        b"[{}",
        b'[{"role": "user", "content": [{}]}]',
        b"[{}]" * 2,
        b"[" + b"{}," * 2000 + b"{}]",
    ],
)
def test_messages_that_are_not_a_chat_are_refused(messages: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        parsed(messages)
    assert caught.value.data["param"] == "messages"


def test_the_parts_of_a_content_are_joined() -> None:
    content = b'[{"type": "text", "text": "a"}, {"text": "b"}]'
    chat = b'[{"role": "user", "content": %b, "name": "k"}]' % content
    assert parsed(chat) == [{"role": "user", "content": "ab", "name": "k"}]


def test_chats_and_completions_ask_for_logprobs_in_their_own_forms() -> None:
    chats, texts = {None: None, False: None, True: 0}, {None: None, False: None, 5: 5}
    for request, is_chat in ((chats, True), (texts, False)):
        for logprobs, count in request.items():
            assert logprob_count(logprobs, None, is_chat=is_chat) == count
    assert logprob_count(True, 2, is_chat=True) == 2
    for own in ((None, 2, True), (3, None, True), (True, None, False), (1, 1, False)):
        with pytest.raises(InvalidInput):
            logprob_count(own[0], own[1], is_chat=own[2])


def test_the_bytes_of_a_token_are_its_own_although_it_is_a_part_of_a_character() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    decoders, data = tokenizers.decoders, "€ é\n".encode()
    assert (len(BYTE_OF), BYTE_OF["Ġ"], BYTE_OF["Ċ"], BYTE_OF["â"]) == (256, 32, 10, 0xE2)
    char_of = {byte: char for char, byte in BYTE_OF.items()}
    fallback = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for decoder, pieces in (
        (decoders.ByteLevel(), [char_of[one] for one in data]),
        (fallback, [f"<0x{one:02X}>" for one in data]),
    ):
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        tokenizer.decoder = decoder
        tokenizer.add_special_tokens(["</é>"])
        names = {id: Decoding(tokenizer).name(id) for id in range(len(data) + 2)}
        rows = chat_logprobs([Token(id, "", -1.0, [(0, -1.0)]) for id in names], names)["content"]
        assert bytes(row["bytes"][0] for row in rows[: len(data)]) == data
        assert rows[1]["top_logprobs"][0]["bytes"] == [0xE2]
        assert bytes(rows[-2]["bytes"]).decode() == "</é>"
        assert rows[-1]["bytes"] is None  # no token has this id
