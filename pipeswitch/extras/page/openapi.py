"""OpenAPI 3.1 description of ``/api``, generated from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ...base.roles import Role
from ...gateway.routes import Route

REFUSAL: Final = "#/components/responses/Refusal"
SCHEMAS: Final = "#/components/schemas/{name}"


def document(routes: Iterable[Route], *, prefix: str, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the routes.

    Args:
        prefix: part of each path that no identifier repeats.
        version: version of PipeSwitch.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {
        "Refusal": {
            "type": "object",
            "required": ["error", "code", "hint"],
            "properties": {name: {"type": "string"} for name in ("error", "code", "hint", "limit")},
        }
    }
    for route in routes:
        operation = _operation(route, route.path.removeprefix(prefix), schemas)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "PipeSwitch", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                "Refusal": {
                    "description": "Reason and hint",
                    "content": _content({"$ref": SCHEMAS.format(name="Refusal")}),
                }
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    words = re.sub(r"[^a-z]+", "_", path.lower()).strip("_")
    is_json = route.gives == "application/json"
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{words}",
        "summary": route.what,
        "description": f'Needs the role "{route.role}".',
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.names
            ),
            *(
                {"name": name, "in": "query", "description": text, "schema": {"type": kind}}
                for name, (kind, text) in (route.query or {}).items()
            ),
        ],
        "responses": {
            "200": {
                "description": "Done",
                "content": _content({"type": "object" if is_json else "string"}, route.gives),
            },
            "default": {"$ref": REFUSAL},
        },
        "security": [{}, {"token": []}] if route.role is Role.INFER else [{"token": []}],
    }
    if route.takes:
        content: dict[str, Any] = {}
        for kind, body_type in route.takes.items():
            content |= _content(_schema(body_type, schemas), kind)
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _schema(kind: Any, schemas: dict[str, Any]) -> Any:
    """Return a struct's schema, and add it to ``schemas``; return other values unchanged."""
    if not isinstance(kind, type):
        return kind
    (schema,), more = msgspec.json.schema_components([kind], ref_template=SCHEMAS)
    schemas |= more
    return schema


def _content(schema: Any, kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}
