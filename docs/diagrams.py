"""Write the state diagrams of ``states.md`` again: ``python docs/diagrams.py``.

They are generated from ``pipeswitch/scheduler/state/states.py``; a test compares them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeswitch.scheduler.state import states

DOCUMENT = Path(__file__).parent / "states.md"
TABLES: dict[str, Mapping[tuple[Any, Any], enum.Enum]] = {
    "task": states.TASK_TRANSITIONS,
    "worker": states.WORKER_TRANSITIONS,
    "owner": states.OWNER_TRANSITIONS,
    "residency": states.RESIDENCY_TRANSITIONS,
    "model": states.MODEL_TRANSITIONS,
    "version": states.VERSION_TRANSITIONS,
}


def with_diagrams(text: str) -> str:
    """``text`` with each table's diagram as the table stands now."""
    for name, table in TABLES.items():
        block = f"```mermaid\n{states.diagram(name, table)}\n```"
        pattern = re.compile(rf"```mermaid\n%% {name}: .*?\n```", re.DOTALL)
        text, count = pattern.subn(lambda _, block=block: block, text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{DOCUMENT.name} has {count} diagrams of {name}")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_diagrams(DOCUMENT.read_text()))
