"""Tool calls in a chat: the schema of a forced call, calls in an answer's text, and templates."""

from __future__ import annotations

import json
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeswitch.base.codec import encode_json
from pipeswitch.base.errors import InvalidInput, QueueFull
from pipeswitch.extras.text import anthropic, ollama, responses
from pipeswitch.extras.text.completions import CompletionRequest, TritonRequest, _said
from pipeswitch.extras.text.decoder import _chat_template
from pipeswitch.extras.text.decoding.generation_settings import packed_tokenizer
from pipeswitch.extras.text.decoding.grammar import Tokenizers
from pipeswitch.extras.text.decoding.model_config import LanguageModelConfig, Token
from pipeswitch.extras.text.decoding.output import StopCriteria
from pipeswitch.extras.text.decoding.sampling import Sampling
from pipeswitch.extras.text.embeddings import Embed
from pipeswitch.extras.text.tokenizer_worker import StartGeneration, parsed
from pipeswitch.extras.text.tokenizer_worker import TokenizerWorker as TextProcess
from pipeswitch.extras.text.tools import AnswerForm, CallReader

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NODE = {  # pydantic writes nested models like this
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}
WEATHER = {"name": "weather", "description": "Say it", "parameters": PLACE}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, {"name": "now"})]
CALL = '{"name": "weather", "arguments": {"city": "Ulm {\\"[\\" }"}}'
NUMBER = {"type": "function", "function": {"name": "a", "parameters": {"type": "number"}}}
HELLO = [{"role": "user", "content": "Hi"}]


def form(tools: Any = TOOLS, choice: Any = None, **more: Any) -> AnswerForm:
    body = {"model": "m", "messages": HELLO, "tools": tools, "tool_choice": choice, **more}
    return _said(json.dumps(body).encode(), CompletionRequest).form


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def read(text: str, answer_form: AnswerForm, sizes: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Push a text in pieces; return content and calls as OpenAI's clients put them together."""
    reader, content, calls, ids = CallReader(answer_form), "", list[list[str]](), set[str]()
    while text:
        size = next(sizes)
        piece, text = text[:size], text[size:]
        delta = reader.push(piece, is_last=not text)
        content += delta.get("content", "")
        for one in delta.get("tool_calls", ()):
            if one["index"] == len(calls):
                ids.add(one["id"])
                calls.append([one["function"]["name"], ""])
            calls[one["index"]][1] += one["function"]["arguments"]
    assert len(ids) == len(calls) == reader.count
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def sizes_of(seed: int) -> Any:
    chance = random.Random(seed)
    while True:
        yield 1 << 30 if seed == 0 else 1 if seed == 1 else chance.randint(1, 9)


ULM, NOW = ("weather", {"city": 'Ulm {"[" }'}), ("now", {})
MARKED, LATER = f"<tool_call>\n{CALL}\n</tool_call>", '{"name":"now","parameters":{}}'

PLAIN_TEXTS = (
    "",
    "  Hello\n\n  you \n",
    "[1] shows <b>it</b> < 3",
    '{"answer": [1, 2]}',
    '{"name": "other", "arguments": {}}',
    MARKED[:20],
    "<tool_call>{]}</tool_call> so",
    '{"n' + " " * 600 + "x",
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [ULM]),  # this is how forced calls and Llama write it
        (f"Let me see.\n{MARKED}\n<tool_call>{LATER}</tool_call>", "Let me see.", [ULM, NOW]),
        (f"[{CALL}, {LATER}]", "", [ULM, NOW]),  # this is how Mistral writes it
        (f" {MARKED}\nThat was it.", "That was it.", [ULM]),
        ('{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
        (CALL[:-1], "", [ULM]),  # cut off after the arguments
        (f"<tool_call>{{}}</tool_call>{MARKED}", "<tool_call>{}</tool_call>", [ULM]),
        *[(text, text, []) for text in PLAIN_TEXTS],
    ],
)
def test_calls_are_read_from_a_text_in_any_pieces_and_nothing_is_lost(
    seed: int, text: str, content: str, calls: list[Any]
) -> None:
    assert read(text, form(), sizes_of(seed)) == (content, calls)


def formatted(kind: Any, text: str) -> Any:
    """Return the objects of a stream that is cut, the whole answer, and an error."""
    step = SimpleNamespace(reason="length", stop="")
    first = SimpleNamespace(id="1", model="m", step=step)
    one = kind(SimpleNamespace(form=form(), max_tokens=9, temperature=1, top_p=1), [], 1)
    one.choices = SimpleNamespace(first=first, prompt_count=1, token_count=9)
    tokens = [*[Token(1, char) for char in text], None]
    stream = [event for token in tokens for event in one.events(0, token)]
    return json.loads(encode_json([*stream, one.message(), one.failed(QueueFull("full"))]))


@pytest.mark.parametrize("text", [CALL, CALL[:-9], '{"name": "now", "arguments": {"a": NaN}}'])
def test_arguments_that_are_not_a_json_object_are_empty(text: str) -> None:
    arguments = ULM[1] if text == CALL else {}
    assert formatted(anthropic.AnthropicFormat, text)[-2]["content"][0]["input"] == arguments
    for one in formatted(partial(ollama.OllamaFormat, "m", False), text)[::2]:  # stream, whole
        assert one["message"]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_response_has_distinct_ids_and_its_error_is_an_event() -> None:
    kind = partial(responses.ResponsesFormat, responses.Own(input="a"))
    *events, whole, error = formatted(kind, f"Hi{MARKED}Hi")
    ids = dict.fromkeys(one["item"]["id"] for one in events if "item" in one)
    assert [*ids] == [one["id"] for one in whole["output"]]
    assert (error["type"], error["sequence_number"]) == ("error", len(events))


def test_a_text_is_not_held_longer_than_it_may_become_a_call() -> None:
    for text in ("Hello ", "{'a'", '{"answer', "[1", "<b>"):
        assert CallReader(form()).push(text, is_last=False)["content"] == text.rstrip()
    reader = CallReader(form())
    assert reader.push("see <tool", is_last=False) == {"content": "see"}
    assert reader.push("box>", is_last=False) == {"content": " <toolbox>"}
    assert reader.push("<tool_call>", is_last=False) == {}
    begun = reader.push('{"name": "now", "arguments": {"a', is_last=False)["tool_calls"]
    assert begun[0]["function"] == {"name": "now", "arguments": '{"a'}  # sent while incomplete


@pytest.mark.parametrize("unit", [" ", "<", "[", "{", "<tool_call>", '{"n', MARKED])
def test_a_long_text_is_read_in_linear_time(unit: str) -> None:
    """Quadratic work on an endless text would occupy the gateway's loop for minutes."""
    count = 60_000 // len(unit)
    content, calls = read(unit * count, form(), sizes_of(0))
    assert (content, len(calls)) == (("", count) if unit == MARKED else (unit * count, 0))


def test_the_choice_decides_what_an_answer_must_be() -> None:
    assert form(choice="none") == form([], "auto") == form(None) == AnswerForm()
    auto = form()
    assert (auto.names, auto.schema, auto.is_forced) == (("weather", "now"), "", False)
    assert json.loads(auto.rendered) == TOOLS  # as the client has sent them
    both = json.loads(form(choice="required").schema)["anyOf"]
    assert [one["properties"]["name"]["const"] for one in both] == ["weather", "now"]
    assert both[0]["properties"]["arguments"] == PLACE
    [one] = json.loads(form(choice=choose("now")).schema)["anyOf"]
    assert one["properties"]["name"]["const"] == "now"
    assert one["properties"]["arguments"]["additionalProperties"] is False  # no arguments
    free = form(response_format={"type": "json_object"})
    assert json.loads(free.schema)["anyOf"][2] == {"type": "object"}
    assert (free.is_forced, free.names) == (False, auto.names)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        (TOOLS, choose("required"), "tool_choice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "allowed_tools"}, "tool_choice"),
        ([{"type": "function"}], None, "tools"),
        ([{"type": "retrieval", "function": WEATHER}], None, "tools"),
        ([choose('a"b')], None, "tools"),
        ("weather", None, "tools"),
        (TOOLS * 65, None, "tools"),
        ([NUMBER], "required", "tools"),
        ([choose("a") | {"x": "y" * 70_000}], None, "tools"),
    ],
)
def test_what_cannot_be_called_is_refused_by_its_name(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        form(tools, choice)
    assert caught.value.data["param"] == param


@pytest.mark.parametrize("seed", range(8))
def test_any_tokens_of_a_forced_call_are_a_call(seed: int) -> None:
    """Choose random tokens that the schema allows: the model's weights must not matter."""
    pytest.importorskip("llguidance")
    from tests.models.words import trained

    words, chance = trained("bytes"), random.Random(seed)
    answer, tokenizers = list[int](), Tokenizers()
    tokenizers.packed["d"], end = packed_tokenizer(words.to_str()), words.token_to_id("<end>")
    tree = {"type": "function", "function": {"name": "tree", "parameters": NODE}}
    answer_form = form([choose("now"), tree], choose("tree") if seed % 2 else "required")
    matcher = tokenizers.matcher("d", 700, (end,), answer_form.schema, ())
    while end not in answer:
        choices = np.flatnonzero(matcher.allowed()).tolist()
        short = [one for one in choices if one == end or b"}" in words.decode([one]).encode()]
        answer.append(chance.choice((len(answer) > 40 and short) or choices))
        matcher.take(answer[-1])
        assert len(answer) < 600
    content, [(name, arguments)] = read(words.decode(answer[:-1]), answer_form, sizes_of(seed))
    assert content == ""
    assert name == "tree" if seed % 2 else name in ("now", "tree")
    if name == "tree":
        assert arguments["root"]["leaf"] in (True, False)


QWEN = (
    "{%- if tools %}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{%- endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
)
PLAIN = "{# no tools #}{% for m in messages %}{{ m.role }}: {{ m.content }} tools{% endfor %}"


def rendered(template: str, messages: Any, tools: bytes) -> Any:
    from tests.models.words import trained

    words = trained("bytes")
    facts = LanguageModelConfig(
        version=1,
        digest="d",
        vocabulary=700,
        context=4096,
        chat_template=template,
        tokenizer=packed_tokenizer(words.to_str()),
    )
    begin = StartGeneration(
        answer=1,
        messages=json.dumps(messages).encode(),
        tools=tools,
        sampling=Sampling(),
        ending=StopCriteria(max_new_tokens=4),
    )
    reply: Any = TextProcess(facts).handle(begin)
    prompt = getattr(reply, "prompt", None)
    return reply if prompt is None else words.decode(np.frombuffer(prompt, np.int32).tolist())


def test_a_template_shows_the_tools_and_the_calls_so_far() -> None:
    function_call = choose("weather")
    function_call["function"]["arguments"] = '{"city": "Ulm"}'
    chat = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [function_call]}]
    chat.append({"role": "tool", "content": "9", "tool_call_id": "a"})
    text = rendered(QWEN, chat, form().rendered)
    assert text == "".join(map(json.dumps, TOOLS)) + "user:Hiassistant:Ulmtool:9"
    assert rendered(QWEN, HELLO, b"") == "user:Hi"
    for blind in ("", "{% set tools = [] %}{{ tools }}", "{{ (tools or [])[:0] | join }}"):
        refused = rendered(blind + PLAIN, HELLO, form().rendered)
        assert (refused.param, bool(refused.hint)) == ("tools", True)

    def arguments(value: Any) -> Any:
        calls = [{"function": {"name": "now", "arguments": value}}]
        chat = json.dumps([{"role": "assistant", "tool_calls": calls}]).encode()
        return parsed(chat)[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": 1}') == arguments({"a": 1}) == {"a": 1}
    assert arguments("") == {}
    for cut in ("{", '{"city": "U', "null", "[1]", '"a"', "5", "{'a': 1}", "sorry", "[" * 3000):
        assert arguments(cut) == cut  # the server's own call, sent back
        chat[1]["tool_calls"][0]["function"]["arguments"] = cut  # type: ignore[index]
        items = "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function."
        items += "arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
        assert rendered(items, chat, b"") == f"arguments={cut}"
    odd = [{"role": "a", "tool_calls": one} for one in (None, 1, [1], [{"function": 2}])]
    assert len(parsed(json.dumps(odd).encode())) == 4


def test_the_template_named_tool_use_renders_tools() -> None:
    template, notes = _chat_template({"default": PLAIN + "\n", "tool_use": QWEN, "rag": "x"})
    assert notes == []
    assert rendered(template, HELLO, b"") == "user: Hi tools"
    assert rendered(template, HELLO, form().rendered).endswith("user:Hi")
    assert _chat_template({"default": PLAIN, "rag": "x"}) == (PLAIN, [])


SEEN = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
ASKED = {"id": "c", "type": "function", "index": 0, "function": {"name": "now", "arguments": "{}"}}
TURN = {
    "role": "assistant",
    "content": None,
    "parsed": {"a": 1},
    "refusal": None,
    "audio": None,
    "annotations": [],
}
ANSWER = {"role": "tool", "content": "9", "tool_call_id": "c", "name": "now"}
BODY: Any = {
    "model": "m",
    "messages": [SEEN, {**TURN, "tool_calls": [ASKED], "function_call": None}, ANSWER],
    "tools": [{"type": "function", "function": {**WEATHER, "strict": True}, "cache_control": {}}],
    "tool_choice": choose("weather"),
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "logit_bias": {"5": 1},
}
NAMED = {"name": "a", "description": "b", "strict": True, "schema": {}}
FORMS: Any = {
    **BODY,
    "tools": None,
    "tool_choice": None,
    "response_format": {"type": "json_schema", "json_schema": NAMED, "schema": None},
}
TEXTS: Any = {
    "model": "m",
    "prompt": "a",
    "stream_options": {},
    "response_format": {"type": "text"},
}
EMBEDS: Any = {"model": "m", "input": ["a"], "user": "me"}
TRITON: Any = {"text_input": "a", "parameters": {"max_tokens": 3}}
MESSAGES: Any = [("messages", number) for number in range(3)] + [
    ("messages", 0, "content", 0),
    ("messages", 1, "tool_calls", 0),
    ("messages", 1, "tool_calls", 0, "function"),
]
CHOICE: Any = [
    ("tools", 0),
    ("tools", 0, "function"),
    ("tool_choice",),
    ("tool_choice", "function"),
]
FORMAT: Any = [("response_format",), ("response_format", "json_schema")]
STREAM: Any = [(), ("stream_options",)]
ROUTES: Any = {  # each with the objects whose names have a meaning
    "chat": (CompletionRequest, BODY, STREAM + MESSAGES + CHOICE),
    "chat with a format": (CompletionRequest, FORMS, STREAM + FORMAT),
    "completion": (CompletionRequest, TEXTS, STREAM + FORMAT[:1]),
    "embeddings": (Embed, EMBEDS, [()]),
    "generate": (TritonRequest, TRITON, [(), ("parameters",)]),
}


def received(kind: Any, body: Any) -> None:
    """Read a request as its route does, with the chat's template."""
    request: Any = _said(json.dumps(body).encode(), kind)
    if kind is CompletionRequest:
        request.form  # noqa: B018
    if "messages" in body:
        reply = rendered(PLAIN, body["messages"], b"")
        if not isinstance(reply, str):
            raise InvalidInput(reply.message, param=reply.param)


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_name_at_any_depth_is_refused_and_what_clients_send_is_not(route: str) -> None:
    kind, body, paths = ROUTES[route]
    received(kind, body)
    for path in paths:
        changed = json.loads(json.dumps(body))
        place = changed
        for step in path:
            place = place[step]
        place["surprise"] = 1
        with pytest.raises(InvalidInput) as caught:
            received(kind, changed)
        assert "surprise" in caught.value.message, path
        assert caught.value.data["param"], path


def test_a_field_of_a_message_that_the_template_shows_is_taken() -> None:
    thought = [{**HELLO[0], "mood": "glad", "extra": None}]
    assert rendered("{{ messages[0].mood }}", thought, b"") == "glad"
    assert rendered("{{ messages | tojson }}", thought, b"").count("glad") == 1
    many = [{**HELLO[0], **{f"a{n}": n + 1 for n in range(40)}}]
    for messages in (thought, many):
        assert rendered(PLAIN, messages, b"").param == "messages"
    for part in ({"type": "image_url", "text": "a", "image_url": {}}, {"text": "a", "odd": 1}):
        assert rendered(PLAIN, [{"role": "user", "content": [part]}], b"").param == "messages"
