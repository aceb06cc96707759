"""Write the generated pages of the manual again: ``python docs/reference.py``.

``guide/commands.md`` from the command line's help, ``guide/settings.md`` from ``pipeswitch config
schema``. A test compares them. The site shows docstrings by itself (``mkdocs.yml``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from pipeswitch.base import config
from pipeswitch.cli.main import main

GUIDE: Final = Path(__file__).parent / "guide"
MARK: Final = "<!-- written by python docs/reference.py, do not edit -->"
COMMANDS: Final = """\
Type them after `pipeswitch`. `--help` explains each option. Commands that print a table or a row
take `--json`, listings `--watch`. They ask the server at `PIPESWITCH_HOST`, else your own."""
SETTINGS: Final = """\
Set them in `pipeswitch.toml`, or in the environment as `PIPESWITCH_SECTION__KEY`.
`pipeswitch config init` writes the file with these defaults; `pipeswitch config schema` prints its
JSON Schema."""


def commands() -> str:
    """One row for each command."""
    rows = ["| command | what it does |", "|---|---|"]
    for path, command in _commands(main, ""):
        arguments = [
            p.make_metavar(click.Context(command))
            for p in command.params
            if isinstance(p, click.Argument)
        ]
        text = (command.help or "").split("\n\n")[0].replace("\n", " ")
        usage = " ".join([path, *arguments]).replace("|", "\\|")
        rows.append(f"| `{usage}` | {text} |")
    return _page("Commands", COMMANDS, "\n".join(rows))


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    if command.invoke_without_command and path:
        yield path, command
    for name in command.list_commands(click.Context(command)):
        subcommand = command.get_command(click.Context(command), name)
        assert subcommand is not None
        yield from _commands(subcommand, f"{path} {name}".strip())


def settings() -> str:
    """A list for each section of the file."""
    parts = []
    for section, table in config.schema()["properties"].items():
        table = table.get("items", table)
        rows = table.get("properties", {})
        if "additionalProperties" in table and not rows and table["additionalProperties"]:
            rows = {"NAME": table["additionalProperties"]}
        if not rows:
            rows, section = {section: table}, ""
        if section:
            parts.append(f"## `[[{section}]]`" if section == "model" else f"## `[{section}]`")
        parts.append("\n".join(_setting(key, facts) for key, facts in rows.items()))
    return _page("Settings", SETTINGS, *parts)


def _setting(key: str, facts: dict[str, Any]) -> str:
    default = f" = `{json.dumps(facts['default'])}`" if "default" in facts else ""
    meaning = facts.get("description", "measured profiles of models")
    choices = facts.get("enum") or facts.get("items", {}).get("enum") or ()
    unsaid = [one for one in choices if not re.search(rf"\b{re.escape(one)}\b", meaning)]
    return f"- `{key}`{default}: {meaning}" + (f" ({', '.join(unsaid)})" if unsaid else "")


def _page(title: str, head: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MARK, head, *parts]) + "\n"


PAGES: Final[dict[str, Callable[[], str]]] = {"commands.md": commands, "settings.md": settings}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (GUIDE / name).write_text(page(), "utf-8")
