"""The verbs that need no server: demo, checks of this machine, configuration, backups."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec
from click.shell_completion import get_completion_class

from ..base.errors import InvalidInput
from . import views
from .common import (
    EXIT_FAILED,
    EXIT_OK,
    Group,
    connected,
    json_option,
    part,
    print_done,
    warn_of_variables,
)


@click.command()
@click.option("--config", "path", type=click.Path(), help="The server's configuration file.")
@click.option("--serving/--no-serving", "serves", default=True, help="Serve a tiny model, too.")
@json_option
def doctor(path: str | None, serves: bool, as_json: bool) -> None:
    """Check whether this machine can serve, and say what to do. Takes half a minute."""
    from ..base.config import load
    from .doctor import examine, serving

    settings = load(path)
    findings = [*examine(settings), *([serving(settings)] if serves else [])]
    if as_json:
        views.print_json([finding.row() for finding in findings])
    else:
        marks = {"ok": "✔", "warn": "!", "fail": "✘"}
        for finding in findings:
            views.echo(f"{marks[finding.status]} {finding.name:<16} {finding.text}")
            if finding.advice:
                views.echo(f"  {'':<16} → {finding.advice}")
    sys.exit(EXIT_FAILED if any(f.status == "fail" for f in findings) else EXIT_OK)


@click.group(cls=Group)
def config() -> None:
    """Create and check the configuration file."""


@config.command("init")
@click.argument("path", type=click.Path(dir_okay=False), required=False)
def config_init(path: str | None) -> None:
    """Write a commented file with every setting's default, to PATH or to the screen."""
    from ..base.config import example

    if path in (None, "-"):
        click.echo(example(), nl=False)
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise InvalidInput(f"{path} exists already and is not overwritten") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(example())
    views.echo(f"wrote {path}")


@config.command("check")
@click.argument("path", type=click.Path(), required=False)
@json_option
def config_check(path: str | None, as_json: bool) -> None:
    """Check the file and the environment, and list all errors that serve would report."""
    from ..base.config import load

    loaded = load(path)
    warn_of_variables()
    views.echo("checking devices and sources …", err=True)
    part("pipeswitch.controller.main", "check")(loaded)
    print_done(msgspec.to_builtins(loaded), "the configuration is valid", as_json)


@config.command("schema")
def config_schema() -> None:
    """Print the file's JSON Schema."""
    from ..base.config import schema

    views.print_json(schema())


state_option = click.option(
    "--state-dir", type=click.Path(), help="The server's state directory, as in serve."
)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@state_option
@json_option
def backup(folder: Path, state_dir: str | None, as_json: bool) -> None:
    """Copy the state directory to a new folder; its server may be running."""
    addressed = click.get_current_context().obj["address"] or os.environ.get("PIPESWITCH_HOST")
    if state_dir is None and addressed:
        with connected() as client:
            state_dir = client.about().get("state_dir")
    _copied("backup", _state_dir(state_dir), folder, as_json)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@state_option
@json_option
def restore(folder: Path, state_dir: str | None, as_json: bool) -> None:
    """Make a state directory from a backup; a server can then start in it."""
    _copied("restore", folder, _state_dir(state_dir), as_json)


def _copied(verb: str, source: Path, target: Path, as_json: bool) -> None:
    row = part("pipeswitch.controller.backup", verb)(source, target)
    counts = (f"{number} {kind.removesuffix('s' * (number == 1))}" for kind, number in row.items())
    print_done(row, f"{target}: {', '.join(counts)}", as_json)


def _state_dir(path: str | None) -> Path:
    from ..base.config import load

    return Path(load(None, flags={"server": {"state_dir": path}}).server.state_dir)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(pipeswitch completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "pipeswitch", "_PIPESWITCH_COMPLETE").source())
