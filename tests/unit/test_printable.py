"""Other users' text in a terminal: it is shown, but its control characters have no effect."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

import pipeswitch as ps
from pipeswitch.base.errors import to_wire
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.base.units import escape_control_chars, format_number
from pipeswitch.cli import main as cli_main
from pipeswitch.cli import views
from pipeswitch.controller.main import _log_to
from pipeswitch.frontend.intake.validation import Body
from pipeswitch.frontend.registration import check
from pipeswitch.frontend.transport.replies import reply_frames
from pipeswitch.memory_daemon.main import log_to as log_daemon_to
from pipeswitch.programs.graphs.bundle import is_name
from pipeswitch.workers.main import _log_to_stderr as log_worker_to

OBEYED = [
    "\x1b[2J",
    "\x9b31m",
    "\x9d0;title\x07",
    "\u202eevil",
    "\u2066",
    "\u200b",
    "\x7f",
    "\u2028",
    "\ud800",
    "\r",
]
SHOWN = ["x", "größe ✔", "模型", "a\u0301", "x y"]


@pytest.mark.parametrize("text", OBEYED)
def test_what_a_terminal_would_obey_is_spelt_out(text: str) -> None:
    assert text[0] not in escape_control_chars(f"a{text}b")
    assert escape_control_chars(f"a{text}b").startswith("a\\")


@pytest.mark.parametrize("text", [*SHOWN, "two\nlines\tand a tab"])
def test_what_a_terminal_shows_stays(text: str) -> None:
    assert escape_control_chars(text) == text


@pytest.mark.parametrize("text", [*OBEYED, "\n", "\t", ""])
def test_such_a_name_is_refused(text: str) -> None:
    name = f"x{text}" if text else text
    assert not is_name(name)
    if text:
        with pytest.raises(ps.InvalidInput) as caught:
            check(RegisterRequest(source="s", inputs={name: ((1,), "float32")}))
        assert text[0] not in caught.value.message


@pytest.mark.parametrize("text", SHOWN)
def test_such_a_name_is_accepted(text: str) -> None:
    assert is_name(text)
    check(RegisterRequest(source="s", inputs={text: ((1,), "float32")}))


def test_two_names_that_differ_at_their_ends_are_not_made_one() -> None:
    inputs = {"x" * 128 + end: [[1], "float32"] for end in "ab"}
    with pytest.raises(ps.InvalidInput):
        Body("register", {"source": "s", "inputs": inputs}).rest(RegisterRequest)


@pytest.mark.parametrize("text", OBEYED)
def test_a_refusal_echoes_no_such_character(text: str) -> None:
    error = ps.InvalidInput(f"no {text}", hint=text, name=text, more=[text])
    header = msgspec.msgpack.decode(reply_frames("1", error=error)[1])
    sent = header["error"]
    shown = [sent["message"], sent["hint"], sent["data"]["name"], *sent["data"]["more"]]
    assert not any(text[0] in one for one in shown)


@pytest.mark.parametrize(
    "data",
    [{"bytes": 2**112}, {"of": [{"bytes": -(2**112)}]}, {"what": object()}, {"text": "\ud800"}],
)
def test_a_refusal_leaves_whatever_its_values_are(data: dict[str, Any]) -> None:
    error = ps.QueueFull("no room", hint="wait", **data)
    sent = msgspec.msgpack.decode(reply_frames("1", error=error)[1])["error"]
    assert (sent["type"], sent["message"], sent["hint"]) == ("QueueFull", "no room", "wait")


def test_a_number_too_large_to_travel_is_the_largest_that_does() -> None:
    """Also check numbers in a worker's refusal and in a job's record."""
    wire = to_wire(ps.QueueFull("no room", bytes=2**112, least=[-(2**112)], all=True, small=7))
    assert wire["data"] == {"bytes": 2**63 - 1, "least": [-(2**63)], "all": True, "small": 7}


class Enemy:
    """Client whose server answers with a malicious text."""

    address = "nobody's"

    def __init__(self, text: str) -> None:
        self.text = text

    def models(self, **_: Any) -> list[dict[str, Any]]:
        return [{"name": self.text, "state": self.text, "source": self.text}]

    def show(self, _: str, *__: Any) -> dict[str, Any]:
        return {"name": self.text, self.text: {"x": self.text, "y": [self.text]}}

    def unregister(self, _: str) -> dict[str, Any]:
        raise ps.ModelNotFound(f"no {self.text}", hint=self.text)

    def task(self, _: str) -> Enemy:
        return self

    def logs(self, **_: Any) -> Iterator[str]:
        yield f"step {self.text}\n"


@pytest.mark.parametrize("text", [text for text in OBEYED if text not in ("\r", "\ud800")])
@pytest.mark.parametrize(
    "words", [("models",), ("show", "a"), ("unregister", "a"), ("jobs", "logs", "a")]
)
def test_no_command_prints_such_a_character(
    text: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    enemy = contextlib.nullcontext(Enemy(text))
    monkeypatch.setattr("pipeswitch.client.client.Client", lambda *_, **__: enemy)
    out = io.StringIO()
    monkeypatch.setattr(views, "console", lambda: Console(file=out, width=240))
    printed = CliRunner().invoke(cli_main.main, [*words]).output + out.getvalue()
    assert text[0] not in printed
    assert escape_control_chars(text)[:3] in printed


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "\u202eevil"])
def test_a_bar_of_progress_obeys_no_stage(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(views, "Console", lambda **_: Console(file=out, force_terminal=True))
    with views.progress_bar(True, "m") as report:
        assert report is not None
        report(f"{text}[link=http://x]", 0.5)
    assert text not in out.getvalue()
    assert f"{escape_control_chars(text)}[link=http://x]" in out.getvalue()


@pytest.mark.parametrize(
    "log_to", [lambda path: log_daemon_to(path, 0), lambda path: log_worker_to(0)]
)
def test_no_log_of_a_process_holds_such_a_character(
    log_to: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fork a child process for this test, because the setup of logs cannot be undone."""
    path = tmp_path / "memory-daemon.log"
    child = os.fork()
    if child == 0:
        logging.getLogger().handlers.clear()
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - pytest's own is in its place
        log_to(str(path))
        logging.getLogger("pipeswitch.test").error("%s", "a\x1b[2J\u202eb")
        logging.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    written = capfd.readouterr().err + (path.read_text() if path.exists() else "")
    assert "a\\x1b[2J\\u202eb" in written
    assert "\x1b[2J" not in written


def test_the_servers_log_holds_no_such_character(tmp_path: Path) -> None:
    root = logging.getLogger("pipeswitch")
    before = list(root.handlers), root.level, root.propagate
    try:
        _log_to(tmp_path / "server.log", 1 << 20)
        root.error("%s", "a\x1b[2J\u202eb")
    finally:
        for handler in [h for h in root.handlers if h not in before[0]]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before[1])
        root.propagate = before[2]
    assert "a\\x1b[2J\\u202eb" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.00"),
        (3.3e-06, "3.30e-06"),
        (0.00123, "0.00123"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (-2.345, "-2.35"),
        (12.34, "12.3"),
        (99.94, "99.9"),
        (99.96, "100"),
        (264.5, "264"),
        (123456.7, "123457"),
        (2e15, "2.00e+15"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_number_has_three_significant_digits(number: float, text: str) -> None:
    assert format_number(number) == text
