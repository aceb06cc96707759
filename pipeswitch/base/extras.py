"""Seams of the engine: what the folders of ``pipeswitch/extras/`` add to it.

The engine imports no extra. The ``__init__`` of an extra imports nothing: it has a table for each
seam, NAME -> "module:function", whose modules are imported when the engine needs a function.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from .errors import ConfigError

PACKAGE: Final = __name__.partition(".")[0] + ".extras"
FOLDER: Final = Path(__file__).parents[1] / "extras"


@dataclass(frozen=True)
class Seam:
    """Place at which extras add functions to the engine."""

    table: str  # name of the table in the ``__init__`` of an extra
    noun: str

    def names(self) -> list[str]:
        return list(functions(self.table))

    def load(self, name: str) -> Any:
        """Import and return the function of a name.

        Raises:
            ConfigError: no installed extra has it.
        """
        module, _, function = functions(self.table).get(name, "").partition(":")
        if not module:
            text = f"this installation has no {self.noun} {name[:40]!r}"
            raise ConfigError(text, hint=f"{PACKAGE} lacks a folder")
        return getattr(importlib.import_module(module), function)


BUILDERS: Final = Seam("BUILDERS", "model builder for")  # option -> a model's preparation
CHECKS: Final = Seam("CHECKS", "check of")  # of a user's policy, and of a server's keys
COMPOSITES: Final = Seam("COMPOSITES", "kind of names")  # kind -> class of its requests
COMMANDS: Final = Seam("COMMANDS", "command")  # groups and verbs of the command line
EFFECTS: Final = Seam("EFFECTS", "executor for a")  # kinds of helper processes -> commands for them
DOORS: Final = Seam("DOORS", "door")  # protocols over HTTP: routes and their answers
GROUPS: Final = Seam("GROUPS", "memory for")  # memory that a group of jobs shares
JOBS: Final = Seam("JOBS", "job feature")  # what a training job's worker may use
KINDS: Final = Seam("KINDS", "kind of request")  # verbs whose requests need several runs
METHODS: Final = Seam("METHODS", "method of a client:")  # longer dialogues with a server
REPLIES: Final = Seam("REPLIES", "answer to")  # verbs for the role ``code`` -> reply's body
PARTS: Final = Seam("PARTS", "part of the scheduler:")  # handlers of requests
PROCESSES: Final = Seam("PROCESSES", "process for a")  # helper processes, forked beside workers
QUEUES: Final = Seam("QUEUES", "queue for a")  # kinds of helper processes -> requests for them
RUNNERS: Final = Seam("RUNNERS", "runs of a model with")  # kind of settings -> a worker's runner
SCHEMES: Final = Seam("SCHEMES", "connection to")  # schemes of addresses -> a client's connection
SERVERS: Final = Seam("SERVERS", "server for")  # protocols of the gateway that are not HTTP
SETTINGS: Final = Seam("SETTINGS", "settings of a model,")  # kind -> reader of a bundle's metadata
UPSTREAMS: Final = Seam("UPSTREAMS", "gateway of a")  # connection of a gateway to more servers
WRAPPERS: Final = Seam("WRAPPERS", "option")  # options of a model -> its ``Wrapper``


@cache
def functions(table: str, package: str = PACKAGE, folder: Path = FOLDER) -> Mapping[str, str]:
    """Return the entries of all extras, each as "package.module:function"."""
    entries: dict[str, str] = {}
    for _, extra, is_package in pkgutil.iter_modules([str(folder)], f"{package}."):
        if is_package:
            own = getattr(importlib.import_module(extra), table, {})
            entries |= {name: f"{extra}.{place}" for name, place in own.items()}
    return entries
