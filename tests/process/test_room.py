"""A server whose settings exceed the machine refuses to start before it allocates anything."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import command

SERVE = ("serve", "--device", "cpu", "--listen", "tcp://127.0.0.1:0")


def serve(state: Path, *arguments: str, group: Path | None = None) -> tuple[int, str]:
    """Start a server, in ``group`` if given, and wait until it exits; return status and errors."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = command(*SERVE, "--state-dir", str(state), *arguments, preexec_fn=enter)
    return done.returncode, done.stderr


@pytest.mark.parametrize("option", ["--arena", "--host-store"])
def test_more_than_the_machine_has_is_refused_with_the_numbers(option: str, tmp_path: Path) -> None:
    status, words = serve(tmp_path / "state", option, "4TiB")
    assert status == 2
    for part in ("4.00 TiB", "are available", "--arena"):
        assert part in words
    assert "Traceback" not in words


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a cgroup of 600 MiB for the server's process."""
    group = _memory_group() / f"pipeswitch-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        is_first = (group / "memory.limit_in_bytes").exists()
        limit = group / ("memory.limit_in_bytes" if is_first else "memory.max")
        limit.write_text(str(600 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()


def _memory_group() -> Path:
    """Return this process's cgroup in the hierarchy that accounts for memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup")


def test_more_than_the_cgroup_has_is_refused_with_the_numbers(
    small_group: Path, tmp_path: Path
) -> None:
    sizes = ("--arena", "512MiB", "--host-store", "256MiB")
    status, words = serve(tmp_path / "state", *sizes, group=small_group)
    assert status == 2
    for part in ("1.25 GiB", "MiB are available"):
        assert part in words
