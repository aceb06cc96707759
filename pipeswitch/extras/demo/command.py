"""``pipeswitch demo``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ...cli.common import json_option


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False), default=".", help="Folder for the timeline."
)
@click.option(
    "--ui", is_flag=True, help="Open the web page and continue until Ctrl-C, without measuring."
)
@json_option
def demo(out: str, ui: bool, as_json: bool) -> None:
    """Serve three models and train a fourth, then print the times (two minutes)."""
    from . import run

    sys.exit(run.show() if ui else run.run(Path(out), as_json=as_json))
