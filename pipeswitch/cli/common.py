"""Shared parts of the commands: options, the client, completion of names, output."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from msgspec import inspect as types

from ..base.errors import InvalidInput, PermissionDenied, PipeSwitchError
from ..base.model_options import ModelOptions
from ..base.settings import ConfigKey, read, rules_of, settings
from ..base.units import printed
from ..wire.addresses import full_address, is_refused, no_server
from . import views

EXIT_OK, EXIT_FAILED = 0, 1
EXIT_INTERRUPTED = 130  # exit status of a shell after SIGINT

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
http_option = click.option(
    "--http",
    default="",
    metavar="URL",
    help="The server's HTTP address; the owner does not need it.",
)
token_option = click.option(
    "--token",
    default="",
    envvar="PIPESWITCH_TOKEN",
    show_envvar=True,
    help="With --http: the bearer token, if the address requires one.",
)
watch_option = click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")


def model_options(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that adds these options of a registration to a command."""

    def decorate(command: Any) -> Any:
        for key, item in reversed(settings(ModelOptions).items()):
            if item.name in names:
                command = _option(key, item)(command)
        return command

    return decorate


def _option(key: str, item: ConfigKey) -> Callable[[Any], Any]:
    """Return a command-line option that is read like a key of the configuration file."""
    rules = rules_of(item.kind)
    flag = rules.extra.get("flag", "--" + key.replace("_", "-"))
    is_repeatable = isinstance(rules.info, types.DictType) or "flag" in rules.extra
    more: Any = {"is_flag": True}
    if rules.choices:
        more = {"type": click.Choice([one for one in rules.choices if one])}
    elif not isinstance(rules.info, types.BoolType):
        numbers = {} if "read" in rules.extra else {types.IntType: int, types.FloatType: float}
        more = {"type": numbers.get(type(rules.info), str), "multiple": is_repeatable}

    def take(_: click.Context, __: click.Parameter, value: Any) -> Any:
        try:
            return read(item.kind, value) if value else value
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=flag) from None

    return click.option(
        flag,
        item.name,
        metavar=rules.extra.get("metavar"),
        callback=take,
        help=item.help[0].upper() + item.help[1:] + " (repeatable)" * is_repeatable + ".",
        **more,
    )


devices_option = model_options("devices")


OF_OTHERS: Final = {
    **dict.fromkeys(("list", "ls"), "pipeswitch models"),
    **dict.fromkeys(("rm", "delete"), "pipeswitch unregister NAME"),
    "pull": "pipeswitch run hf:ORG/NAME, or pipeswitch register NAME SOURCE",
    "create": "pipeswitch register NAME SOURCE",
    "status": "pipeswitch ps",
    "start": "pipeswitch serve",
    "logs": "pipeswitch jobs logs NAME",
    "help": "pipeswitch --help",
}
"""Commands of Ollama, docker and others, and of ``models``, with what to type here instead."""


class Group(click.Group):
    """Group that lists the whole first sentence of each command, on as many lines as needed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_unknown = self.get_command(ctx, args[0]) is None
        if is_unknown and args[0] in OF_OTHERS and (ctx.parent is None or self.name == "models"):
            ctx.fail(f"No such command {args[0]!r}. Use: {OF_OTHERS[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_rows(ctx, formatter, "Commands", self.list_commands(ctx))

    def write_rows(
        self, ctx: click.Context, formatter: click.HelpFormatter, title: str, names: Sequence[str]
    ) -> None:
        """Write a section of the help with these commands."""
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [
            (name, command.get_short_help_str(limit=1000)) for name, command in commands if command
        ]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Connect to the server that the user has named, or to the default one.

    Fail at once if nobody listens: the SDK would wait for a server that is starting.
    """
    from ..client.client import Client

    with Client(**click.get_current_context().obj) as client:
        if is_refused(client.address):
            raise no_server(client.address)
        yield client


def http_of(about: Mapping[str, Any], what: str, verb: str) -> tuple[str, str]:
    """Return the server's HTTP address and its owner's token.

    Args:
        about: the server's answer to ``Client.about``.
        what: name of the caller's purpose, for errors.
        verb: command with that purpose.

    Raises:
        PermissionDenied: the client is not the server's owner.
        PipeSwitchError: the server has no HTTP address, or the token's file cannot be read here.
    """
    if not about["is_owner"]:
        raise PermissionDenied(
            f"the {what}'s token is only for the server's owner",
            hint=f"on the server's machine, as its user, without --host: pipeswitch {verb}",
        )
    if "http" not in about:
        raise PipeSwitchError(
            f"this server does not serve HTTP, so it has no {what}",
            hint="pipeswitch serve --http 127.0.0.1:8000",
        )
    try:
        token = Path(about["token_file"]).read_text("ascii").strip()
    except OSError as error:
        raise PipeSwitchError(f"{about['token_file']}: {error.strerror}") from None
    return re.sub(r"//(0\.0\.0\.0|\[::\]):", "//localhost:", about["http"]), token  # listens on all


def warn_of_variables() -> None:
    """Warn of variables with our prefix that nothing reads, if one is near."""
    from ..base.config import misspelt_variables

    for text in misspelt_variables(os.environ):
        views.echo(f"Warning: {text}", err=True)


def check_folder(option: str, path: Path) -> None:
    """Raise InvalidInput before a long run if the folder of its output is not writable."""
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"{option} {path}: not a writable folder")


def checked_plot(path: Path) -> str:
    """Return the path of a plot, checked before a long run; without a suffix it becomes a PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("--plot needs matplotlib", hint="pip install 'pipeswitch[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    path = path if path.suffix else path.with_suffix(".png")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise InvalidInput(f"--plot {path}: the name ends in .{', .'.join(sorted(formats))}")
    check_folder("--plot", path)
    return str(path)


def suffixed(path: str, suffix: str) -> str:
    """Return the path of an output file, with the suffix of its format if it has none."""
    if (own := Path(path).suffix.lower()) not in ("", suffix):
        raise InvalidInput(f"{path}: the name ends in {suffix}", hint=path + suffix)
    return path if own or path.startswith("/dev/") else path + suffix


def _names_of(verb: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a shell completion of the names in a listing; without a server there are none."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        from ..client.client import Client

        flags = ctx.find_root().params
        host = flags.get("host")
        keys: Any = {name: flags.get(name) for name in ("key", "server_key")}
        try:
            with Client(full_address(host) if host else None, timeout_s=0.5, **keys) as client:
                rows = getattr(client, verb)()
        except PipeSwitchError:
            return []
        return [row["name"] for row in rows if row["name"].startswith(incomplete)]

    return complete


complete_models = _names_of("models")
name_argument = click.argument("name", shell_complete=complete_models)
names_argument = click.argument("names", nargs=-1, shell_complete=complete_models)
job_argument = click.argument("name", shell_complete=_names_of("jobs"))


def listing(
    fetch: Callable[[Any], Any], render: Callable[[Any], Any], as_json: bool, watch: bool
) -> None:
    """Print rows as JSON or as a table; with ``watch``, refresh the table."""
    with connected() as client:
        if as_json:
            views.print_json(fetch(client))
        else:
            views.show(lambda: render(printed(fetch(client))), watch=watch)


def print_done(row: Any, text: str, as_json: bool) -> None:
    """Print the row as JSON, or else the text."""
    if as_json:
        views.print_json(row)
    else:
        views.echo(text)


def part(module: str, name: str) -> Any:
    """Import a module that few commands need, and return its function ``name``."""
    return getattr(importlib.import_module(module), name)


def milliseconds(option: str, text: str) -> float:
    """Return an option's time in milliseconds; raise BadParameter if it is not a time."""
    from ..base.units import parse_ms

    try:
        return parse_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def size_option(option: str, text: str | None) -> int | None:
    """Return an option's size in bytes (at least 1), or None; raise BadParameter if it is wrong."""
    from ..base.units import parse_size

    try:
        if text is None or (size_bytes := parse_size(text)):
            return None if text is None else size_bytes
        raise ValueError(f"{text!r} is nothing")
    except ValueError as error:
        raise click.BadParameter(f"{error}; as in 2GiB", param_hint=option) from None
