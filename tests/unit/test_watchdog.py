"""The watchdog, which detects a loop that hangs, and the messages that systemd expects."""

from __future__ import annotations

import configparser
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeswitch.base.config import Config
from pipeswitch.scheduler.policies import Eviction, Order, Policy, View, Waiting
from pipeswitch.scheduler.policies.guard import PolicyGuard
from pipeswitch.watchdog import LOOKS, LoopWatchdog, Notifier, PolicyWatchdog, TurnLooks

UNIT = Path(__file__).parents[2] / "packaging/pipeswitch.service"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def environ(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def test_systemd_is_told_in_its_own_form(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager))
    notifier.notify(READY=1, STATUS="ready\nMAINPID=1")
    assert manager.recv(1000) == b"READY=1\nSTATUS=ready MAINPID=1"
    notifier.close()


def test_an_abstract_address_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("")  # the kernel chooses a free abstract name
        sock.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + sock.getsockname()[1:].decode()})
        notifier.notify(READY=1)
        assert sock.recv(1000) == b"READY=1"
        notifier.close()


def test_the_watchdog_is_fed_three_times_per_limit_and_no_more(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager, WATCHDOG_USEC="3000000"))
    notifier.beat(-1.0)  # no effect before READY
    notifier.notify(READY=1)
    assert manager.recv(1000) == b"READY=1"
    for turn in range(1000):  # simulates ten seconds
        notifier.beat(turn / 100)
    manager.settimeout(0)
    heard = []
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(manager.recv(1000))
    assert heard == [b"WATCHDOG=1"] * 10
    notifier.close()


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}]
)
def test_nobody_is_fed_who_does_not_watch_us(manager: socket.socket, more: dict[str, str]) -> None:
    notifier = Notifier(environ(manager, **more))
    notifier.notify(READY=1)
    assert manager.recv(1000) == b"READY=1"
    notifier.beat(1e9)
    manager.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.recv(1000)
    notifier.close()


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for address in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        notifier = Notifier(address)
        notifier.notify(READY=1)
        notifier.beat(1e9)
        notifier.close()


def test_a_loop_that_hangs_is_ended_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    ended = threading.Event()
    with open(tmp_path / "log", "w") as dump:
        watchdog = LoopWatchdog(0.05, (dump.fileno(),), ended.set)
        watchdog.start()
        assert ended.wait(10)
        watchdog.stop()
    text = (tmp_path / "log").read_text()
    assert "scheduler=hung" in text
    assert "test_a_loop_that_hangs" in text


COLLECTED = """
import gc, threading
from pipeswitch.watchdog import LoopWatchdog
watchdog, may_end = LoopWatchdog(1.0, ()), threading.Event()
for _ in range(20):
    threading.Thread(target=may_end.wait).start()
gc.disable()
gc.collect()
for _ in range(1000):  # garbage whose end takes the interpreter's lock on its threads
    circle = [threading.local()]
    circle.append(circle)
    circle[0].circle = circle
gc.set_threshold(gc.get_count()[0] + 10, 1, 1)
gc.enable()
watchdog._call()
assert gc.isenabled()
may_end.set()
"""


def test_a_collection_of_garbage_does_not_hang_the_watchdog() -> None:
    command = [sys.executable, "-c", COLLECTED]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_loop_that_turns_now_and_then_is_left_alone() -> None:
    looks = TurnLooks()
    for turn in range(5):
        assert not any(looks.is_hung(turn) for _ in range(LOOKS))
    assert looks.is_hung(turn)


@pytest.mark.parametrize("kind", [LoopWatchdog, PolicyWatchdog])
def test_a_policy_that_does_not_return_is_named(kind: type[LoopWatchdog], tmp_path: Path) -> None:
    ended = threading.Event()

    class Hangs(Order):
        def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
            ended.wait(30)
            return (0.0,)

    with open(tmp_path / "log", "w") as dump:
        watchdog = kind(0.05, (dump.fileno(),), ended.set)
        watchdog.start()
        PolicyGuard(Policy("mine", Hangs(), Eviction()), 1.0).rank(
            Waiting(1, "m", 1, None, 0), View(0)
        )
        assert ended.is_set()
        watchdog.stop()
    assert 'policy "mine" has not returned from rank' in (tmp_path / "log").read_text()


def test_outside_of_a_policy_a_loop_may_take_its_time() -> None:
    watchdog, looks = PolicyWatchdog(1e3, ()), TurnLooks()
    watchdog.start()
    assert not any(looks.is_hung(watchdog._place()) for _ in range(3 * LOOKS))
    watchdog.stop()


def test_no_limit_is_no_watchdog(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as dump:
        watchdog = LoopWatchdog(0.0, (dump.fileno(),), lambda: None)
        watchdog.start()
        assert not watchdog._thread.is_alive()
        watchdog.stop()


# ------------------------------------------------------------------------------- the unit file


def unit() -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_the_unit_waits_for_readiness_watches_and_restarts() -> None:
    service = unit()
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure"
    assert service["ExecStart"].endswith("pipeswitch serve")
    assert service["KillMode"] == "mixed"  # only the server gets SIGTERM, and it drains


def test_the_unit_gives_a_drain_the_time_it_may_take() -> None:
    grace_s = Config().server.drain_grace_ms / 1000
    assert float(unit()["TimeoutStopSec"]) > grace_s


def test_systemd_finds_nothing_wrong_with_the_unit() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here; the parsing tests stand")
    done = subprocess.run([tool, "verify", str(UNIT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
