"""Capabilities of this machine's GPU, measured by the self-test program (``selftest.py``).

The program is a separate process: the controller makes no CUDA context and imports no bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from ...base.errors import ConfigError
from .bindings import REAL_PACKAGE, no_driver

PROGRAM: Final = "pipeswitch.devices.cuda.selftest"
SELFTEST_S: Final = 220.0  # limit for all checks; the program also limits each check


def examine(package: str, index: int, *, tests: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the result of ``look`` for a device that works.

    Raises:
        ConfigError: the device does not exist or does not work; the text is the self-test's.
    """
    outcomes = look(package, index, tests)
    device = outcomes["device"]
    if not device["is_ok"]:
        raise ConfigError(device["text"], hint=device.get("hint", ""), kind=device.get("kind", ""))
    return outcomes


def look(
    package: str, index: int, tests: Sequence[str], *, program: str = PROGRAM
) -> dict[str, dict[str, Any]]:
    """Run the self-test program (blocks); return its findings by the name of the test.

    The finding ``complaints`` has the end of stderr of the program and its children.

    Raises:
        NoCudaDevice: there is no driver library.
    """
    if package == REAL_PACKAGE and not has_driver_library():
        raise no_driver()
    order = {"package": package, "index": index, "tests": list(tests)}
    output, last_words, status = b"", b"", "no answer in time"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-X", "faulthandler", "-m", program, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SELFTEST_S,
            check=False,
        )
        output, last_words, status = done.stdout, done.stderr, f"status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, last_words = error.stdout or b"", error.stderr or b""
    text = last_words.decode(errors="replace").strip()[-3000:]
    outcomes: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a library printed
            finding = json.loads(line)
            outcomes[finding["test"]] = finding
    silent = f"the GPU self-test ended with {status} and said nothing: {text[-500:]}"
    hint = "pipeswitch doctor; or serve --device cpu"
    outcomes.setdefault("device", {"is_ok": False, "text": silent, "hint": hint})
    for name in tests:
        outcomes.setdefault(name, {"is_ok": False, "text": "it did not run"})
    if text:
        outcomes["complaints"] = {"test": "complaints", "is_ok": True, "text": text}
    return outcomes


def has_driver_library() -> bool:
    """Return True if libcuda can be loaded; loading it starts nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
