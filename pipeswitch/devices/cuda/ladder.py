"""Choice of CUDA mechanisms, as a pure function of the settings and the self-test's results.

Each mechanism (rung) has a setting and a slower fallback (ADR 12). Waits on the CPU and
ordinary memory work with any driver. Device-side waits, the activation slice and CUDA graphs are
used only if their self-test passed on this machine. If a test fails, the fallback is used even if
the setting requests the mechanism, and the reason is reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from ...base.config import DeviceConfig
from ...base.errors import ConfigError

Waits = Literal["cpu", "gpu"]
Words = Literal["copy", "write"]
Activations = Literal["private", "slice"]
Graphs = Literal["off", "on"]
Holds = Literal["drain", "stream"]

AUTO: Final = "auto"
RUNGS: Final = ("waits", "words", "activations", "graphs", "holds")
REQUIRED: Final = ("memory", "ipc", "torch", "tensor")
"""Tests that must pass before the device is used: the arena, and workers that compute on it."""

TESTS: Final = (*REQUIRED, "wait-write", "wait-copy", "slice", "graph", "hold")
"""All tests, in the order in which the self-test runs them."""


class LadderOutcome(NamedTuple):
    """Result of one test of the self-test."""

    is_ok: bool
    text: str = ""


def needs_test(wishes: DeviceConfig) -> bool:
    """Return True if the self-test must decide. A stream is held only if it was tested or named."""
    return any(getattr(wishes, rung) == AUTO for rung in RUNGS if rung != "holds")


@dataclass(frozen=True)
class Ladder:
    """The mechanisms in use, and the reasons why faster ones are not used."""

    waits: Waits = "cpu"
    words: Words = "write"
    activations: Activations = "private"
    graphs: Graphs = "off"
    holds: Holds = "drain"
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{rung}={getattr(self, rung)}" for rung in RUNGS)


def choose(wishes: DeviceConfig, results: Mapping[str, LadderOutcome] | None) -> Ladder:
    """Return the fastest mechanisms that are requested and work.

    Args:
        results: results by test name; a missing test did not run. None: the self-test was skipped,
            because ``wishes`` names every mechanism; the named ones are used.

    Raises:
        ConfigError: a required test failed.
    """
    if results is not None:
        for name in REQUIRED:
            outcome = results.get(name, LadderOutcome(False, "it did not run"))
            if not outcome.is_ok:
                raise ConfigError(
                    f"the cuda device fails its self-test: {name}: {outcome.text}",
                    hint="pipeswitch doctor says more; pipeswitch serve --device cpu works",
                    test=name,
                )
    reasons: list[str] = []
    waits, words = _waits(wishes, results, reasons)
    has_slice = _rung(wishes.activations, "private", "slice", "slice", results, reasons)
    has_graphs = _rung(wishes.graphs, "off", "on", "graph", results, reasons)
    may_hold = _rung(wishes.holds, "drain", "stream", "hold", results, reasons)
    return Ladder(
        waits=waits,
        words=words,
        activations="slice" if has_slice else "private",
        graphs="on" if has_graphs else "off",
        holds="stream" if may_hold else "drain",
        reasons=tuple(reasons),
    )


def _waits(
    wishes: DeviceConfig, results: Mapping[str, LadderOutcome] | None, reasons: list[str]
) -> tuple[Waits, Words]:
    """Return how to wait for fences and how to set them; append reasons. In order of preference:
    1. The device waits, and stream writes set fences: CUDA documents that they follow the data.
    2. The device waits, and copies set fences. CUDA does not promise to other processes that a
       fence follows its data; the self-test checks it.
    3. The CPU waits."""
    if wishes.waits == "cpu":
        reasons.append("waits=cpu: asked for")
        return "cpu", "write" if wishes.words == "write" else "copy"
    first_choice: Words = "copy" if wishes.words == "copy" else "write"
    if results is None:
        return "gpu", first_choice
    order: tuple[Words, ...] = ("copy", "write") if first_choice == "copy" else ("write", "copy")
    for words in order:
        outcome = results.get(f"wait-{words}", LadderOutcome(False, "it did not run"))
        if outcome.is_ok:
            return "gpu", words
        reasons.append(f"not words={words} with waits=gpu: {outcome.text}")
    reasons.append("waits=cpu: the device cannot wait for a word")
    return "cpu", "copy"


def _rung(
    wish: str,
    lower: str,
    upper: str,
    test: str,
    results: Mapping[str, LadderOutcome] | None,
    reasons: list[str],
) -> bool:
    """Return True if the mechanism ``upper`` can be used; append the reason if it is not."""
    if wish == lower:
        reasons.append(f"{test}={lower}: asked for")
        return False
    if results is None:
        return wish == upper
    outcome = results.get(test, LadderOutcome(False, "it did not run"))
    if not outcome.is_ok:
        reasons.append(f"not {upper}: {test}: {outcome.text}")
    return outcome.is_ok


class CudaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for daemon and workers: the mechanisms that were chosen at the server's start."""

    package: str
    visible: str = ""  # UUID for CUDA_VISIBLE_DEVICES in children; empty: leave it unchanged
    waits: Waits = "cpu"
    words: Words = "write"
    slice_bytes: int = 0  # size of the activation slice behind the arena; 0: ordinary memory
    holds: Holds = "drain"
    use_graphs: bool = False
    graph_bytes: int = 0  # driver memory that one worker's graphs may use
    private_bytes: int = 0  # memory that one worker may allocate outside of the slice; 0: no cap

    @classmethod
    def shown(cls, data: bytes) -> CudaOptions:
        """Decode a child's options, and limit the child to its device.

        The device becomes number 0, so a script's ``cuda:0`` is the right one.
        """
        options = msgspec.msgpack.decode(data, type=cls)
        if options.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.visible
        return options
