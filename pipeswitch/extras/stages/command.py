"""Command ``pipeswitch chain``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ...cli import common


@click.command()
@click.argument("name")
@click.argument("steps", nargs=-1, required=True, metavar="[STEP=]MODEL[:INPUT=VALUE,…]...")
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="NAME=STEP.OUTPUT",
    help="Output of the chain (repeatable; default: all outputs of the last step).",
)
@common.json_option
def chain(name: str, steps: tuple[str, ...], outputs: tuple[str, ...], as_json: bool) -> None:
    """Register a chain: models that run one after the other in one request.

    A VALUE is an input of the request or STEP.OUTPUT of an earlier step:
    pipeswitch chain labels encoder head:x=encoder.y
    """
    declared = []
    for step in steps:
        which, _, inputs = step.partition(":")
        alias, _, model = which.rpartition("=")
        declared.append({"name": alias, "model": model, "inputs": _pairs(inputs.split(","))})
    with common.connected() as client:
        row = client.register_chain(name, declared, _pairs(outputs))
    text = f"{name}: {', '.join(row['inputs'])} > {' > '.join(s['name'] for s in row['steps'])}"
    common.print_done(row, f"{text} > {', '.join(row['outputs'])}", as_json)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    values = {}
    for text in filter(None, texts):
        name, _, value = text.partition("=")
        if not (name and value) or name in values:
            raise click.UsageError(f"{text!r} is not of the form x=encoder.y, or appears twice")
        values[name] = value
    return values
