"""Write the generated pages of the manual again: ``python docs/reference.py``.

``guide/commands.md`` from the command line's help, ``guide/settings.md`` from ``pipeswitch config
schema``, ``guide/api.md`` from docstrings. A test compares them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

import pipeswitch as ps
from pipeswitch import job
from pipeswitch.base import config
from pipeswitch.cli.main import main

GUIDE: Final = Path(__file__).parent / "guide"
MARK: Final = "<!-- written by python docs/reference.py, do not edit -->"
COMMANDS: Final = """\
Type them after `pipeswitch`. `--help` explains each option. Commands that print a table or a row
take `--json`, listings `--watch`. They ask the server at `PIPESWITCH_HOST`, else your own."""
SETTINGS: Final = """\
They stand in `pipeswitch.toml`, or in the environment as `PIPESWITCH_SECTION__KEY`.
`pipeswitch config init` writes the file with these defaults; `pipeswitch config schema` prints its
JSON Schema."""
API: Final = """\
`import pipeswitch as ps`. [python.md](python.md) shows how they are used."""


def commands() -> str:
    """One row for each command."""
    rows = ["| command | what it does |", "|---|---|"]
    for path, command in _commands(main, ""):
        arguments = [p.make_metavar(click.Context(command)) for p in command.params
                     if isinstance(p, click.Argument)]  # fmt: skip
        text = (command.help or "").split("\n\n")[0].replace("\n", " ")
        called = " ".join([path, *arguments]).replace("|", "\\|")
        rows.append(f"| `{called}` | {text} |")
    return _page("Commands", COMMANDS, "\n".join(rows))


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    if command.invoke_without_command and path:
        yield path, command
    for name in command.list_commands(click.Context(command)):
        found = command.get_command(click.Context(command), name)
        assert found is not None
        yield from _commands(found, f"{path} {name}".strip())


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


def api() -> str:
    """The SDK's classes and ``job``, from their docstrings."""
    parts = [
        *_class("ps.Client", ps.Client),
        "## ps.AsyncClient\n\n" + _text(ps.AsyncClient),
        *_class("ps.Task", ps.Task),
        *_class("ps.Result", ps.Result),
        f"## ps.Timing\n\n{_text(ps.Timing)} [python.md](python.md#the-bill) lists the fields.",
        "## job\n\n`from pipeswitch import job`; [jobs.md](jobs.md).",
        *(_function(f"job.{name}", getattr(job, name))
          for name in ("epochs", "steps", "trainer", "shared", "log", "publish")),
    ]  # fmt: skip
    return _page("Every method", API, *parts)


def _page(title: str, head: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MARK, head, *parts]) + "\n"


def _class(name: str, found: type) -> list[str]:
    parts = [f"## {name}\n\n{_text(found)}"]
    members = {key: one for base in found.__mro__[:-1] for key, one in vars(base).items()}
    for key, member in members.items():
        if inspect.isfunction(member) and not key.startswith("_"):
            parts.append(_function(key, member))
        elif isinstance(member, property) and member.__doc__:
            parts.append(f"### {key}\n\n{_text(member)}")
    return parts


def _function(name: str, found: Callable[..., Any]) -> str:
    signature = inspect.signature(found)
    bare = [
        p.replace(annotation=p.empty, default=_shown(p.default))
        for name, p in signature.parameters.items()
        if name != "self"
    ]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    text = _text(found)
    head = f"### `{name}{shown}`".replace("Ellipsis", "…")
    return f"{head}\n\n{text}" if text else head


def _shown(default: Any) -> Any:
    """A default as its signature shows it: a function's address is another one each time."""
    return ... if inspect.isfunction(default) else default


def _text(found: Any) -> str:
    """A docstring as Markdown; its ``Args:`` become a list."""
    lines: list[str] = []
    for line in inspect.cleandoc(found.__doc__ or "").replace("``", "`").splitlines():
        section = re.fullmatch(r"(Args|Raises|Returns|Attributes):", line)
        item = re.fullmatch(r"    (\*{0,2}\w+(?:, \w+)*): (.*)", line)
        if section:
            lines.append("" if section[1] == "Args" else f"{section[1]}:\n")
        elif item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif re.match(r"    \S", line):
            lines.append(("- " if lines[-1].endswith(":\n") else "  ") + line.strip())
        else:
            lines.append(f"  {line.strip()}" if line.startswith("  ") else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands.md": commands,
    "settings.md": settings,
    "api.md": api,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (GUIDE / name).write_text(page(), "utf-8")
