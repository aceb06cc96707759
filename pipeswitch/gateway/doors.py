"""All doors of a gateway: the Open Inference Protocol's, and those of extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.extras import DOORS
from .http.offload import OffloadThread
from .rest import inference_door
from .routes import Door
from .serving.service import Service
from .serving.upstream import Upstream


@dataclass(frozen=True, kw_only=True)
class DoorContext:
    """Parts of the gateway that a door uses."""

    service: Service
    upstream: Upstream
    aside: OffloadThread
    allow_code: Sequence[str] = ()  # [server] allow_code


def open_doors(context: DoorContext) -> list[Door]:
    """Return the doors of the engine and of the installed extras."""
    extras: list[Door] = [DOORS.load(name)(context) for name in DOORS.names()]
    return [inference_door(context.service, context.aside), *extras]
