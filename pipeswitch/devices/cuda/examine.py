"""What works on this machine's GPU: asked of the self-test, a process of its own (``selftest.py``).

The controller makes no CUDA context and imports no bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

from ...errors import ConfigError
from .bindings import PACKAGE, no_driver

SELFTEST_S: Final = 90.0  # in all; a test that hangs is cut short by the program itself


def examine(package: str, index: int, *, with_tests: bool) -> dict[str, dict[str, Any]]:
    """Run the self-test program; its findings by name. What is missing did not run.

    ``complaints`` holds the last of what it and its peer wrote to stderr.

    Raises:
        ConfigError: there is no such device; carries the program's own words.
    """
    if package == PACKAGE and not has_driver_library():
        raise no_driver()
    order = {"package": package, "index": index, "tests": with_tests}
    program = ("-P", "-X", "faulthandler", "-m", "pipeswitch.devices.cuda.selftest")
    command = [sys.executable, *program, json.dumps(order)]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints,
            start_new_session=True,
        )  # fmt: skip
        try:
            for line in _lines(process, SELFTEST_S):
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a library's own words
                    finding = json.loads(line)
                    found[finding["test"]] = finding
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # a peer that hangs in the driver
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        complaints.seek(0)
        last_words = complaints.read().decode(errors="replace").strip()[-3000:]
    device = found.get("device")
    if device is None:
        raise ConfigError(
            f"the GPU self-test ended with status {process.returncode} and said nothing"
            f"{': ' + last_words[-500:] if last_words else ''}",
            hint="pipeswitch doctor; or serve --device cpu",
        )
    if not device["is_ok"]:
        raise ConfigError(device["text"], hint=device.get("hint", ""), kind=device.get("kind", ""))
    if last_words:
        found["complaints"] = {"test": "complaints", "is_ok": True, "text": last_words}
    return found


def has_driver_library() -> bool:
    """Whether libcuda can be loaded; loading it starts nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """Whole lines until the end of output, or until the time is over."""
    assert process.stdout is not None
    ends_at = time.monotonic() + timeout_s
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_at - time.monotonic()) > 0:
            if not selector.select(left_s):
                return
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
