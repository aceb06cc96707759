"""All targets by name. Their modules are imported late, so that the driver can instrument them."""

from __future__ import annotations

import importlib
from typing import Final

from .target import Target

MODULES: Final = {
    "request": "requests",
    "reply": "replies",
    "bundle": "bundles",
    "graph": "graphs",
    "commit": "commits",
    "profile": "profiles",
    "packet": "packets",
    "daemon": "daemons",
    "worker": "workers",
    "order": "obeying",
    "gateway": "gateways",
}
"""Name of a target -> module in this package that defines the target."""

SHARES: Final = {"packet": 2.0}
"""Name of a target -> its weight when the time is divided; other targets have weight 1."""


def load(name: str) -> Target:
    """Import a target's module, which imports the tested code; return the target."""
    target: Target = importlib.import_module(f"{__package__}.{MODULES[name]}").TARGET
    return target
