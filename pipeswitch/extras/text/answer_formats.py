"""Wire formats of answers: OpenAI's, Triton's, and the base for those of other protocols."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ...base.codec import UNREADABLE, encode_json
from ...base.errors import PipeSwitchError
from ...gateway.http.http_errors import as_ours, body_of, limit_of, status_of
from ...gateway.http.http_server import EVENT_STREAM, Response, refusal
from .answer_stream import AnswerStream
from .choices import ParallelAnswers, chat_logprobs, text_logprobs
from .decoding.model_config import Token
from .tools import CallReader
from .translation import Fields

CODES = {"Unauthenticated": "invalid_api_key", "ModelNotFound": "model_not_found"}
log = logging.getLogger(__name__)


def sent_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: %s\n\n" % encode_json(value)


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose name is its ``type``."""
    return b"event: %s\n%s" % (value["type"].encode(), sent_event(value))


class AnswerFormat:
    """Form of an answer in one protocol, whole or as a stream of objects.

    ``whole`` returns the answer, given each choice's text. ``events`` yields the objects for a
    choice's token, or for its end (None).
    """

    end = b""  # end of a stream
    content_type = EVENT_STREAM
    hides = False  # True: the answer shows only the prompt
    failed: Callable[[PipeSwitchError], Fields] = staticmethod(body_of)
    encode: Callable[[Mapping[str, Any]], bytes] = staticmethod(sent_event)
    choices: ParallelAnswers  # set before any method is called
    whole: Callable[[Sequence[str]], Fields]
    events: Callable[[int, Token | None], Iterable[Fields]]

    def last(self) -> Iterable[Fields]:
        """Yield the objects that follow the end of the last choice."""
        return ()


def openai_body(error: PipeSwitchError) -> Fields:
    """Return an error in OpenAI's form."""
    name, status = type(error).__name__, status_of(error).http
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    content = {
        "message": str(error),
        "type": "server_error" if status >= 500 else kind,
        "param": error.data.get("param"),
        "code": error.data.get("code") or CODES.get(name, name),
        **limit_of(error),
    }
    return {"error": content}


class OpenAiFormat(AnswerFormat):
    """Wire format of chats and completions."""

    end = b"data: [DONE]\n\n"
    failed = staticmethod(openai_body)

    def __init__(self, body: Any, prompts: Sequence[str | list[int]], n: int) -> None:
        """Prepare the format. A client that sent token ids receives ids, too."""
        form = body.form
        self._readers = [CallReader(form) for _ in range(len(prompts) * n) if form.names]
        self._echo = [one if body.echo else "" for one in prompts for _ in range(n)]
        self._has_ids, self._has_logprobs = isinstance(prompts[0], list), body.logprobs is not None
        self.hides = body.scores_prompt and body.max_tokens == 0  # show only the prompt
        self._began, self._shown = set[int](), Counter[int]()  # begun choices; shown characters
        self._is_chat, self._created_s = body.is_chat, int(time.time())
        self._tells_usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self, texts: Sequence[str]) -> Fields:
        rows = []
        for index, text in enumerate(texts):
            answering = self.choices.answerings[index]
            tokens = [] if self.hides else answering.tokens
            ids = {"token_ids": [one.id for one in tokens]} if self._has_ids else {}
            text = self._echo_of(index) + ("" if self.hides else text)
            message = {"role": "assistant", "content": text, "refusal": None}
            if self._readers:
                read = self._readers[index].push(text, is_last=True)
                for one in read.get("tool_calls", ()):
                    del one["index"]
                message |= {"content": None, **read}
            choice = {"message": message} if self._is_chat else {"text": text, **ids}
            rows.append(self._choice(index, choice, [*answering.scored, *tokens]))
        return self._told("", rows, self._usage())

    def events(self, index: int, token: Token | None) -> Iterable[Fields]:
        """Yield the chunk for a choice's token, or for its end (None)."""
        answering = self.choices.answerings[index]
        tokens = [token] if token and not self.hides else []
        text = "".join([one.text for one in tokens])
        ids = {"token_ids": [one.id for one in tokens]} if self._has_ids else {}
        is_first = index not in self._began
        if is_first:
            text, tokens = self._echo_of(index) + text, [*answering.scored, *tokens]
        part_body: Fields = {"content": text} if token else {}
        if self._readers:
            part_body = self._readers[index].push(text, is_last=not token)
        has_part = bool(part_body if self._readers else text)
        if has_part or self._has_ids or self._has_logprobs or not token:
            role = {"role": "assistant"} if is_first else {}
            self._began.add(index)
            delta = {**role, **part_body}
            choice = {"delta": delta} if self._is_chat else {"text": text, **ids}
            yield self._told(".chunk", [self._choice(index, choice, tokens, is_last=not token)])

    def last(self) -> Iterable[Fields]:
        """Yield the chunks that follow the end of the last choice."""
        if self._tells_usage:
            yield self._told(".chunk", [], self._usage())

    def _echo_of(self, index: int) -> str:
        """Return the text of a choice's prompt; if it came as ids, its tokens' joined texts."""
        echo, answering = self._echo[index], self.choices.answerings[index]
        scored = "".join([answering.names[one.id][0] for one in answering.scored])
        return echo if isinstance(echo, str) else scored

    def _choice(
        self, index: int, choice: Fields, tokens: Sequence[Token], *, is_last: bool = True
    ) -> Fields:
        answering, logprobs = self.choices.answerings[index], None
        reason = ("length" if self.hides else answering.step.reason) if is_last else None
        if reason == "stop" and self._readers and self._readers[index].count:
            reason = "tool_calls"
        if self._has_logprobs and tokens:
            if self._is_chat:
                logprobs = chat_logprobs(tokens, answering.names)
            else:
                logprobs = text_logprobs(tokens, answering.names, self._shown[index])
                self._shown[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, **choice, "logprobs": logprobs, "finish_reason": reason}

    def _told(self, kind: str, rows: list[Fields], usage: Any = None) -> Fields:
        first = self.choices.first
        return {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{first.id}",
            "object": f"chat.completion{kind}" if self._is_chat else "text_completion",
            "created": self._created_s,
            "model": first.model,
            "choices": rows,
            **({"usage": usage} if usage or self._tells_usage else {}),
        }

    def _usage(self) -> dict[str, int]:
        prompt = self.choices.prompt_count
        answer = 0 if self.hides else self.choices.token_count
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }


class TritonFormat(AnswerFormat):
    """Wire format of ``generate``."""

    def __init__(self, answering: AnswerStream) -> None:
        self._answering = answering

    def whole(self, texts: Sequence[str]) -> Fields:
        model, version = self._answering.model, self._answering.version
        return {"model_name": model, "model_version": str(version), "text_output": texts[0]}

    def events(self, index: int, token: Token | None) -> Iterable[Fields]:
        return [self.whole([token.text])] if token and token.text else []


class Block(msgspec.Struct, kw_only=True):
    """Text of a chat's answer, or a call."""

    text: str = ""  # of a call: its arguments
    name: str = ""  # of the called function; empty: it is a text
    id: str = ""  # of a call
    number: int = 0  # place in the message

    @property
    def arguments(self) -> Any:
        """Arguments of a call, as JSON; an empty object if the text is cut or is not one."""
        with contextlib.suppress(*UNREADABLE):
            msgspec.json.decode(self.text, type=dict[str, Any])
            return msgspec.Raw(self.text.encode())
        return {}


class ChatFormat(AnswerFormat):
    """Base of formats whose answer is one message of texts and calls.

    ``message`` returns the whole answer. The others yield the objects of a stream: ``begin`` its
    first ones, ``opened``, ``grown`` (by a piece) and ``closed`` those of the block that is last so
    far, ``finish`` those for the end.
    """

    message: Callable[[], Fields]
    begin: Callable[[], Iterable[Fields]] = tuple
    opened: Callable[[Block], Iterable[Fields]]
    grown: Callable[[Block, str], Iterable[Fields]]
    closed: Callable[[Block], Iterable[Fields]]
    finish: Callable[[], Iterable[Fields]]

    def __init__(self, request: Any, prompts: Sequence[Any], n: int) -> None:
        form, self.request = request.form, request
        self._reader = CallReader(form) if form.names else None
        self._has_begun, self.blocks = False, list[Block]()
        self.created_s = int(time.time())

    @property
    def reason(self) -> str:
        """Reason of the end: stop, length or tool_calls."""
        reason = self.choices.first.step.reason or "stop"
        return "tool_calls" if reason == "stop" and self._reader and self._reader.count else reason

    def _read(self, text: str, *, is_last: bool) -> Iterator[tuple[Block, str]]:
        """Add text to the message; yield each block that grows, and by what."""
        delta: Fields = {"content": text}
        if self._reader is not None:
            delta = self._reader.push(text, is_last=is_last)
        if content := delta.get("content"):
            yield Block(), content
        for one in delta.get("tool_calls", ()):
            function = one["function"]
            yield Block(name=function.get("name", "?"), id=one.get("id", "")), function["arguments"]

    def whole(self, texts: Sequence[str]) -> Fields:
        [*self._pieces(texts[0], is_last=True)]
        return self.message()

    def _pieces(self, text: str, *, is_last: bool) -> Iterator[Fields]:
        """Add text to the message; yield the objects of the blocks that open, grow and close."""
        for new, piece in self._read(text, is_last=is_last):
            last = self.blocks[-1] if self.blocks else None
            if last is None or new.id or (not new.name and last.name):
                if last is not None:
                    yield from self.closed(last)
                new.number = len(self.blocks)
                self.blocks.append(new)
                yield from self.opened(new)
            self.blocks[-1].text += piece
            if piece:
                yield from self.grown(self.blocks[-1], piece)

    def events(self, index: int, token: Token | None) -> Iterable[Fields]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()
        yield from self._pieces(token.text if token else "", is_last=not token)
        if token is None:
            if self.blocks:
                yield from self.closed(self.blocks[-1])
            yield from self.finish()


def without_effect(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the header that names the fields of a request that changed nothing."""
    shown = ", ".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in dict.fromkeys(names))
    return [("Warning", f'299 - "without effect: {shown[:1024]}"')] if shown else []


class StreamedAnswer:
    """A streamed answer; a ``BodyStream``."""

    def __init__(
        self, choices: ParallelAnswers, form: AnswerFormat, close: Callable[[], None]
    ) -> None:
        self._pieces, self.close = _pieces(choices, form), close

    async def next(self) -> bytes:
        return await anext(self._pieces, b"")


async def _pieces(choices: ParallelAnswers, form: AnswerFormat) -> AsyncIterator[bytes]:
    try:
        while came := await choices.next():
            for one in form.events(*came):
                yield form.encode(one)
        yield b"".join([*map(form.encode, form.last()), form.end])
    except PipeSwitchError as error:
        yield form.encode(form.failed(error))
    except Exception as error:
        log.exception("answer=%s failed", choices.first.id)
        yield form.encode(form.failed(as_ours(error)))


def refused(error: PipeSwitchError) -> Response:
    """Return ``http_server.refusal`` of an error, with the body in OpenAI's form."""
    return replace(refusal(error), parts=[encode_json(openai_body(error))])
