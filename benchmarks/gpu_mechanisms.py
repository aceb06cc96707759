"""Stage that tests each mechanism without a server: with CUDA bindings, with torch, with both.

The mechanisms are the checks of the self-test (``pipeswitch/devices/cuda/selftest.py``), and
further checks that no server makes when it starts. Each runs for at most 15 s in its own process
and prints one JSON line; a check that cannot run prints what is missing. Repair the first broken
mechanism first: it may be the reason why later ones fail.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from pipeswitch.base.config import DeviceConfig
from pipeswitch.base.errors import ConfigError
from pipeswitch.devices.cuda import selftest
from pipeswitch.devices.cuda.examine import look
from pipeswitch.devices.cuda.ladder import RUNGS, LadderOutcome, choose
from pipeswitch.devices.cuda.pinned import PIN_BYTES, PinnedMapping
from pipeswitch.devices.cuda.selftest import CHECKS, MIB, Rig, SelfTestCheck
from pipeswitch.ipc.control_page import sealed_memfd

from .gpu_common import end_without, package, put


def _pinned(rig: Rig) -> str:
    """Test if CUDA registers a mapped memfd; if not, copies are staged: slower, but correct."""
    store = PinnedMapping(rig.cuda(), sealed_memfd("store", PIN_BYTES), PIN_BYTES)
    store.pin(0, PIN_BYTES)
    selftest.round_trip(rig.cuda(), store.address, store.array[:MIB])
    if store.refusal:
        raise RuntimeError(f"copies are staged: {store.refusal}")
    return f"{PIN_BYTES // MIB} MiB of a memfd registered"


def _warm(rig: Rig) -> str:
    rig.side().warm_up()
    return "cuBLAS, cuBLASLt and cuDNN compute"


MECHANISMS: Final[dict[str, SelfTestCheck]] = {
    "device": CHECKS["device"],
    "memory": CHECKS["memory"],
    "pinned": SelfTestCheck(_pinned, ("memory",)),
    "ipc": CHECKS["ipc"],
    "torch": CHECKS["torch"],
    "warm": SelfTestCheck(_warm, ("torch",)),
    "tensor": CHECKS["tensor"],
    "wait-write": CHECKS["wait-write"],
    "wait-copy": CHECKS["wait-copy"],
    "slice": CHECKS["slice"],
    "graph": CHECKS["graph"],
    "hold": CHECKS["hold"],
}
"""Mechanisms in the order in which they run."""


def stage() -> int:
    """Test all mechanisms; print each result, and the mechanisms that a server would choose."""
    _, *names = MECHANISMS
    try:
        findings = look(package(), 0, names, program="benchmarks.gpu_mechanisms")
    except ConfigError as error:  # the driver's library is missing
        findings = {"device": {"is_ok": False, "text": error.message, **error.data}}
    for name in MECHANISMS:
        if name in findings:
            _put_mechanism(name, findings[name])
    if "complaints" in findings:
        put(stderr=findings["complaints"]["text"])
    device = findings["device"]
    if not device["is_ok"]:
        return end_without(device["text"], device.get("kind", ""))
    put(device=device)
    outcomes = {
        name: LadderOutcome(findings[name]["is_ok"], findings[name]["text"]) for name in MECHANISMS
    }
    try:
        ladder = choose(DeviceConfig(), outcomes)
    except ConfigError as error:
        put(ladder_refused=error.message)
        return 1
    rungs = {key: getattr(ladder, key) for key in RUNGS}
    put(rungs=rungs, reasons=ladder.reasons)
    return 0 if all(outcome.is_ok for outcome in outcomes.values()) else 1


def _put_mechanism(name: str, finding: dict[str, Any]) -> None:
    outcome = "ok" if finding["is_ok"] else "not run" if "lacks" in finding else "FAILED"
    put(mechanism=name, outcome=outcome, text=finding["text"], s=finding.get("seconds", 0.0))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        selftest.main(json.loads(sys.argv[1]), MECHANISMS)
    else:
        sys.exit(stage())
