"""``pipeswitch ui``: the page's address with the owner's token, and a browser that opens it."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from ...cli.common import connected, http_of, json_option, print_done

OPENER: Final = "ui.html"  # file in the state directory, next to the token's file
LEADS_ON: Final = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>PipeSwitch</title><p>This leads to the page of a PipeSwitch server.</p>
"""


def page_url(about: Mapping[str, Any]) -> str:
    """Return the page's URL; the token is its fragment, which browsers do not send."""
    here, token = http_of(about, "page", "ui")
    return f"{here}/ui#token={token}"


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


@click.command()
@click.option("--no-open", is_flag=True, help="Do not start a browser.")
@json_option
def ui(no_open: bool, as_json: bool) -> None:
    """Open the server's web page in a browser, with the owner's token."""
    with connected() as client:
        about = client.about()
    url = page_url(about)
    is_open = not no_open and open_page(url, Path(about["token_file"]).parent)
    print_done(
        {"url": url, "opened": is_open}, f"opened {about['http']}/ui" if is_open else url, as_json
    )
