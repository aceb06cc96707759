"""Door of the page: its files, and ``/api``."""

from __future__ import annotations

from ...gateway.doors import DoorContext
from ...gateway.routes import Door
from .api import PREFIX, Api
from .event_stream import EventLog
from .ui import page_files


def page_door(context: DoorContext) -> Door:
    """Return the door; the page needs no token, its data does."""
    api = Api(
        context.upstream, EventLog(), version=context.service.version, allow_code=context.allow_code
    )
    hint = "GET /api/openapi.json lists the paths of /api; /ui is the web page"
    return Door(prefix=PREFIX, hint=hint, routes=api.routes, files=page_files())
