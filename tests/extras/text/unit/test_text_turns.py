"""Callers' turns at tokenizer processes, and options for texts; the tests start no process."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.base.errors import InvalidInput
from pipeswitch.base.quotas import MAX_PASSES, TurnQueue
from pipeswitch.base.roles import ANYONE, Principal
from pipeswitch.extras.text.answer_stream import turn_of
from pipeswitch.extras.text.completions import NEUTRAL, CompletionRequest, _check_neutral, _said
from pipeswitch.extras.text.decoding.generation_settings import author_defaults
from pipeswitch.extras.text.decoding.model_config import LanguageModelConfig
from pipeswitch.extras.text.decoding.output import StopCriteria
from pipeswitch.extras.text.decoding.sampling import Sampling
from pipeswitch.extras.text.tokenizer_worker import DecodedText, StartGeneration, TokensGenerated
from pipeswitch.extras.text.tokenizer_worker import TokenizerWorker as TextProcess
from pipeswitch.extras.text.tokenizers import TURN_S, TokenizerPool, TokenizerSlot, next_place

OPTIONS = [*CompletionRequest.__struct_fields__]


def test_callers_take_turns_however_much_one_of_them_asks() -> None:
    turns: TurnQueue[str] = TurnQueue()
    for number in range(5):
        turns.put("mallory", f"m{number}")
    turns.put("alice", "a0")
    turns.put("bob", "b0")
    turns.put("alice", "a1")
    assert [turns.take() for _ in range(9)] == [
        "m0",
        "a0",
        "b0",
        "m1",
        "a1",
        "m2",
        "m3",
        "m4",
        None,
    ]


def test_tokens_of_answers_go_before_new_prompts_which_do_not_starve() -> None:
    turns: TurnQueue[str] = TurnQueue()
    turns.put("alice", "prompt")
    for _ in range(MAX_PASSES + 2):
        turns.put("mallory", "token", is_urgent=True)
    order = [turns.take() for _ in range(MAX_PASSES + 3)]
    assert order.index("prompt") == MAX_PASSES
    turns.put("alice", "prompt")
    turns.put("alice", "token", is_urgent=True)
    assert turns.clear() == ["token", "prompt"]
    assert turns.take() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_each_thing_is_taken_once_and_those_of_a_caller_in_order(
    things: list[tuple[str, bool]],
) -> None:
    turns: TurnQueue[tuple[str, bool, int]] = TurnQueue()
    for number, (caller, is_urgent) in enumerate(things):
        turns.put(caller, (caller, is_urgent, number), is_urgent=is_urgent)
    items = []
    while (one := turns.take()) is not None:
        items.append(one)
    assert sorted(one[2] for one in items) == [*range(len(things))]
    for caller, is_urgent in things:
        numbers = [one[2] for one in items if one[:2] == (caller, is_urgent)]
        assert numbers == sorted(numbers)


def test_a_token_is_one_caller_from_everywhere_and_who_has_none_is_an_address() -> None:
    alice, stranger = Principal(tenant="alice"), Principal(tenant=ANYONE)
    assert turn_of(alice, "10.0.0.1") == turn_of(alice, "10.0.0.2")
    assert turn_of(stranger, "10.0.0.1") != turn_of(stranger, "10.0.0.2")
    assert turn_of(Principal(tenant="10.0.0.1"), "x") != turn_of(stranger, "10.0.0.1")


def busy(owner: str, since_s: float = 0.0) -> TokenizerSlot:
    return TokenizerSlot(owner=owner, since_s=since_s)


def idle(owner: str, since_s: float) -> TokenizerSlot:
    return TokenizerSlot(owner=owner, since_s=0.0, idle_since_s=since_s)


def starting(owner: str) -> TokenizerSlot:
    return TokenizerSlot(owner=owner, since_s=0.0, is_starting=True)


EIGHT = {f"m{n}": busy("mallory", n / 8) for n in range(8)}


@pytest.mark.parametrize(
    ("slots", "waiting", "now_s", "expected"),
    [
        ({}, {"a": busy("alice")}, 1.0, ("a", "")),
        # An owner with all eight places loses one at once; its own ninth model waits for a turn.
        (EIGHT, {"a": busy("alice", 1.0)}, 1.0, ("a", "m0")),
        (EIGHT, {"m8": busy("mallory", 1.0)}, 1.0, None),
        (EIGHT, {"m8": busy("mallory", 1.0)}, TURN_S, ("m8", "m0")),
        (EIGHT, {"m8": busy("mallory", 0.5), "a": busy("alice", 1.0)}, TURN_S, ("a", "m0")),
        # With nine owners, the process that has run longest is replaced after its turn.
        ({f"{n}": busy(f"o{n}", n) for n in range(8)}, {"a": busy("alice", 9.0)}, 9.0, None),
        ({f"{n}": busy(f"o{n}", n) for n in range(8)}, {"a": busy("alice", 9.0)}, 10.5, ("a", "0")),
        # An idle process is replaced first: after ``TURN_S`` if its owner has fewer places.
        ({**EIGHT, "m7": idle("mallory", 3.0)}, {"a": busy("alice")}, 4.0, ("a", "m7")),
        ({**EIGHT, "m7": idle("alice", 3.0)}, {"m8": busy("mallory", 3.0)}, 4.0, None),
        ({**EIGHT, "m7": idle("alice", 3.0)}, {"m8": busy("mallory")}, 3 + TURN_S, ("m8", "m7")),
        # A starting process takes a place and is never replaced, however long others wait.
        ({"x": starting("a")}, {"y": busy("a", 1.0)}, 9 * TURN_S, None),
        ({"x": starting("a"), "y": starting("a")}, {"z": busy("b", 1.0)}, 9 * TURN_S, None),
        ({"x": starting("a"), "y": busy("a", 1.0)}, {"z": busy("b")}, 9 * TURN_S, ("z", "y")),
        # An owner takes no place from another who would then have fewer places.
        ({"x": busy("a"), "y": busy("b")}, {"z": busy("a", 1.0)}, 5.0, None),
    ],
)
def test_owners_share_the_text_processes(
    slots: dict[str, TokenizerSlot], waiting: dict[str, TokenizerSlot], now_s: float, expected: Any
) -> None:
    assert next_place(slots, waiting, max(len(slots), 1), now_s) == expected


def test_a_caller_that_wishes_for_many_models_waits_longer_than_one_with_one_wish() -> None:
    waiting = {f"m{n}": TokenizerSlot(owner="", caller="address 1", since_s=n) for n in range(20)}
    waiting["a"] = TokenizerSlot(owner="", caller="token alice", since_s=30.0)
    assert next_place({}, waiting, 1, 31.0) == ("a", "")


@given(
    st.dictionaries(st.text("ab", max_size=3), st.sampled_from("xyz"), min_size=1, max_size=4),
    st.dictionaries(st.text("cd", max_size=3), st.sampled_from("xyz"), min_size=1, max_size=4),
)
def test_nobody_waits_for_ever(slots: dict[str, str], waiting: dict[str, str]) -> None:
    """A waiting owner that has fewer places than another owner gets a place within a turn."""
    places = {name: busy(owner) for name, owner in slots.items()}
    wishes = {name: busy(owner, 1.0) for name, owner in waiting.items() if name not in slots}
    has = [*slots.values()]
    poorest = [w.owner for w in wishes.values() if has.count(w.owner) < max(map(has.count, has))]
    slot = next_place(places, wishes, len(places), 1.0 + TURN_S)
    assert slot is not None or not poorest


def test_an_answer_goes_on_in_another_process_where_it_was() -> None:
    facts = LanguageModelConfig(version=1, digest="d", vocabulary=9, context=30)
    ending = StopCriteria(max_new_tokens=8, eos_ids=(8,))
    begin = StartGeneration(answer=1, prompt=[1, 2, 3], sampling=Sampling(), ending=ending)
    whole, ids = TextProcess(facts), list[int]()
    whole.handle(begin)
    for tokens in ([7], [2, 3], [4, 8]):
        ids += tokens
        decoded = whole.handle(TokensGenerated(answer=1, tokens=tokens))
        assert isinstance(decoded, DecodedText)
        assert [one.id for one in decoded.tokens] == tokens
        told_count = len(ids) - len(tokens)
        resumed = msgspec.structs.replace(begin, so_far=ids, told=told_count)
        again = TextProcess(facts).handle(resumed)
        assert isinstance(again, DecodedText)
        assert (again.tokens, again.reason) == (decoded.tokens, decoded.reason)
    assert decoded.reason == "stop"


def test_options_are_read_of_the_whole_request() -> None:
    fields = {"model": "m", "prompt": "a", "top_k": -1, "cache_salt": None, "user": "u" * 999}
    options = {"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": False}
    assert (
        _said(json.dumps({**fields, "stream_options": options}).encode(), CompletionRequest).model
        == "m"
    )
    for more, param in (
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"suffix": "x" * 999}, "suffix"),
        ({"logit_bias": {str(token): 1 for token in range(9000)}}, "logit_bias"),
        ({"stop_token_ids": [3] * 65}, "stop_token_ids"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ):
        with pytest.raises(InvalidInput) as caught:
            _said(json.dumps({**fields, **more}).encode(), CompletionRequest)
        assert caught.value.data["param"] == param


def refused(name: str, value: Any, *, is_chat: bool = False) -> bool:
    param = None
    try:
        _check_neutral(name, Raw(json.dumps(value).encode()), OPTIONS, is_chat=is_chat)
    except InvalidInput as error:
        param = error.data["param"]
    assert param in (None, name)
    return param is not None


def test_a_neutral_value_is_accepted_and_any_other_is_refused_by_name() -> None:
    """Send the default values of OpenAI's and vLLM's fields, for chats and completions."""
    both = json.loads("""{
        "logprobs": false, "top_logprobs": 0, "suffix": "", "user": "me",
        "length_penalty": 1.0,
        "use_beam_search": false, "include_stop_str_in_output": false,
        "skip_special_tokens": true, "priority": 0,
        "spaces_between_special_tokens": true, "response_format": {"type": "text"},
        "tools": [], "functions": [], "tool_choice": "auto", "parallel_tool_calls": true,
        "modalities": ["text"], "store": false, "service_tier": "auto", "metadata": {"a": "b"},
        "verbosity": "medium", "add_generation_prompt": true,
        "continue_final_message": false, "documents": [],
        "include_reasoning": true, "bad_words": [], "return_token_ids": false,
        "return_tokens_as_token_ids": false, "request_id": "r", "kv_transfer_params": {},
        "stream_options.continuous_usage_stats": false, "stream_options.include_obfuscation": true
    }""")
    for is_chat in (True, False):
        for name, value in both.items():
            assert not refused(name, value, is_chat=is_chat), name
        assert refused("add_special_tokens", is_chat, is_chat=is_chat)
        assert not refused("add_special_tokens", not is_chat, is_chat=is_chat)
    for name, values in NEUTRAL.items():
        for value in (True, False, 0, 1, 2, -1, 0.5, "x", [1], {"x": 1}, [], {}, ""):
            is_same = any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
            )
            if "." not in name:
                assert refused(name, value) is not (is_same or "*" in values), (name, value)
    for value in (False, 0, "", [], {}, True):
        assert refused("enable_thinking", value)
        assert refused("do_sample", value)


@pytest.mark.parametrize(
    ("settings", "sampling", "noted"),
    [
        ({}, {}, []),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9},
            [],
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}, []),
        ({"max_new_tokens": 7, "max_length": 100}, {"max_new_tokens": 7}, []),
        ({"max_length": 99}, {}, ["max_length"]),
        ({"repetition_penalty": 1.0, "top_k": 0, "num_beams": 1, "bad_words_ids": []}, {}, []),
        (
            {"repetition_penalty": 1.1, "top_k": 20, "num_beams": 4, "bad_words_ids": [[3]]},
            {"repetition_penalty": 1.1, "top_k": 20},
            ["bad_words_ids", "num_beams", "repetition_penalty"],
        ),
        (
            {"stop_strings": ["a"], "forced_eos_token_id": 3, "early_stopping": True},
            {},
            ["early_stopping", "forced_eos_token_id", "stop_strings"],
        ),
        (
            {"temperature": -1.0, "top_p": -0.5, "max_new_tokens": 0, "min_p": 2, "top_k": -5},
            {},
            ["max_new_tokens", "min_p", "temperature", "top_k", "top_p"],
        ),
        ({"a_new_option": {"x": 1}, "temperature": True}, {}, ["a_new_option", "temperature"]),
        (
            {
                "transformers_version": "5",
                "use_cache": True,
                "eos_token_id": [1, 2],
                "pad_token_id": 0,
                "_from_model_config": True,
                "output_scores": True,
                "cache_implementation": "hybrid",
            },
            {},
            [],
        ),
    ],
)
def test_what_an_author_asks_for_is_followed_or_noted(
    settings: dict[str, Any], sampling: dict[str, float], noted: list[str]
) -> None:
    defaults, notes = author_defaults(settings, 100)
    assert defaults == sampling
    assert [note.split(" = ")[0].removeprefix("generation_config: ") for note in notes] == noted


def test_an_answer_whose_process_is_over_at_once_gets_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three callers await one start. If a retry got the ended process, it would block the loop."""

    class Process:
        answers = 0

        def __init__(self) -> None:
            self.is_over = not opened  # the first process ends before its first request
            opened.append(self)

    opened: list[Process] = []
    facts = LanguageModelConfig(version=1, digest="d", vocabulary=8, context=8)
    texts = TokenizerPool(cast(Any, None))

    async def open_one(*_: object) -> Process:
        await asyncio.sleep(0)
        return Process()

    async def entered(caller: str) -> bool:
        tries = 0
        while (await texts.enter(Principal(tenant=caller), caller, "m", facts)).is_over:
            tries += 1
            assert tries < 3
        return True

    async def enter_all() -> list[bool]:
        return await asyncio.gather(*map(entered, "abc"))

    monkeypatch.setattr(texts, "_open", open_one)
    assert asyncio.run(enter_all()) == [True] * 3
    assert len(opened) == 2
    assert not texts._opening
