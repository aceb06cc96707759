"""Client's side of a generation: tokens and text from the replies to one request."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from queue import SimpleQueue
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec

from ...base.errors import Cancelled, InvalidInput
from ...wire.frames import WireTensor
from ...wire.request_timing import RequestTiming
from .decoding.generation_settings import IDS
from .decoding.model_config import LanguageModelConfig, Token, ending_of, tokenizer_of
from .decoding.output import Decode, OutputProcessor, StopCriteria
from .decoding.sampling import Sampling

# client -> digest of a language model -> its tokenizer
_tokenizers: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class GenerateRequest:
    """One request of verb ``generate``, for ``Calls``.

    Each reply's tokens are added to the request's body. If the request is sent again, to this
    server or another, the answer therefore continues after these tokens.
    """

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        ending: StopCriteria,
        on_tokens: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """``on_tokens`` gets each reply's body: ``tokens``, and their ``logprobs`` if requested."""
        self._on_tokens = on_tokens
        self._frame = memoryview(array("q", ids)).cast("B")
        self._inputs = (WireTensor(name=IDS, dtype="int64", shape=(len(ids),), frame=0),)
        options = sampling.options
        self.body: dict[str, Any] = {
            "max_tokens": ending.max_new_tokens,
            "stop_ids": ending.eos_ids,
            "ignore_eos": True,  # the model's end tokens are in ``stop_ids``
            "so_far": [],
            **msgspec.to_builtins(sampling),
            "options": None if options is None else msgspec.to_builtins(options),
        }

    @property
    def options(self) -> dict[str, Any]:
        return {
            "inputs": self._inputs,
            "frames": [self._frame],
            "body": self.body,
            "on_progress": self._came,
            "is_safe": True,
        }

    def _came(self, body: Mapping[str, Any]) -> None:
        self.body["so_far"].extend(body.get("tokens", []))
        self._on_tokens(body)


class GenerationStream(Iterator[Token]):
    """Answer that ``Client.generate`` returns: iterate over it, or read ``text``.

    ``reason`` says why it ended: ``stop`` or ``length``; None while it continues. After the end,
    ``timing`` is the request's timing, and ``usage`` counts its tokens.
    """

    def __init__(
        self, answer: OutputProcessor, begin: Callable[[Callable[[Mapping[str, Any]], None]], Any]
    ) -> None:
        """Args:
        begin: sends the request and returns the future of the final reply. In another thread, each
            reply's body is passed to the callable that ``begin`` gets.
        """
        self._answer = answer
        self._came: deque[Token] = deque()
        self._replies: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self.on_news: list[Callable[[], object]] = []  # called in the other thread after each reply
        self._text: list[str] = []
        self._began_s = time.monotonic()
        self.first_token_ms = 0.0
        self.timing: RequestTiming | None = None
        self.usage: dict[str, Any] = {}
        replies, on_news = self._replies, self.on_news  # not this stream: an unused one is deleted

        def put(body: Mapping[str, Any] | None) -> None:
            replies.put(body)
            for tell in on_news:
                tell()

        self._future = begin(put)
        self._future.add_done_callback(lambda _: put(None))
        self._wait()  # the first reply says that the server accepted the request

    @property
    def reason(self) -> str | None:
        return None if self._came else self._answer.reason

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens that the caller has read so far."""
        known = self._answer.tokens
        return known[: len(known) - len(self._came)]

    @property
    def text(self) -> str:
        """Whole text of the answer; blocks until the answer has ended."""
        for _ in self:
            pass
        return "".join(self._text)

    def __next__(self) -> Token:
        while not self._came and self._answer.reason is None:
            self._wait()
        if not self._came:
            raise StopIteration
        if not self._text:
            self.first_token_ms = (time.monotonic() - self._began_s) * 1000.0
        token = self._came.popleft()
        self._text.append(token.text)
        return token

    def take(self) -> Token | None:
        """Return the next token if it is here, else None; does not block."""
        while not self._came and self._answer.reason is None and not self._replies.empty():
            self._wait()
        return next(self) if self._came else None

    def _wait(self) -> None:
        try:
            body = self._replies.get()
            if body is None:
                if self._future.cancelled():
                    raise Cancelled("this answer was closed")
                reply = self._future.result()
                body, self.timing = reply.body, reply.timing
                own = ("tokens", "logprobs")
                self.usage = {name: value for name, value in body.items() if name not in own}
        except BaseException:
            self.close()
            raise
        for token, *chance in zip(body.get("tokens", ()), *chances_in(body), strict=True):
            self._came.append(Token(token, self._answer.push(token), *chance))
            if self._answer.reason is not None:  # at a stop string; the server does not know these
                self.close()
                return

    def close(self) -> None:
        """Cancel the request on the server if it is not over. Idempotent."""
        self._future.cancel()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_future"):
            self.close()


def generated(
    client: Any,
    model: str,
    prompt: Any,
    *,
    version: int,
    priority: str,
    stop: tuple[str, ...],
    max_new_tokens: int,
    **sampling: Any,
) -> GenerationStream:
    """Begin a generation and return its stream; see ``Client.generate``."""

    def facts_with(*, tokenizer: bool, version: int = version) -> LanguageModelConfig:
        body = {"version": version, "tokenizer": tokenizer}
        return msgspec.convert(
            client._ask("generation", model=model, body=body), LanguageModelConfig
        )

    facts = facts_with(tokenizer=False)
    encode: Callable[[str], list[int]] | None = None
    decode: Decode | None = None
    if isinstance(prompt, str):
        own = _tokenizers.setdefault(client, {})
        if facts.digest not in own:
            own[facts.digest] = tokenizer_of(facts_with(tokenizer=True, version=facts.version))
        encode, decode = own[facts.digest]
    try:
        chosen = msgspec.convert(sampling, Sampling)
        ending = msgspec.convert({"max_new_tokens": max_new_tokens, "stop": stop}, StopCriteria)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"generate: {error}") from None
    chosen.check()
    ids = check_prompt(prompt, encode)
    whole = ending_of(facts, ids, ending)

    def begin(put: Callable[[Mapping[str, Any]], None]) -> Any:
        request = GenerateRequest(ids, chosen, whole, put)
        request.body["version"] = facts.version
        return client._connection.request(
            "generate", model=model, priority=priority, **request.options
        )

    return GenerationStream(OutputProcessor(whole, decode, ids), begin)


def chances_in(body: Mapping[str, Any]) -> list[list[Any]]:
    """Return lists of the tokens' log probabilities and of their likeliest tokens; [] if none."""
    if not (chances := body.get("logprobs")):
        return []
    return [[one for one, _ in chances], [[(id, own) for id, own in top] for _, top in chances]]


def check_prompt(prompt: Any, encode: Callable[[str], list[int]] | None) -> list[int]:
    """Return a prompt's token ids.

    Raises:
        InvalidInput: the prompt is neither a text nor ids.
    """
    try:
        if isinstance(prompt, str):
            if encode is None:
                raise InvalidInput("this model has no tokenizer", hint="give the prompt as ids")
            return encode(prompt)  # TypeError for a lone surrogate
        return [index(one) for one in cast(Any, None if isinstance(prompt, bytes) else prompt)]
    except (TypeError, ValueError):
        raise InvalidInput(
            "a prompt must be a text (valid Unicode) or token ids", hint='"Once upon a time"'
        ) from None
