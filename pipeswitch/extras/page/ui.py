"""``/ui``: the files of the web page, as they are in the package (docs/adr/0027-the-page.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...gateway.http.http_server import Response

FILES: Final[Mapping[str, tuple[str, str]]] = {  # path -> the file's name and type
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/lanes.js": ("lanes.js", "text/javascript; charset=utf-8"),
    "/ui/model.js": ("model.js", "text/javascript; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a script cannot turn text into HTML
    ]
)
HEADERS: Final = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


def page_files() -> dict[str, Response]:
    """Return the page's files by path. They contain no secret: its data comes from ``/api``."""
    folder = Path(__file__).with_name("static")
    answers = {
        path: Response(parts=[(folder / name).read_bytes()], content_type=kind, headers=HEADERS)
        for path, (name, kind) in FILES.items()
    }
    answers[""] = Response(status=303, headers=(("Location", "/ui"),))  # answer to GET /
    return answers
