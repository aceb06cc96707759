"""``pipeswitch chat`` and ``pipeswitch run``, typed in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import COMMAND, DEADLINE_S, Checked, checked_server, command, mlp, until

from pipeswitch.base.errors import InvalidInput, ModelNotFound, ServerUnavailable
from pipeswitch.client.model_sources import here
from pipeswitch.extras.text.chat import Chat, name_of
from tests.models.words import published

transformers = pytest.importorskip("transformers")
PROMPT = ">>> "  # wait for it before typing: else the terminal echoes the text, not the chat
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a language model, as its author would publish it."""
    path = tmp_path_factory.mktemp("hub") / "Tiny_Chat-1B"
    cls = transformers.AutoModelForCausalLM
    published(path, cls, scale=8.0, eos_token="<end>", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        yield checked


@pytest.fixture
def url(running: Checked, folder: Path) -> str:
    running.client.register("tiny_chat-1b", f"hf:{folder}", weights="pretrained", generate=True)
    return f"http://{running.running.http_address}"


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT


class Terminal:
    """The ``pipeswitch`` command in its own terminal."""

    def __init__(self, running: Checked, *words: str, cwd: Path | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--host", running.running.ipc_address, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._text = ""

    def say(self, text: str, *patterns: str) -> str:
        """Type a text; wait for the patterns in order; return the output up to the last one."""
        os.write(self._ours, text.encode())
        return [self.until(one) for one in patterns][-1]

    def until(self, pattern: str) -> str:
        """Return the output since the last call, up to the pattern."""
        ends_at = time.monotonic() + 2 * DEADLINE_S
        while (match := re.search(pattern, self._text)) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0, ends_at - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._text!r}"
            self._text += os.read(self._ours, 1 << 16).decode(errors="replace")
        shown, self._text = self._text[: match.end()], self._text[match.end() :]
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_run_registers_a_folder_and_talks_until_bye(running: Checked, folder: Path) -> None:
    words = ("run", f"hf:{folder.name}", "--temperature", "0", "--max-tokens", "12")
    with contextlib.closing(Terminal(running, *words, cwd=folder.parent)) as terminal:
        terminal.until(PROMPT)
        [row] = running.client.models()
        assert (row["name"], row["source"]) == ("tiny_chat-1b", f"hf:{folder}")
        statistics = r"\[12 tokens, [0-9.]+ tokens/s, the first after [0-9.]+ s\]"
        first = terminal.say("The data\r", statistics).split("[12")[0]
        terminal.until(PROMPT)
        terminal.say('"""two\r', r"\.\.\. ")
        terminal.say('lines"""\r', statistics, PROMPT)
        terminal.say("/clear\r", "a new chat", PROMPT)
        assert terminal.say("The data\r", statistics).split("[12")[0] == first  # equal answers
        terminal.until(PROMPT)
        terminal.say("/nonsense\r", "unknown command /nonsense", PROMPT)
        terminal.say("/bye\r", "/bye")
        assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(running: Checked, folder: Path) -> None:
    with contextlib.closing(Terminal(running, "run", f"hf:{folder}")) as terminal:
        terminal.until(PROMPT)
        for _ in range(5):  # try again if an answer, which takes seconds, ends before Ctrl-C
            terminal.say("The data\r", "The data", r"\n.")
            shown = terminal.say("\x03", r"\[stopped\]|tokens/s")
            terminal.until(PROMPT)
            if "[stopped]" in shown:
                break
        assert "[stopped]" in shown
        until(lambda: not running.client.sequences(), "its sequence ended")
        terminal.say("half a li\x03", "Ctrl-D or /bye", PROMPT)
        terminal.say("\x04", "\n")
        assert terminal.process.wait(DEADLINE_S) == 0


def test_a_chat_remembers_what_was_said_and_not_what_was_refused(url: str) -> None:
    options = {"temperature": 0, "max_tokens": 400, "system": "Be brief"}
    talk = Chat(url, "", "tiny_chat-1b", options)
    pieces = talk.say("The data")
    read = next(pieces) + next(pieces)
    pieces.close()  # what Ctrl-C does, too
    messages: Any = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "The data"},
        {"role": "assistant", "content": read},
    ]
    assert talk.messages == messages
    with pytest.raises(InvalidInput) as caught:
        next(talk.say("x1y2" * 2000))
    assert (caught.value.hint, talk.messages) == ("/clear starts a new chat", messages)
    assert ["set", "".join(talk.say("set"))] == [one["content"] for one in talk.messages[3:]]
    talk.clear()
    assert talk.messages == messages[:1]
    with pytest.raises(ModelNotFound):
        next(Chat(url, "", "other", {}).say("Hi"))
    for other, error in (("http://127.0.0.1:9", ServerUnavailable), ("127.0.0.1:9", InvalidInput)):
        with pytest.raises(error):
            next(Chat(other, "", "m", {}).say("Hi"))


def test_one_answer_is_printed_where_no_terminal_is(running: Checked, url: str) -> None:
    options = ("chat", "tiny_chat-1b", "--temperature", "0", "--max-tokens", "9")
    piped = command("--host", running.running.ipc_address, *options, input="The data")
    over_http = command(*options, "The data", "--http", f"{url}/v1")
    assert piped.returncode == over_http.returncode == 0
    assert piped.stdout == over_http.stdout != "\n"


def test_what_cannot_chat_says_what_to_type(
    running: Checked, url: str, folder: Path, tmp_path: Path
) -> None:
    host = ("--host", running.running.ipc_address)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    running.client.register("ids", model, generate=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    running.client.register("plain", model, generate=True, tokenizer=tokenizer)
    running.client.register("small", mlp(16, 1, 1), example_inputs=(torch.zeros(1, 16),))
    (tmp_path / folder.name).mkdir()
    for words, hint in (
        (("chat", "absent", "Hi"), "pipeswitch chat tiny_chat-1b; or pipeswitch run hf:Qwen/"),
        (("chat", "small", "Hi"), "pipeswitch chat tiny_chat-1b; or pipeswitch infer small --ran"),
        (("generate", "small", "Hi"), "pipeswitch run hf:NAME registers one"),
        (("chat", "tiny-chat", "Hi"), "hint:  pipeswitch chat tiny_chat-1b"),
        (("chat", "Qwen/Qwen3-0.6B", "Hi"), "hint:  pipeswitch run hf:Qwen/Qwen3-0.6B"),
        (("chat", str(folder), "Hi"), f"hint:  pipeswitch run hf:{folder}"),
        (("run", "llama3", "Hi"), "pipeswitch run hf:"),
        (("chat", "ids", "Hi"), "pipeswitch generate ids --ids"),
        (("chat", "plain", "Hi"), "pipeswitch generate plain"),
        (("chat", "tiny_chat-1b"), "pipeswitch chat tiny_chat-1b"),
        (("run", f"hf:{tmp_path / folder.name}", "Hi"), "--name OTHER"),
    ):
        failed = command(*host, *words, stdin=subprocess.DEVNULL)
        assert failed.returncode not in (0, 2), failed.stderr
        assert hint in failed.stderr
    nobody = command("--host", "tcp://127.0.0.1:9", "chat", "m", "Hi")
    assert (nobody.returncode, "pipeswitch serve" in nobody.stderr) == (3, True)


def test_a_source_gives_a_name_and_a_full_path(tmp_path: Path, monkeypatch: Any) -> None:
    for source, name in (
        ("hf:Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("hf:gpt2", "gpt2"),
        ("hf:/a/B c/", "b-c"),
        ("hf:a/m#GPT2LMHeadModel", "m"),
        ("hf:.", "chat"),
    ):
        assert name_of(source) == name
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert here("hf:m#X") == here("hf:./m/#X") == f"hf:{tmp_path}/m#X"
    assert here("hf:org/m") == "hf:org/m"
