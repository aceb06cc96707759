"""Hooks of the documentation site: what pages written for a repository need in a site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """List the decisions, which are many, in the navigation."""
    decisions = [f"adr/{path.name}" for path in sorted((DOCS / "adr").glob("*.md"))]
    config["nav"][-1] = {"Decisions": decisions}
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links that leave ``docs/`` into plain paths, which the site does not have.

    Raises:
        FileNotFoundError: if the repository has no such file.
    """
    folder = (DOCS / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        target = target.resolve(strict=True).relative_to(DOCS.parent)
        return link[1] if f"`{target.name}`" in link[1] else f"{link[1]} (`{target}`)"

    return LINK.sub(shown, markdown)
