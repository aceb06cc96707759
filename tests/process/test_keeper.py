"""Servers started by the keeper, a process that has imported torch and forks for each server."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from keeper import Keeper
from process_tools import Checked, checked_server, children_of, command_of, kill, marked_pids, until


def test_a_kept_server_is_like_any_other() -> None:
    """Check the variables of all processes, the fork server's parent, and a wait with a timeout.
    After this fork server is killed, its successor must import the modules itself."""
    with checked_server() as checked:
        checked.wait_until_whole()
        old = checked.fork_server_pid()
        assert "process/keeper.py" in command_of(old)
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


SAME = {"PIPESWITCH_SERVER__POOL": "1MiB", "XDG_RUNTIME_DIR": "/run/of/this/server"}


@pytest.mark.parametrize(
    ("more", "may"),
    [({}, True), (SAME, True), ({"PYTHONPATH": "mine"}, True), ({"OMP_NUM_THREADS": "3"}, False)],
)
def test_what_an_import_reads_must_be_the_keepers(more: dict[str, str], may: bool) -> None:
    keeper = Keeper()
    assert keeper.serves({**os.environ, **more}) == may
    keeper.close()


@pytest.mark.parametrize("name", ["sitecustomize.py", "torch.py", "torch"])
def test_a_folder_that_brings_what_the_keeper_imported_is_not_the_keepers(
    name: str, tmp_path: Path
) -> None:
    keeper = Keeper()
    (tmp_path / name).touch()
    assert not keeper.serves({**os.environ, "PYTHONPATH": f"mine:{tmp_path}"})
    keeper.close()


def test_a_variable_that_is_missing_is_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    keeper = Keeper()
    monkeypatch.delenv("MKL_NUM_THREADS")
    assert not keeper.serves(os.environ)
    keeper.close()
