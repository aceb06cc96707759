"""Messages between the controller and a builder."""

from __future__ import annotations

from typing import Any

import msgspec

from .base import Message, ModelName, OpId


class BuildSettings(Message, frozen=True):
    """Settings of a builder process, which handles one registration and exits."""

    model: ModelName
    op_id: OpId
    spec: bytes  # msgpack of programs.build.BuildSpec
    directory: str
    threads: int
    timeout_s: float = 0.0  # 0: as long as it takes
    memory_bytes: int = 0  # beyond what a fresh child has mapped; 0: no limit
    disk_bytes: int = 0  # what may be written; 0: no limit
    task_memory_bytes: int = 0  # what a run may take for its intermediate values; 0: no limit
    is_sandboxed: bool = False  # where the program is a client's
    is_owners: bool = False  # what it fetches from a hub lands in the owner's caches
    packs_weights: bool = True  # the devices read weights in the layout of this processor's kernels


class BuildProgress(Message, frozen=True):
    """builder -> controller: stage and fraction of the whole."""

    model: ModelName
    op_id: OpId
    stage: str
    fraction: float


class BuildDone(Message, frozen=True):
    """builder -> controller: the folder, inside the models' one, holds a complete program."""

    model: ModelName
    op_id: OpId
    digest: str
    folder: str = ""  # empty: it has its place already


class BuildFailed(Message, frozen=True):
    """builder -> controller: refused; a name of errors.py, the text and its values."""

    model: ModelName
    op_id: OpId
    error: str
    message: str
    hint: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)
