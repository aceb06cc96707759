"""Messages between the controller and a builder."""

from __future__ import annotations

from typing import Any

import msgspec

from .base import Message, ModelName, OpId, ResourceLimits


class BuildSettings(Message, frozen=True):
    """Settings of a builder process, which handles one registration and exits."""

    model: ModelName
    op_id: OpId
    spec: bytes  # msgpack of programs.compiler.BuildSpec
    directory: str
    limits: ResourceLimits
    disk_bytes: int = 0  # limit on written bytes; 0: no limit
    is_owners: bool = False  # downloads from a hub go to the owner's caches


class BuildProgress(Message, frozen=True):
    """builder -> controller: the current stage, and the completed fraction of the build."""

    model: ModelName
    op_id: OpId
    stage: str
    fraction: float


class BuildDone(Message, frozen=True):
    """builder -> controller: ``folder``, inside the models' folder, has a complete program."""

    model: ModelName
    op_id: OpId
    digest: str
    folder: str = ""  # empty: the program is in its final folder already


class BuildFailed(Message, frozen=True):
    """builder -> controller: the registration is refused; ``error`` is a class of errors.py."""

    model: ModelName
    op_id: OpId
    error: str
    message: str
    hint: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)
