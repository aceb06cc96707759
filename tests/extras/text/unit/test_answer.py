"""Choice of a generation's next token, and conversion of its tokens to text as they arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.base.errors import InvalidInput
from pipeswitch.extras.text.decoding.model_config import (
    Decoding,
    LanguageModelConfig,
    ending_of,
    fitted,
    seen_of,
)
from pipeswitch.extras.text.decoding.output import OutputProcessor, StopCriteria
from pipeswitch.extras.text.decoding.sampling import Options, Sampling, next_token
from tests.models.words import trained

WORDS = st.text(st.sampled_from("the data of an é 你好 🎉👩‍👩‍👧 END.\n"), max_size=40)
STOPS = st.sampled_from(["END", "the d", "好🎉", "..", "EN"])
DRAWN = [[3171, 2987, 1974, 4958, 4938, 1972], [3171, 480, 996, 313, 4939, 4975]]


@pytest.fixture(scope="module", params=["bytes", "fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return trained(request.param)


@settings(max_examples=200, deadline=None)
@given(text=WORDS, cut=st.integers(0, 60))
def test_pieces_are_whole_characters_and_together_the_text(
    tokenizer: Any, text: str, cut: int
) -> None:
    tokens = tokenizer.encode(text).ids
    prompt, tokens = tokens[:cut], tokens[cut:]
    if not tokens or "\ufffd" in tokenizer.decode(prompt):
        return  # real prompts have no incomplete characters
    answer = OutputProcessor(StopCriteria(max_new_tokens=len(tokens)), tokenizer.decode, prompt)
    pieces = [answer.push(token) for token in tokens]
    assert "".join(pieces) == text[len(tokenizer.decode(prompt)) :]
    assert not any("\ufffd" in piece for piece in pieces)
    assert answer.reason == "length"


@settings(max_examples=200, deadline=None)
@given(text=WORDS, stops=st.lists(STOPS, max_size=3))
def test_no_part_of_a_stop_string_is_ever_shown(
    tokenizer: Any, text: str, stops: list[str]
) -> None:
    tokens = tokenizer.encode(text).ids
    answer = OutputProcessor(
        StopCriteria(max_new_tokens=99, eos_ids=(0,), stop=tuple(stops)), tokenizer.decode
    )
    places = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(places, default=len(text))]
    shown = ""
    for token in [*tokens, 0]:
        shown += answer.push(token)
        assert expected.startswith(shown)
        if answer.reason:
            break
    assert shown == expected
    assert answer.reason == "stop"
    assert (answer.tokens[-1] == 0) == (not places)


@pytest.mark.parametrize(
    ("stops", "shown", "count"),
    [
        (["<end>"], "ab", 3),
        (["<end>c"], "ab", 4),
        (["b<end>c"], "a", 4),
        (["<end><end>"], "abcd", 6),
        (["<end>d", "d"], "abc", 5),
        (["<endc"], "abcd", 6),
    ],
)
def test_a_stop_string_may_name_a_special_token(stops: list[str], shown: str, count: int) -> None:
    class Decode:
        specials: ClassVar = {"<end>": 300, "<en": 301, "<other>": 302}

        def __call__(self, tokens: Sequence[int]) -> str:
            return bytes(one for one in tokens if one < 256).decode(errors="replace")

    answer, text = OutputProcessor(StopCriteria(max_new_tokens=6, stop=tuple(stops)), Decode()), ""
    for token in (*b"ab", 300, *b"cd", 302):
        if answer.reason is None:
            text += answer.push(token)
    assert (text, len(answer.tokens)) == (shown, count)
    assert answer.reason == ("stop" if shown != "abcd" else "length")


def test_only_the_candidates_of_top_k_and_min_p_are_drawn() -> None:
    values = np.random.default_rng(1).normal(0, 3, 30).astype(np.float32)
    for position in range(200):
        options = Options(top_k=position % 35, min_p=position % 11 / 10)
        token = next_token(values, Sampling(temperature=1.0, options=options), position)
        assert math.exp(values[token] - values.max()) >= options.min_p * 0.999
        assert not options.top_k or (values > values[token]).sum() < options.top_k


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_seed_gives_the_same_tokens_in_every_version(spoiled: bool) -> None:
    numbers = np.arange(5000)
    logits = (5 * np.sin(numbers * numbers)).astype(np.float32)
    if spoiled:
        logits[3::7], logits[4::9] = math.nan, -math.inf
    options = [None, Options(top_k=40), Options(min_p=0.2, presence_penalty=1.0, top_k=900)]
    tokens = [
        next_token(
            logits, Sampling(temperature=1.3, top_p=top_p, seed=seed, options=own), 9, {2: 1}
        )
        for seed, own in enumerate(options)
        for top_p in (1.0, 0.7)
    ]
    assert tokens == DRAWN[spoiled]


def test_penalties_follow_their_formulas() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 0.0], np.float32)
    counts = seen_of([0, 1, 2, 2, 2, 99], 2)  # the prompt is 0 and 1; 99 is not in the vocabulary
    assert counts == {0: 0, 1: 0, 2: 3, 99: 1}
    for options, adjusted in (
        (Options(repetition_penalty=2.0), [1.0, -4.0, 0.5, 0.5, 0.0]),
        (Options(presence_penalty=0.5), [2.0, -2.0, 0.5, 0.5, 0.0]),
        (Options(frequency_penalty=0.5), [2.0, -2.0, -0.5, 0.5, 0.0]),
        (Options(logit_bias={4: 100.0}), [2.0, -2.0, 1.0, 0.5, 100.0]),
        (Options(held=(0,), until=8), [-math.inf, -2.0, 1.0, 0.5, 0.0]),
        (Options(held=(0,), until=7), [2.0, -2.0, 1.0, 0.5, 0.0]),
    ):
        assert options.adjusted(logits, 7, counts).tolist() == adjusted
        best = next_token(logits, Sampling(options=options), 7, counts)
        assert best == int(np.argmax(adjusted))


MANY = dict.fromkeys(range(301), 1.0)
RANGES: dict[str, tuple[list[Any], list[Any]]] = {  # refused values, and the ends of the range
    "temperature": ([-1e-9, 100.1, math.inf, math.nan], [0.0, 100.0]),
    "top_p": ([-0.1, 1.1, math.nan], [0.0, 1e-9, 1.0]),
    "seed": ([-1, 1 << 63], [0, (1 << 63) - 1]),
    "top_k": ([-1, 1 << 40], [0, 1]),
    "min_p": ([-0.1, 1.5, math.nan], [0.0, 1.0]),
    "repetition_penalty": ([0.0, 0.009, 101.0, math.nan, math.inf], [0.01, 100.0]),
    "presence_penalty": ([-2.1, 3.0, math.nan], [-2.0, 2.0]),
    "frequency_penalty": ([-2.1, 3.0, math.nan], [-2.0, 2.0]),
    "logit_bias": ([{5: 101.0}, {5: math.inf}, {5: math.nan}, {-1: 0.0}, MANY], [{5: -100.0}]),
    "held": ([[-1], [1 << 40], [5] * 129], [[5] * 128]),
    "until": ([-1, 1 << 41], [0, 1 << 40]),
    "logprobs": ([-1, 21], [None, 0, 20]),
    "scores_prompt": ([True], [False]),
    "json_schema": (["x" * 8193], [""]),
}
"""Every sampling option. ``test_generation_room`` passes them to the verb, too."""


def test_the_ranges_of_all_options_are_listed() -> None:
    names = {*Sampling.__struct_fields__, *Options.__struct_fields__} - {"options"}
    assert names == RANGES.keys()


@pytest.mark.parametrize("name", RANGES)
def test_an_option_out_of_its_range_is_refused_by_name(name: str) -> None:
    def made(value: Any) -> Sampling:
        value = tuple(value) if name == "held" else value
        is_option = name in Options.__struct_fields__
        return (
            Sampling(options=Options(**{name: value})) if is_option else Sampling(**{name: value})
        )

    refused, allowed = RANGES[name]
    other = {
        "json_schema": "response_format",
        "held": "held stop_token_ids",
        "scores_prompt": "logprobs",
    }.get(name, name)
    for value in refused:
        with pytest.raises(InvalidInput) as caught:
            made(value).check()
        assert caught.value.data["param"] in other.split()
    for value in allowed:
        made(value).check()


@pytest.mark.parametrize("token", [-1, 300, 1 << 62])
def test_a_stop_token_outside_of_the_vocabulary_is_refused_by_name(token: int) -> None:
    facts = LanguageModelConfig(version=1, digest="", vocabulary=300, context=50, eos_ids=(7,))
    for is_own in (False, True):
        ending = StopCriteria(max_new_tokens=9, eos_ids=(5, token), ignore_eos=is_own)
        with pytest.raises(InvalidInput, match="0 to 299") as caught:
            ending_of(facts, [1], ending)
        assert caught.value.data["param"] == "stop_token_ids"
        assert ending_of(facts, [1], StopCriteria(max_new_tokens=9, eos_ids=(0, 299)))


def test_a_minimum_length_holds_end_tokens_and_stop_strings_back() -> None:
    facts = LanguageModelConfig(version=1, digest="", vocabulary=300, context=50, eos_ids=(7,))
    ending = StopCriteria(max_new_tokens=9, eos_ids=(5,), min_new_tokens=3, stop=("b",))
    sampling = fitted(
        Sampling(), facts, 4, StopCriteria(max_new_tokens=9, eos_ids=(7, 5), min_new_tokens=3)
    )
    assert sampling.options == Options(held=(7, 5), until=7)
    answer = OutputProcessor(ending, lambda tokens: bytes(tokens).decode())
    assert [answer.push(token) for token in b"abcb"] == ["a", "b", "c", ""]
    assert answer.reason == "stop"
    with pytest.raises(InvalidInput):
        StopCriteria(max_new_tokens=2, min_new_tokens=3).check()
    with pytest.raises(InvalidInput):
        fitted(Sampling(options=Options(logit_bias={300: 1.0})), facts, 4, ending)


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    decode = lambda tokens: bytes(tokens).decode(errors="replace")  # noqa: E731
    answer = OutputProcessor(StopCriteria(max_new_tokens=4), decode)
    assert [answer.push(token) for token in (97, 0xE4, 0xBD, 0xBD)] == ["a", "", "", "佽"]
    answer = OutputProcessor(StopCriteria(max_new_tokens=3), decode)
    assert [answer.push(token) for token in (97, 0xE4, 0xBD)] == ["a", "", "\ufffd"]
    endless = OutputProcessor(StopCriteria(max_new_tokens=99), decode)
    assert any(endless.push(0x80) for _ in range(20))  # bytes that never become text are shown


def naive(logits: Any, temperature: float, top_p: float) -> dict[int, float]:
    """Return the probability of each token by the textbook formula."""
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    tokens_kept, mass = [], 0.0
    for token in order:
        tokens_kept.append(token)
        mass += weights[token]
        if mass >= top_p * sum(weights):
            break
    return {token: weights[token] / mass for token in tokens_kept}


@settings(max_examples=30, deadline=None)
@given(
    logits=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_tokens_are_drawn_as_often_as_they_should_be(
    logits: list[float], temperature: float, top_p: float, seed: int
) -> None:
    values = np.array(logits, np.float32)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    shares = naive(logits, temperature, top_p)
    draws = [next_token(values, sampling, position) for position in range(400)]
    assert set(draws) <= set(shares)
    for token, share in shares.items():
        spread = math.sqrt(400 * share * (1 - share)) + 1
        assert abs(draws.count(token) - 400 * share) < 6 * spread
    # A token depends on the seed, the position and the logits, but not on the order of calls.
    assert [next_token(values, sampling, n) for n in (399, 7, 7)] == [
        draws[399],
        draws[7],
        draws[7],
    ]


def test_without_a_temperature_it_is_the_first_of_the_likeliest() -> None:
    logits = np.array([1, math.nan, 3, -math.inf, 3], np.float32)
    assert next_token(logits, Sampling(), 0) == 2
    assert next_token(logits, Sampling(temperature=1e-300), 5) in (2, 4)
    with pytest.raises(InvalidInput):
        next_token(np.full(3, math.nan, np.float32), Sampling(), 9)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (StopCriteria(max_new_tokens=0), "below 1"),
        (StopCriteria(max_new_tokens=1, stop=("",)), "stop"),
    ],
)
def test_settings_out_of_range_are_refused(bad: StopCriteria, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        bad.check()


@pytest.mark.parametrize(
    ("prompt", "ending", "words"),
    [
        ([], StopCriteria(max_new_tokens=1), "1 to 7"),
        ([1] * 8, StopCriteria(max_new_tokens=1), "1 to 7"),
        ([1, 9], StopCriteria(max_new_tokens=1), "not a token"),
        ([-1], StopCriteria(max_new_tokens=1), "not a token"),
        ([1], StopCriteria(max_new_tokens=0), "below 1"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    prompt: list[int], ending: StopCriteria, words: str
) -> None:
    facts = LanguageModelConfig(version=1, digest="d", vocabulary=9, context=8, eos_ids=(3,))
    with pytest.raises(InvalidInput, match=words):
        ending_of(facts, prompt, ending)
    criteria = ending_of(facts, [1, 2], StopCriteria(max_new_tokens=99, eos_ids=(4,)))
    assert (criteria.max_new_tokens, criteria.eos_ids) == (6, (3, 4))


def tokenizers_by_class() -> dict[str, Any]:
    """Return a small tokenizer of each class that models have."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def made(model: Any, trainer: Any, before: Any, decoder: Any, **more: Any) -> Any:
        tokenizer = Tokenizer(model(**more))
        tokenizer.pre_tokenizer, tokenizer.decoder = before, decoder
        tokenizer.train_from_iterator(TOKEN_TEXTS * 20, trainer)
        return tokenizer

    letters, words = pre_tokenizers.ByteLevel.alphabet(), pre_tokenizers.Whitespace()
    bpe, meta = models.BPE, pre_tokenizers.Metaspace()
    many = trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False)
    suffix: Any = {"end_of_word_suffix": "</w>", "unk_token": "?"}
    ended = trainers.BpeTrainer(
        vocab_size=150, end_of_word_suffix="</w>", special_tokens=["?"], show_progress=False
    )
    pieces = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["?"], show_progress=False)
    vocabulary = {"?": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ("▁", "▁T", *"Thequickbrownfox"):
        vocabulary.setdefault(piece, len(vocabulary))
    llama = Tokenizer(bpe(vocab=vocabulary, merges=[("▁", "T")], byte_fallback=True, unk_token="?"))
    llama.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    llama.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    plain = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    unigram = trainers.UnigramTrainer(vocab_size=80, show_progress=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "bytes": made(bpe, many, level, decoders.ByteLevel()),
        "SentencePiece": llama,
        "metaspace": made(bpe, plain, meta, decoders.Metaspace()),
        "Unigram": made(models.Unigram, unigram, meta, decoders.Metaspace()),
        "WordPiece": made(models.WordPiece, pieces, words, decoders.WordPiece(), unk_token="?"),
        "end of word": made(bpe, ended, words, decoders.BPEDecoder("</w>"), **suffix),
    }


TOKEN_TEXTS = ["The quick brown fox jumps.", "Grüße aus Köln, 東京 🙂 naïve café"]


@pytest.mark.parametrize("text", TOKEN_TEXTS)
def test_the_texts_and_bytes_of_a_texts_tokens_are_the_text(text: str) -> None:
    pytest.importorskip("tokenizers")
    for kind, tokenizer in tokenizers_by_class().items():
        decoding = Decoding(tokenizer)
        first, *later = tokenizer.encode(text, add_special_tokens=False).ids
        whole, prompt = decoding([first, *later]), tokenizer.encode("The", add_special_tokens=False)
        names = [decoding.name(~first), *map(decoding.name, later)]
        joined = b"".join(b"?" if data is None else data for _, data in names)
        if kind == "end of word":  # its last token ends with a space that its decoder drops
            joined = joined.removesuffix(b" ")
        assert joined.decode() == whole, kind
        shown = "".join(one for one, _ in names).rstrip()
        assert shown == whole or "\ufffd" in shown, kind  # a part of a character
        ids = [*prompt.ids, first, *later]  # an answer behind a prompt has the space between them
        answer = b"".join(decoding.name(one)[1] or b"" for one in ids[len(prompt.ids) :])
        assert decoding(ids).endswith(answer.decode().rstrip()), kind
