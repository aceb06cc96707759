"""What tells one rival from another; without torch, so that the coordinator stays light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Style:
    """How a request is served.

    ``transfer``: in groups while it computes; the whole model, then compute; or tensor by
    tensor into memory allocated for each, which is what ``.to(device)`` does.
    ``workers``: a standby is ready; the process that trained also infers; or a new process is
    forked for the request while the old one stops (PipeSwitch's figure 9).
    """

    name: str
    transfer: Literal["groups", "whole", "tensors"] = "groups"
    workers: Literal["standby", "one", "new"] = "standby"
