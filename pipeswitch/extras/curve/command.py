"""Command ``pipeswitch keys``: which clients may connect to the server.

These commands only write files in the server's key folder. A running server reads the folder at
each handshake, and once a second for connected clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...base.errors import AlreadyExists, ConfigError
from ...base.roles import Role, in_order
from ...cli import views
from ...cli.common import Group, json_option, print_done
from .curve_keys import KEY_CHARACTERS, KeyFolder, make_pair, read_public

name_argument = click.argument("name")
out_option = click.option(
    "--out",
    type=click.Path(file_okay=False),
    default=".",
    show_default=True,
    help="Folder for the client's two files.",
)
roles_option = click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([role.value for role in Role]),
    help="Role besides infer: register, operate, code (repeatable).",
)


@click.group(cls=Group)
@click.option("--config", "path", type=click.Path(), help="The server's configuration file.")
@click.option("--state-dir", type=click.Path(), help="The server's state directory, as in serve.")
@click.option("--keys-dir", type=click.Path(), help="Folder of the keys (default: STATE_DIR/keys).")
@click.pass_context
def keys(ctx: click.Context, path: str | None, state_dir: str | None, keys_dir: str | None) -> None:
    """Manage the server's key and the clients that it admits.

    A client on another machine needs a key that was admitted here; a client on loopback needs one
    only with --auth keys. A change applies from the next handshake on, without a restart.
    """
    from ...base.config import load

    server = {"state_dir": state_dir, "keys_dir": keys_dir}
    config = load(path, flags={"server": server})
    ctx.obj = Path(config.server.keys_dir)


def _folder() -> KeyFolder:
    """Return the server's key folder; name it on stderr, because stdout may go to a variable."""
    folder = KeyFolder(click.get_current_context().obj).open()
    views.echo(f"key folder: {folder.path}", err=True)
    return folder


def _folder_for(out: str) -> Path:
    """Return the folder for a secret; create it, accessible only to its owner, if it is missing."""
    folder = Path(out)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@keys.command("server")
@click.option("--show", is_flag=True, help="Only print the public key.")
@json_option
def keys_server(show: bool, as_json: bool) -> None:
    """Create the server's key pair, once, and print the public key, which clients need."""
    folder = _folder()
    pair = folder.server() if show else folder.make_server()
    if pair is None:
        raise ConfigError(f"{folder.path} has no server key", hint="pipeswitch keys server")
    public = pair.public.decode()
    print_done({"server_key": public, "folder": str(folder.path)}, public, as_json)


@keys.command("client")
@name_argument
@out_option
@roles_option
@json_option
def keys_client(name: str, out: str, roles: tuple[str, ...], as_json: bool) -> None:
    """Create a key pair for a client and admit it; move NAME.key_secret to the client's machine."""
    folder = _folder()
    server = folder.server()
    if server is None:
        raise ConfigError("the server has no key yet", hint="pipeswitch keys server")
    if name in folder.clients():
        raise AlreadyExists(f"{name} is admitted already", hint=f"pipeswitch keys revoke {name}")
    secret_file, public = make_pair(name, _folder_for(out))
    folder.admit(name, public, roles)
    row: dict[str, Any] = {
        "client": name,
        "roles": _roles(folder, name),
        "key": public.decode(),
        "secret_file": str(secret_file),
        "server_key": server.public.decode(),
    }
    lines = [
        f"{name} is admitted with {', '.join(row['roles'])}. "
        f"On its machine, with {secret_file.name} there:",
        f"  export PIPESWITCH_KEY={secret_file.name}",
        f"  export PIPESWITCH_SERVER_KEY='{row['server_key']}'",
    ]
    print_done(row, "\n".join(lines), as_json)


@keys.command("pair")
@name_argument
@out_option
@json_option
def keys_pair(name: str, out: str, as_json: bool) -> None:
    """Create a key pair on the client's own machine, so that its secret never travels."""
    secret_file, public = make_pair(name, _folder_for(out))
    row = {"client": name, "key": public.decode(), "secret_file": str(secret_file)}
    lines = [
        f"wrote {secret_file}; on the server:",
        f"  pipeswitch keys admit {name} -- '{row['key']}'",  # a key may begin with a dash
    ]
    print_done(row, "\n".join(lines), as_json)


class TakesKey(click.Command):
    """Command with a KEY argument, which may begin with a dash although it is not an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        keys = [one for one in args if one.startswith("-") and len(one) == KEY_CHARACTERS]
        if keys and "--" not in args:
            args = [*(one for one in args if one not in keys), "--", *keys]
        return super().parse_args(ctx, args)


@keys.command("admit", cls=TakesKey)
@name_argument
@click.argument("key")
@roles_option
@json_option
def keys_admit(name: str, key: str, roles: tuple[str, ...], as_json: bool) -> None:
    """Admit a client by its public KEY: 40 characters, or its NAME.key file."""
    public = read_public(key)
    folder = _folder()
    folder.admit(name, public, roles)
    roles_now = _roles(folder, name)
    row = {"client": name, "key": public.decode(), "roles": roles_now}
    print_done(row, f"{name} is admitted with {', '.join(roles_now)}", as_json)


@keys.command("roles")
@name_argument
@roles_option
@json_option
def keys_roles(name: str, roles: tuple[str, ...], as_json: bool) -> None:
    """Give a client the role infer and the named roles, and remove all others.

    A connected client gets the change within two seconds.
    """
    folder = _folder()
    folder.give_roles(name, roles)
    roles_now = _roles(folder, name)
    print_done({"client": name, "roles": roles_now}, f"{name} has {', '.join(roles_now)}", as_json)


def _roles(folder: KeyFolder, name: str) -> list[str]:
    return in_order(folder.admitted()[name].roles)


@keys.command("ls")
@json_option
def keys_ls(as_json: bool) -> None:
    """List the admitted clients and their roles."""
    rows = [
        {"name": name, "key": one.key.decode(), "roles": in_order(one.roles)}
        for name, one in _folder().admitted().items()
    ]
    if as_json:
        views.print_json(rows)
    else:
        shown = [{**row, "roles": ", ".join(row["roles"])} for row in rows]
        views.console().print(views.Listing(shown, ("name", "key", "roles")))


@keys.command("revoke")
@name_argument
@json_option
def keys_revoke(name: str, as_json: bool) -> None:
    """Revoke a client's admission; its connections end within two seconds."""
    _folder().revoke(name)
    print_done({"revoked": name}, f"{name} is kept out", as_json)
