"""``pipeswitch ui``."""

from __future__ import annotations

from pathlib import Path

import click

from ...cli.common import connected, json_option, print_done
from .browser import open_page, page_url


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
