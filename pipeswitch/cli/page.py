"""Web page of the server: its address with the owner's token, and a browser that opens it."""

from __future__ import annotations

import os
import re
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..base.errors import PermissionDenied, PipeSwitchError

VERB: Final = {"page": "ui", "chat": "chat NAME --http URL"}
OPENER: Final = "ui.html"  # file in the state directory, next to the token's file
LEADS_ON: Final = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>PipeSwitch</title><p>This leads to the page of a PipeSwitch server.</p>
"""


def page_url(about: Mapping[str, Any]) -> str:
    """Return the page's URL; the token is its fragment, which browsers do not send.

    Raises: like ``http_of``.
    """
    here, token = http_of(about, "page")
    return f"{here}/ui#token={token}"


def http_of(about: Mapping[str, Any], what: str) -> tuple[str, str]:
    """Return the server's HTTP address and its owner's token.

    Args:
        about: the server's answer to ``Client.about``.
        what: name of the caller's purpose, for errors.

    Raises:
        PermissionDenied: the client is not the server's owner.
        PipeSwitchError: the server has no HTTP address, or the token's file cannot be read here.
    """
    if not about["is_owner"]:
        raise PermissionDenied(
            f"the {what}'s token is only for the server's owner",
            hint=f"on the server's machine, as its user, without --host: pipeswitch {VERB[what]}",
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


def open_page(url: str, folder: Path) -> bool:
    """Open the page in a browser; return False if there is no browser.

    All users can read a browser's command line. So it gets the path of a file that only the owner
    can read, which redirects to the URL with the token.
    """
    path = folder / OPENER
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(LEADS_ON.format(url=url))
    try:
        return webbrowser.open(path.as_uri())
    except webbrowser.Error:
        return False
