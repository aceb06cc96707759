"""Bearer tokens of HTTP and gRPC callers: a file of lines ``NAME TOKEN ROLE,ROLE``."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from ..base.errors import ConfigError, InvalidInput
from ..base.plain_files import open_regular, read_plain
from ..base.roles import Principal, parse_roles
from ..base.settings import NAME_PATTERN
from .private import check_private, check_secret

MAX_TOKENS_BYTES: Final = 16 << 20
MIN_TOKEN: Final = 16  # characters: fewer can be guessed
EXAMPLE: Final = "NAME TOKEN ROLE,ROLE"
OWNER_FILE: Final = "owner.token"  # in the state directory


def owner_token(path: Path) -> str:
    """Return the owner's token, which has all rights; create its file if it is missing.

    Raises:
        ConfigError: others may read the file, or it has no token.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(f"{secrets.token_urlsafe(24)}\n")
        check_private(path, "[server] state_dir", stat.S_IFREG)
        token = read_plain(path, MAX_TOKENS_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{path} has no token", hint="remove it, and the server creates a new one"
        )
    return token


def read_tokens(path: Path) -> dict[str, Principal]:
    """Read a file of lines ``NAME TOKEN ROLE,ROLE``, which only its owner may read.

    Raises:
        ConfigError: a line is invalid, the file has no token, or others may read it.
    """
    try:
        check_secret(path)
        with open(path, encoding="utf-8", opener=open_regular) as file:  # it may be a link
            lines = file.read(MAX_TOKENS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"tokens {path}: {why}", hint=f"lines of {EXAMPLE}") from None
    principals: dict[str, Principal] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if words:
            token, principal = _token_of(words, f"{path}:{number}")
            if token in principals:
                raise ConfigError(f"{path}:{number}: this token appears twice")
            principals[token] = principal
    if not principals:
        raise ConfigError(f"{path} has no token", hint=f"lines of {EXAMPLE}")
    return principals


def _token_of(words: list[str], where: str) -> tuple[str, Principal]:
    if len(words) not in (2, 3) or not re.fullmatch(NAME_PATTERN, words[0]):
        raise ConfigError(f"{where}: not of the form {EXAMPLE}")
    name, token = words[:2]
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{where}: a token of {len(token)} characters can be guessed",
            hint=f"at least {MIN_TOKEN}: openssl rand -hex 24",
        )
    try:
        roles = parse_roles(words[2].split(",") if len(words) == 3 else ())
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from None
    return token, Principal(tenant=name, roles=roles)
