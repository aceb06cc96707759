"""Terminal chat with a language model over the server's ``/v1`` API, and the verb ``generate``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Generator, Mapping
from difflib import SequenceMatcher
from typing import Any, Final
from urllib.parse import urlsplit

import click

from ...base.errors import (
    AlreadyExists,
    InvalidInput,
    ModelNotFound,
    PipeSwitchError,
    ServerUnavailable,
)
from ...base.units import escape_control_chars
from ...cli import common, views
from ...client.model_sources import here

PATH: Final = "/v1/chat/completions"
MOST_ASKED: Final = 32  # maximum number of models to check for a chat template
MOST_NAMED: Final = 2  # maximum number of such models to name
EXAMPLE: Final = "pipeswitch run hf:Qwen/Qwen3-0.6B"
FENCE: Final = '"""'
HELP: Final = f"""\
/clear         start a new chat
/bye, Ctrl-D   leave
Ctrl-C         stop the answer, or drop what you typed
{FENCE}            begin and end a text of several lines; so does a \\ at the end of a line
"""


class Chat:
    """One conversation: its messages, and the requests for answers."""

    def __init__(self, url: str, token: str, model: str, options: dict[str, Any]) -> None:
        self._url, self._token, self._model, self._options = url, token, model, options
        self._system: list[dict[str, str]] = []
        if system := options.pop("system", ""):
            self._system = [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        self.messages = [*self._system]
        self.summary = ""

    def say(self, text: str) -> Generator[str]:
        """Send a message and yield the answer in pieces; pieces that were read stay in the chat.

        Raises:
            PipeSwitchError: the server refused the message, or the answer was cut off. A message
                without any answer does not stay in the chat.
        """
        question, pieces, tokens = {"role": "user", "content": text}, list[str](), 0
        began_s = first_s = time.monotonic()
        try:
            with contextlib.closing(self._events([*self.messages, question])) as events:
                for event in events:
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event["choices"]:
                        if piece := choice["delta"].get("content"):
                            first_s = first_s if pieces else time.monotonic()
                            pieces.append(piece)
                            yield piece
        finally:
            self.summary, took_s = "", time.monotonic() - first_s
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
                count = tokens or len(pieces)  # an estimate if the answer was stopped
                self.summary = (
                    f"{count} tokens, {(count - 1) / max(took_s, 1e-3):.1f} tokens/s, "
                    f"the first after {first_s - began_s:.2f} s"
                )

    def _events(self, messages: list[dict[str, str]]) -> Generator[dict[str, Any]]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            where = urlsplit(self._url)
            connection = kinds[where.scheme if where.netloc else ""](where.netloc)
        except (ValueError, KeyError, http.client.InvalidURL):
            raise InvalidInput(f"{self._url!r} is not a URL", hint="http://HOST:PORT") from None
        headers = {"Authorization": f"Bearer {self._token.strip() or 'EMPTY'}"}
        with contextlib.closing(connection):
            try:
                connection.request("POST", where.path + PATH, json.dumps(body), headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise _error_of(answer.read())
                is_whole = False
                for line in answer:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise _error_of(line[6:])
                        yield event
                    is_whole = is_whole or line.startswith(b"data: [DONE]")
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerUnavailable(
                    f"no answer from {self._url}: {error}",
                    hint="pipeswitch ping; then send the message again",
                ) from None
            if not is_whole:
                raise ServerUnavailable("the answer was cut off", hint="send the message again")


def _error_of(body: bytes) -> PipeSwitchError:
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, KeyError, TypeError):
        return PipeSwitchError(f"this is not a PipeSwitch server: {body[:80]!r}")
    if code == "context_length_exceeded":
        return InvalidInput(message, hint="/clear starts a new chat")
    if code == "model_not_found":
        return ModelNotFound(message, hint=f"pipeswitch models; or {EXAMPLE}")
    return PipeSwitchError(message)


def options(command: Any) -> Any:
    """Return the options of ``chat`` and ``run``."""
    for option in (
        click.option(
            "--system", default="", metavar="TEXT", help="First system message of the chat."
        ),
        click.option("--temperature", type=float, help="0: always choose the most likely token."),
        click.option(
            *("--max-tokens", "--max-new-tokens", "max_tokens"),
            type=int,
            help="Maximum number of tokens of an answer.",
        ),
        common.http_option,
        common.token_option,
    ):
        command = option(command)
    return command


@click.command()
@common.name_argument
@click.argument("prompt", default="")
@options
def chat(name: str, prompt: str, http: str, token: str, **fields: Any) -> None:
    """Chat with a registered language model.

    With PROMPT, or with text on standard input, print one answer.
    """
    if not http:
        with common.connected() as client:
            _check(client, name)
            http, token = common.http_of(client.about(), "chat", "chat NAME --http URL")
    settings = {key: value for key, value in fields.items() if value not in (None, "")}
    talk = Chat(http.rstrip("/").removesuffix("/v1"), token, name, settings)
    if prompt or not sys.stdin.isatty():
        text = prompt or sys.stdin.read()
        if not text.strip():
            raise InvalidInput("there is no prompt", hint=f'pipeswitch chat {name} "Hello"')
        for piece in talk.say(text):
            _show(piece)
        click.echo()
    else:
        _converse(talk, name)


@click.command()
@click.argument("source")
@click.argument("prompt", default="")
@click.option("--name", default="", help="Name of the model (default: the end of SOURCE).")
@options
def run(source: str, prompt: str, name: str, **fields: Any) -> None:
    """Register a language model, unless it is registered, and chat with it.

    SOURCE is hf:NAME (from the hub), hf:FOLDER (configuration, weights and tokenizer), or the name
    of a registered model.
    """
    if not source.startswith("hf:"):
        name = name or source
    else:
        name = name or name_of(source)
        with common.connected() as client:
            _register(client, name, here(source))
    click.get_current_context().invoke(chat, name=name, prompt=prompt, **fields)


@click.command()
@click.argument("name")
@click.argument("prompt", default="-")
@click.option(
    *("--max-tokens", "--max-new-tokens", "max_new_tokens"),
    default=128,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@click.option("--temperature", default=0.0, show_default=True, help="0: the most likely token.")
@click.option("--top-p", default=1.0, show_default=True, help="Total probability to sample from.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same tokens.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer (repeatable).")
@click.option("--ids", is_flag=True, help="PROMPT and the answer are token ids: 1,2,3")
@common.json_option
def generate(name: str, prompt: str, ids: bool, as_json: bool, **options: Any) -> None:
    """Generate text and print it token by token. PROMPT - reads standard input."""
    content: Any = sys.stdin.read() if prompt == "-" else prompt
    if ids:
        parts = content.replace(",", " ").split()
        if not all(part.isdecimal() and len(part) < 20 for part in parts):
            raise click.UsageError("with --ids, PROMPT must be token ids: 1,2,3")
        content = [int(part) for part in parts]
    with common.connected() as client, client.generate(name, content, **options) as answer:
        for token in answer if not as_json else ():
            click.echo(
                f"{token.id} " if ids else escape_control_chars(token.text, keep="\n\t"), nl=False
            )
        text = answer.text
        row = {
            "text": text,
            "tokens": answer.tokens,
            "reason": answer.reason,
            "first_token_ms": answer.first_token_ms,
        }
    if as_json:
        views.print_json(row)
    else:
        click.echo()


def name_of(source: str) -> str:
    """Return a model's name for a source: ``hf:Qwen/Qwen3-0.6B`` is ``qwen3-0.6b``."""
    last = source.partition("#")[0].rstrip("/").removeprefix("hf:").rpartition("/")[2]
    return re.sub("[^a-z0-9._-]+", "-", last.lower()).strip("-.") or "chat"


def _source(row: Mapping[str, Any]) -> str:
    """Return a model's source without the files that a row names behind it."""
    return str(row.get("source") or "").partition(";")[0]


def _register(client: Any, name: str, source: str) -> None:
    known = {row["name"]: row for row in client.models()}
    if name in known:
        if (other := _source(known[name]) or source) != source:
            raise AlreadyExists(
                f'"{name}" is another model: {other}',
                hint=f"pipeswitch chat {name}; or pipeswitch run {source} --name OTHER",
            )
        return
    with views.progress_bar(sys.stderr.isatty(), name) as report:
        row = client.register(name, source, weights="pretrained", generate=True, progress=report)
    for note in row["notes"]:
        views.echo(f"  {note}", err=True)


def _check(client: Any, name: str) -> None:
    """Raise an error if the model cannot chat.
    Raises ModelNotFound, InvalidInput: the hint says what to type instead."""
    try:
        facts = client._ask("generation", model=name, body={"version": 0, "tokenizer": True})
    except (ModelNotFound, InvalidInput) as error:  # unknown, or not a language model
        raise type(error)(error.message, hint=_advice(client, name), **error.data) from None
    if not facts.get("chat_template"):
        ids = "" if facts.get("has_tokenizer", True) else " --ids"
        raise InvalidInput(
            f'"{name}" has no chat template',
            hint=f'pipeswitch generate {name}{ids} "{"1,2,3" if ids else "Once upon a time"}"',
        )


def _advice(client: Any, name: str) -> str:
    """Return commands to type if a model cannot chat, those for similar names first."""
    sources = {row["name"]: _source(row) for row in client.models()}
    advice, body = list[str](), {"version": 0, "tokenizer": True}
    likely = sorted(sources, key=lambda one: -SequenceMatcher(None, name, one).ratio())
    for other in likely[:MOST_ASKED]:
        with contextlib.suppress(PipeSwitchError):
            if client._ask("generation", model=other, body=body).get("chat_template"):
                advice.append(f"pipeswitch chat {other}")
    del advice[MOST_NAMED:]
    if (source := sources.get(name, "")).startswith("hf:"):
        advice.append(f"if it is a causal model: pipeswitch run {source} --name {name}-chat")
    elif name in sources:
        advice.append(f"pipeswitch infer {name} --random")
    elif "/" in name or os.path.exists(name):
        return f"pipeswitch run {here('hf:' + name.removeprefix('hf:'))}"
    return "; or ".join([*advice, EXAMPLE])


def _converse(talk: Chat, name: str) -> None:
    """Read messages and show answers until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives ``input`` editing and history
    views.echo(f"{name}: /? shows the commands, /bye ends")
    while (text := _message()) is not None:
        match text.strip():
            case "":
                pass
            case "/bye" | "/exit" | "/quit":
                return
            case "/clear":
                talk.clear()
                views.echo("a new chat")
            case "/?" | "/help":
                click.echo(HELP, nl=False)
            case command if re.fullmatch(r"/|/[\w-]+( .*)?", command):
                views.echo(f"unknown command {command.split()[0]}\n{HELP}", err=True, nl=False)
            case _:
                _answer(talk, text)


def _answer(talk: Chat, text: str) -> None:
    try:
        with contextlib.closing(talk.say(text)) as pieces:
            for piece in pieces:
                _show(piece)
        click.echo()
    except KeyboardInterrupt:
        click.echo("\n[stopped]")
    except PipeSwitchError as error:
        views.echo(f"Error: {error.message}", err=True)
        if error.hint:
            views.echo(f"hint:  {error.hint}", err=True)
    if talk.summary:
        click.secho(f"[{talk.summary}]", dim=True)


def _show(piece: str) -> None:
    click.echo(escape_control_chars(piece, keep="\n\t"), nl=False)
    sys.stdout.flush()


def _message() -> str | None:
    """Return the user's message, which may have several lines; None at the end of the input."""
    lines: list[str] = []
    is_fenced = False
    while True:
        try:
            line = input("... " if lines else ">>> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /bye ends the chat")
            lines, is_fenced = [], False
            continue
        if line.count(FENCE) % 2:
            is_fenced = not is_fenced
        is_continued = line.endswith("\\") and not is_fenced
        lines.append(line.removesuffix("\\") if is_continued else line)
        if not is_fenced and not is_continued:
            text = "\n".join(lines)
            return text.replace(FENCE, "") if text.strip().startswith(FENCE) else text
