"""A server whose fork server was forked by a process that imported torch before."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from process_tools import Checked, checked_server, children_of, command_of, kill, marked_pids, until


def test_a_kept_server_is_like_any_other() -> None:
    """Its processes carry its environment, its fork server is the controller's child and is
    replaced by one that imports for itself, and its exit status is ours to read."""
    with checked_server() as checked:
        checked.wait_until_whole()
        old = checked.fork_server_pid()
        assert "pipeswitch.keeper" in command_of(old)
        assert old in children_of(checked.pid)
        assert {checked.pid, checked.daemon_pid(), *checked.worker_pids().values()} <= marked_pids(
            checked.mark
        )
        settings = Path("/proc", str(checked.daemon_pid()), "environ").read_bytes()
        assert b"PIPESWITCH_HOST=ipc://" in settings
        with pytest.raises(subprocess.TimeoutExpired):
            checked.running.process.wait(0.01)
        kill(old, signal.SIGKILL)
        until(lambda: "pipeswitch.launch" in new_command(checked), "one that imports for itself")


def new_command(checked: Checked) -> str:
    return " ".join(command_of(pid) for pid in children_of(checked.pid))
