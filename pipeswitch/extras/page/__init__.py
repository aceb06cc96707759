"""Web page of the server, and the HTTP interface that it uses: ``/ui`` and ``/api``."""

COMMANDS = {"ui": "browser:ui"}
DOORS = {"page": "api:page_door"}
