"""All targets, by name. Imported late: the driver instruments what they import."""

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
"""A target's name -> the module beside this one that defines it."""

SHARES: Final = {"packet": 2.0}
"""Of the whole time, against the other targets' 1."""


def load(name: str) -> Target:
    """The target of that name; imports what it tests."""
    target: Target = importlib.import_module(f"{__package__}.{MODULES[name]}").TARGET
    return target
