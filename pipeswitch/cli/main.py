"""The command line. It never imports torch; a child process runs what needs torch."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import click

from ..base.errors import PipeSwitchError, to_wire
from ..base.extras import COMMANDS
from ..wire.addresses import full_address
from . import infer, jobs, local_verbs, models, server, views
from .common import EXIT_INTERRUPTED, EXIT_OK, Group

GROUPS: Final[Mapping[str, str]] = {
    "Serve": "serve stop ping doctor config",
    "Models": "register unregister models show load unload infer chain run chat generate sequences",
    "Jobs": "train jobs",
    "Inspect": "ps top stats trace ui",
    "Plan": "profile plan simulate",
    "Cluster": "cluster keys",
}


class Cli(Group):
    """Group that shows every PipeSwitchError as ``Error: text`` with a hint, and no traceback."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names, groups = self.list_commands(ctx), {k: v.split() for k, v in GROUPS.items()}
        more = {*names}.difference(*groups.values())
        for title, group in {**groups, "More": sorted(more)}.items():
            self.write_rows(ctx, formatter, title, [name for name in group if name in names])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *COMMANDS.names()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in COMMANDS.names():
            command = COMMANDS.load(cmd_name)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _open_standard_streams()
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # its encoding may lack a character
                stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False})
        except PipeSwitchError as error:
            _die(error, as_json="--json" in (kwargs.get("args") or sys.argv))
        except click.ClickException as error:
            own = [name for one in self.params if one.expose_value for name in one.opts]
            if isinstance(error, click.NoSuchOption) and error.ctx and error.option_name in own:
                usage = f"{error.option_name} ... {error.ctx.command_path.partition(' ')[2]}"
                text = f"{error.option_name} goes before the command: pipeswitch {usage}"
                error = click.UsageError(text, error.ctx)
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            if error.filename is None and error.errno != errno.ENOSPC:
                raise  # no file that the user has named: a bug here
            where = f"{error.filename}: " if error.filename is not None else ""
            _die(PipeSwitchError(f"{where}{error.strerror}"), as_json=False)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else EXIT_OK)


def _open_standard_streams() -> None:
    """Open /dev/null for each closed stream (``>&-``), so that no other file gets its text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _die(error: PipeSwitchError, *, as_json: bool) -> NoReturn:
    if as_json:
        fields = to_wire(error)
        views.print_json({"error": {key: fields[key] for key in ("type", "message", "hint")}})
        sys.exit(error.exit_code)
    views.echo(f"Error: {error.message}", err=True)
    if error.hint:
        views.echo(f"hint:  {error.hint}", err=True)
    sys.exit(error.exit_code)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"pipeswitch {__version__}")
        ctx.exit()


@click.group(
    cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
@click.option("--host", metavar="ADDRESS", help="Server to connect to (default: $PIPESWITCH_HOST).")
@click.option(
    "--key", type=click.Path(), help="This client's .key_secret (default: $PIPESWITCH_KEY)."
)
@click.option("--server-key", help="The server's public key (default: $PIPESWITCH_SERVER_KEY).")
@click.pass_context
def main(ctx: click.Context, host: str | None, key: str | None, server_key: str | None) -> None:
    """One GPU, many models, and a training job that uses the GPU between requests."""
    ctx.obj = {
        "address": full_address(host) if host else None,
        "key": key,
        "server_key": server_key,
    }


VERBS = (
    server.serve,
    server.stop,
    server.ps,
    server.stats,
    server.top,
    server.ping,
    server.trace,
    models.register,
    models.unregister,
    models.load,
    models.unload,
    models.models,
    models.show,
    infer.infer,
    models.sequences,
    jobs.train,
    jobs.jobs,
    local_verbs.doctor,
    local_verbs.config,
    local_verbs.completion,
    local_verbs.backup,
    local_verbs.restore,
)
for verb in VERBS:
    main.add_command(verb)
