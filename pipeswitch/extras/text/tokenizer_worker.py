"""Process that renders one model's chat template, encodes its prompts, and decodes its tokens.

The template and the tokenizer come from the client that registered the model, and may take forever.
So they run in this process, which is confined like a worker (ADR 52); the gateway limits the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, BinaryIO, Final, Literal

import msgspec

from ...base.codec import UNREADABLE, check_memory, encode_msgpack
from ...base.errors import InvalidInput
from ...sandbox.confine import confine_worker, missing
from .decoding.model_config import (
    LONGEST,
    TOO_LONG,
    LanguageModelConfig,
    Token,
    Tokenizer,
    TokenName,
    ending_of,
    fitted,
    tokenizer_of,
)
from .decoding.output import OutputProcessor, StopCriteria
from .decoding.sampling import Sampling

MEMORY_BYTES: Final = 1 << 30  # in addition to imports; the largest known tokenizer takes 400 MB
CHARS_PER_TOKEN: Final = 64  # limit per token of the context; a longer prompt is not encoded
USUAL_CHARS: Final = 4  # usual characters per token; a longer prompt's beginning is encoded first
SURE: Final = 2  # if the beginning fills this many contexts, the prompt cannot fit
GROWTH: Final = 4  # factor by which the beginning grows for the next try
NICENESS: Final = 10  # lower priority than workers: they get nine times the processor time
MAX_MESSAGES: Final = 1024
MAX_REST_BYTES: Final = 256 << 10  # limit of a chat without texts; decoded, it is 24 times larger
LENGTH_BYTES: Final = 4
PR_SET_PDEATHSIG: Final = 1
NO_TEXT: Final = msgspec.Raw(b"null")
MAX_UNKNOWN: Final = 8  # unknown fields of messages; for each one, the template renders once more
FUNCTION: Final = dict.fromkeys(("name", "arguments", "parsed_arguments"))
CALL: Final = {
    **dict.fromkeys(("id", "type", "index", "provider_specific_fields")),
    "function": FUNCTION,
}
MESSAGE: Final = {
    **dict.fromkeys(("role", "content", "name", "tool_call_id", "id", "index", "annotations")),
    **dict.fromkeys(("reasoning", "reasoning_content", "cache_control", "parsed")),
    **dict.fromkeys(("provider_specific_fields", "thinking", "tool_name")),
    "tool_calls": CALL,
}
"""Fields of a message that clients send, with the known fields of their own values."""


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message to the text process about one answer."""

    answer: int


class StartGeneration(AnswerMessage, frozen=True, kw_only=True, tag=True):
    """Message that starts an answer."""

    prompt: str | list[int] = ""
    messages: bytes | None = None  # JSON, instead of ``prompt``: the template renders it
    tools: bytes = b""  # JSON, for the template
    settings: bytes = b""  # JSON object with further values for the template
    sampling: Sampling
    ending: StopCriteria
    # For an answer that another process began: its tokens, and how many of their texts were sent.
    so_far: list[int] = []
    told: int = 0
    names: list[int] = []  # see ``TokensGenerated``


class TokensGenerated(AnswerMessage, frozen=True, kw_only=True, tag=True):
    """Message with the tokens of the server's reply."""

    tokens: list[int]
    names: list[int] = []  # tokens whose own texts are requested


class Abort(AnswerMessage, frozen=True, kw_only=True, tag=True):
    """Message that ends an answer early; the only message without a reply."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Reply to the message with the model's facts: the process is ready."""


class DecodedText(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: the tokens with their text."""

    prompt_count: int
    tokens: list[Token] = []
    reason: str | None = None  # reason of the answer's end; None: it continues
    prompt: bytes = b""  # ids of a new answer's prompt, int32
    names: list[TokenName] = []
    stop: str = ""  # the stop string that ended the answer
    unused: list[str] = []  # settings of a new answer that the template does not read


class InvalidPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply that a request is not valid, with the fields of InvalidInput."""

    message: str
    hint: str = ""
    param: str = ""
    code: str = ""


TokenizerRequest = StartGeneration | TokensGenerated | Abort


class TokenizerWorker:
    """State of one model's answers."""

    def __init__(self, facts: LanguageModelConfig) -> None:
        self._facts = facts
        self._answers: dict[int, tuple[OutputProcessor, int]] = {}

    def handle(self, message: TokenizerRequest) -> DecodedText | InvalidPrompt | None:
        if isinstance(message, Abort):
            self._answers.pop(message.answer, None)
            return None
        try:
            return self._step(message)
        except InvalidInput as error:
            named = {key: error.data.get(key) or "" for key in ("param", "code")}
            return InvalidPrompt(message=error.message, hint=error.hint, **named)
        except Exception as error:  # also a template's refusal of a role, and MemoryError
            is_new = isinstance(message, StartGeneration) and not message.so_far
            if isinstance(error, MemoryError) and not is_new:
                raise  # a begun answer needs little memory: another process continues it
            return InvalidPrompt(message=f"the model's chat template or tokenizer: {error!r:.300}")

    def _step(self, message: StartGeneration | TokensGenerated) -> DecodedText:
        prompt, told_count, unused = b"", 0, list[str]()
        if isinstance(message, StartGeneration):
            ids = self._ids(message)
            decode = self._tokenizer[1] if self._facts.tokenizer else None
            ending = ending_of(self._facts, ids, message.ending)
            fitted(message.sampling, self._facts, len(ids), ending)
            new = OutputProcessor(ending, decode, ids)
            self._answers[message.answer] = new, len(ids)
            prompt, told_count = array("i", ids).tobytes(), message.told
            settings, read = _settings(message), self._readable if message.messages else ()
            unused = [name for name in settings if name not in read]
        answer, prompt_count = self._answers[message.answer]
        came = message.so_far if isinstance(message, StartGeneration) else message.tokens
        tokens = [Token(one, answer.push(one)) for one in came if answer.reason is None]
        names, ours = [self._name(one) for one in message.names], tokens[told_count:]
        counts: Any = {"prompt_count": prompt_count, "prompt": prompt, "unused": unused}
        counts |= {"reason": answer.reason, "stop": answer.stopped_by}
        return DecodedText(tokens=ours, names=names, **counts)

    def _name(self, token: int) -> TokenName:
        facts, own = self._facts, (f"token_id:{max(token, ~token)}", None)
        return self._tokenizer[1].name(token) if facts.tokenizer else own

    def _ids(self, message: StartGeneration) -> list[int]:
        if isinstance(message.prompt, list):
            return message.prompt
        encode, _ = self._tokenizer
        text = message.prompt if message.messages is None else self._rendered(message)
        context = self._facts.context
        check_length(text, context)
        with_special = message.messages is None  # a template writes the special tokens
        size = USUAL_CHARS * context
        while size < len(text):
            if len(encode(text[:size], with_special=with_special)) > SURE * context:
                raise _too_long(f"{len(text)} characters", context)
            size *= GROWTH
        return encode(text, with_special=with_special)

    def _rendered(self, message: StartGeneration) -> str:
        if not self._facts.chat_template:
            raise InvalidInput("the model has no chat template", hint="ask /v1/completions")
        messages, tools = parsed(message.messages or b""), None
        more = _settings(message)
        if message.tools:
            tools = msgspec.json.decode(message.tools)
            if self._render(messages, tools, more) == self._render(messages, None, more):
                raise InvalidInput(
                    "the model's chat template does not show tools to the model",
                    hint='tool_choice="none", or a model whose template reads tools',
                    param="tools",
                )
        text = self._render(messages, tools, more)
        for number, (name, rows) in enumerate(unknown_fields(messages, MESSAGE).items()):
            values = [row.pop(name) for row in rows]
            if number >= MAX_UNKNOWN or self._render(messages, tools, more) == text:
                words = f"the model's chat template does not show {name[:80]!r} of a message"
                raise InvalidInput(words, hint="leave it out", param="messages")
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        return text

    def _render(self, messages: Any, tools: Any, more: Mapping[str, Any]) -> str:
        settings = {**more, **self._own, "messages": messages, "tools": tools}
        try:
            return self._template(settings)
        except Exception:
            # A call that was cut has a text as its arguments, and this template needs an object.
            texts = [one for one in calls_of(messages) if isinstance(one.get("arguments"), str)]
            if not texts:
                raise
            for one in texts:
                one["arguments"] = {"arguments": one["arguments"]}
            return self._template(settings)

    @cached_property
    def _own(self) -> Mapping[str, Any]:
        return {"add_generation_prompt": True, "documents": None, **self._facts.special}

    @cached_property
    def _readable(self) -> set[str]:
        """Names that the template reads and that a request may set."""
        from jinja2.meta import find_undeclared_variables

        names = find_undeclared_variables(environment_of().parse(self._facts.chat_template))
        return {*names} - {"messages", "tools", *self._own}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of(self._facts)

    @cached_property
    def _template(self) -> Callable[..., str]:
        return compiled(self._facts.chat_template)


def _settings(message: StartGeneration) -> dict[str, Any]:
    return msgspec.json.decode(message.settings, type=dict[str, Any]) if message.settings else {}


def check_length(prompt: str | list[int], context: int) -> None:
    """Raise InvalidInput if the prompt is too long for any tokenizer to make it fit."""
    is_text = isinstance(prompt, str)
    if len(prompt) > (CHARS_PER_TOKEN * context if is_text else context - 1):
        raise _too_long(f"{len(prompt)} {'characters' if is_text else 'tokens'}", context)


def _too_long(what: str, context: int) -> InvalidInput:
    text = f"a prompt of {what} does not fit: {LONGEST.format(context)}"
    return InvalidInput(text, hint="shorten the prompt", code=TOO_LONG)


def parsed(messages: bytes) -> list[dict[str, Any]]:
    """Return a chat's messages in the form that templates take: each content is one text.

    Raises:
        InvalidInput: they are not a list of messages, or a content is not text.
    """
    try:
        check_memory(len(messages))
        chat = msgspec.json.decode(messages, type=list[dict[str, msgspec.Raw]])
        if not 0 < len(chat) <= MAX_MESSAGES:
            raise InvalidInput(
                f"{len(chat)} messages; a chat has 1 to {MAX_MESSAGES}", param="messages"
            )
        texts = [one.pop("content", NO_TEXT) for one in chat]
        if (rest := sum(len(raw) for one in chat for raw in one.values())) > MAX_REST_BYTES:
            raise InvalidInput(
                f"{rest} bytes besides the messages' texts; the limit is {MAX_REST_BYTES}",
                param="messages",
            )
        rows = [
            {**{name: msgspec.json.decode(value) for name, value in one.items()}, "content": raw}
            for one, raw in zip(chat, texts, strict=True)
        ]
        for row in rows:
            row["content"] = _text(row["content"])
        for call in calls_of(rows):
            if isinstance(text := call.get("arguments"), str):
                call["arguments"] = _arguments(text)
        return rows
    except UNREADABLE as error:
        raise InvalidInput(f"the messages are not valid: {error}", param="messages") from None


def unknown_fields(rows: Any, known: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the fields that have a value and are not ``known``, each with its objects.

    The values of ``known`` are the known fields of the field's own values.
    """
    odd = defaultdict[str, list[Any]](list)
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict):
            raise InvalidInput(f"{row!r:.40} is not an object", param="messages")
        for name, value in row.items():
            if name not in known and value not in (None, False, "", [], {}):
                odd[name].append(row)
            if inner := known.get(name):
                for field, owners in unknown_fields(value or [], inner).items():
                    odd[field] += owners
    return odd


def calls_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions of all calls, each with ``name`` and ``arguments``."""
    rows = [row["tool_calls"] for row in messages if isinstance(row.get("tool_calls"), list)]
    calls = [one.get("function") for calls in rows for one in calls if isinstance(one, dict)]
    return [one for one in calls if isinstance(one, dict)]


def _arguments(text: str) -> Any:
    """Return a call's arguments as templates take them: an object, or the text if it is none."""
    with contextlib.suppress(*UNREADABLE):
        value = msgspec.json.decode(text or "{}")
        return value if isinstance(value, dict) else text
    return text


class ContentPart(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Part of a message's content."""

    text: str
    type: Literal["text", "input_text", "output_text"] = "text"
    annotations: Any = None
    cache_control: Any = None


def _text(content: msgspec.Raw) -> str:
    try:
        parts = msgspec.json.decode(content, type=str | list[ContentPart] | None) or ""
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"a message's content must be text: {error}",
            hint='"…", or [{"type": "text", "text": "…"}]',
            param="messages",
        ) from None
    return parts if isinstance(parts, str) else "".join(one.text for one in parts)


def compiled(template: str) -> Callable[..., str]:
    """Return the template's render function."""
    return environment_of().from_string(template).render  # type: ignore[no-any-return]


def environment_of() -> Any:
    """Return an environment of templates, with the names that transformers provides."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marked(Extension):
        """Extension that ignores the tag around the model's own text, which only training needs."""

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marked, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda how: datetime.datetime.now().strftime(how)
    return environment


def framed(data: bytes) -> bytes:
    """Return the data, preceded by its length."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def _frame(source: BinaryIO) -> bytes:
    head = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else b""


def main() -> None:
    """Serve the socket at descriptor 0. Imports come first: a confined process opens no files."""
    os.nice(NICENESS)
    import jinja2.meta
    from jinja2.exceptions import TemplateError

    with contextlib.suppress(TemplateError):
        jinja2.meta.find_undeclared_variables(environment_of().parse("{{ messages }}"))
        compiled("{{ messages | tojson | trim }}{{ strftime_now('%Y') }}{{ raise_exception('') }}")(
            messages=[]
        )
    with contextlib.suppress(ImportError):  # reported to the caller of the first text
        import tokenizers  # noqa: F401
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    source, sink = os.fdopen(0, "rb", closefd=False), os.fdopen(0, "wb", closefd=False)
    if "seccomp" not in missing():
        confine_worker(MEMORY_BYTES)
    texts = TokenizerWorker(msgspec.msgpack.decode(_frame(source), type=LanguageModelConfig))
    decoder: msgspec.msgpack.Decoder[TokenizerRequest] = msgspec.msgpack.Decoder(TokenizerRequest)
    reply: Hello | DecodedText | InvalidPrompt | None = Hello()
    while True:
        if reply is not None:
            sink.write(framed(encode_msgpack(reply)))
            sink.flush()
        if not (data := _frame(source)):
            return
        reply = texts.handle(decoder.decode(data))


if __name__ == "__main__":
    main()
