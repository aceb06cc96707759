"""``pipeswitch chat`` and ``pipeswitch run``, typed in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import COMMAND, DEADLINE_S, Checked, checked_server, command, until

from pipeswitch.base.errors import InvalidInput, ModelNotFound, ServerUnavailable
from pipeswitch.cli.chat import Chat, local_folder, name_of
from tests.models.words import trained

transformers = pytest.importorskip("transformers")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model as its author publishes it."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        "qwen2", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        vocab_size=700, max_position_embeddings=2048, bos_token_id=0, eos_token_id=None,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained("bytes"), eos_token="<end>", chat_template=TEMPLATE
    )
    path = tmp_path_factory.mktemp("hub") / "Tiny_Chat-1B"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        yield checked


class Terminal:
    """``pipeswitch`` in a terminal of its own."""

    def __init__(self, running: Checked, *words: str, cwd: Path | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--host", running.running.ipc_address, *words], stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True, cwd=cwd, env={**os.environ, "TERM": "dumb"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self._text = ""

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Return what was shown up to the pattern, since the last call."""
        ends_at = time.monotonic() + 4 * DEADLINE_S
        while (found := re.search(pattern, self._text)) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0, ends_at - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._text!r}"
            try:
                self._text += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended: {self._text!r}") from None
        shown, self._text = self._text[: found.end()], self._text[found.end() :]
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_run_registers_a_folder_and_talks_until_bye(running: Checked, folder: Path) -> None:
    words = ("run", f"hf:{folder.name}", "--temperature", "0", "--max-tokens", "12")
    with contextlib.closing(Terminal(running, *words, cwd=folder.parent)) as terminal:
        terminal.until("/bye ends")
        terminal.until(">>> ")
        [row] = running.client.models()
        assert (row["name"], row["source"]) == ("tiny_chat-1b", f"hf:{folder}")
        terminal.send("The data\r")
        first = terminal.until(r"\[12 tokens, [0-9.]+ tokens/s, the first after [0-9.]+ s\]")
        terminal.until(">>> ")
        terminal.send('"""two\r')
        terminal.until(r"\.\.\. ")
        terminal.send('lines"""\r')
        terminal.until(r"12 tokens")
        terminal.until(">>> ")
        terminal.send("/clear\r")
        terminal.until("a new chat")
        terminal.until(">>> ")
        terminal.send("The data\r")
        again = terminal.until(r"\[12 tokens")
        assert again.split("[12")[0] == first.split("[12")[0]  # as in a chat that begins
        terminal.until(">>> ")
        terminal.send("/nonsense\r")
        terminal.until("no command /nonsense")
        terminal.send("/bye\r")
        assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(running: Checked, folder: Path) -> None:
    with contextlib.closing(Terminal(running, "run", f"hf:{folder}")) as terminal:
        terminal.until(">>> ")
        terminal.send("The data\r")
        until(lambda: running.client.sequences(), "an answer is under way")
        terminal.send("\x03")
        terminal.until(r"\[stopped\]")
        terminal.until(">>> ")
        until(lambda: not running.client.sequences(), "its sequence ended")
        terminal.send("half a li\x03")
        terminal.until("Ctrl-D or /bye")
        terminal.send("\x04")
        assert terminal.process.wait(DEADLINE_S) == 0


def test_a_chat_remembers_what_was_said_and_not_what_was_refused(
    running: Checked, folder: Path
) -> None:
    assert (
        command("--host", running.running.ipc_address, "run", f"hf:{folder}", "Hi").returncode == 0
    )
    url = f"http://{running.running.http_address}"
    talk = Chat(
        url, "", "tiny_chat-1b", {"temperature": 0, "max_tokens": 400, "system": "Be brief"}
    )
    pieces = talk.say("The data")
    read = next(pieces) + next(pieces)
    pieces.close()  # as Ctrl-C does
    said: Any = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "The data"},
        {"role": "assistant", "content": read},
    ]
    assert talk.messages == said
    with pytest.raises(InvalidInput) as caught:
        next(talk.say("x1y2" * 2000))
    assert (caught.value.hint, talk.messages) == ("/clear starts a new chat", said)
    again = "".join(talk.say("set"))
    assert [one["content"] for one in talk.messages[3:]] == ["set", again]
    talk.clear()
    assert talk.messages == said[:1]
    with pytest.raises(ModelNotFound) as caught:
        next(Chat(url, "", "other", {}).say("Hi"))
    assert "pipeswitch run" in caught.value.hint
    with pytest.raises(ServerUnavailable):
        next(Chat("http://127.0.0.1:9", "", "m", {}).say("Hi"))
    with pytest.raises(InvalidInput):
        next(Chat("127.0.0.1:9", "", "m", {}).say("Hi"))


def test_one_answer_is_printed_where_no_terminal_is(running: Checked, folder: Path) -> None:
    asked = ("--temperature", "0", "--max-tokens", "9")
    host = ("--host", running.running.ipc_address)
    first = command(*host, "run", f"hf:{folder}", "The data", *asked)
    piped = command(*host, "chat", "tiny_chat-1b", *asked, input="The data")
    over_http = command("chat", "tiny_chat-1b", "The data", *asked,
                        "--http", f"http://{running.running.http_address}/v1")  # fmt: skip
    assert first.returncode == piped.returncode == over_http.returncode == 0
    assert first.stdout == piped.stdout == over_http.stdout != "\n"


def test_what_cannot_chat_says_what_to_type(running: Checked, folder: Path, tmp_path: Path) -> None:
    host = ("--host", running.running.ipc_address)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    running.client.register("ids", model, generate=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    running.client.register("plain", model, generate=True, tokenizer=tokenizer)
    (tmp_path / folder.name).mkdir()
    for words, hint in (
        (("chat", "absent", "Hi"), "pipeswitch run hf:absent"),
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


@pytest.mark.parametrize(
    ("source", "name"),
    [("hf:Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("hf:gpt2", "gpt2"), ("hf:/a/B c/", "b-c"),
     ("hf:a/m#GPT2LMHeadModel", "m"), ("hf:.", "chat")],
)  # fmt: skip
def test_a_models_name_is_the_end_of_its_source(source: str, name: str) -> None:
    assert name_of(source) == name


def test_a_folder_is_named_by_its_full_path(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_folder("hf:m#X") == local_folder("hf:./m/#X") == f"hf:{tmp_path}/m#X"
    assert local_folder("hf:org/m") == "hf:org/m"
