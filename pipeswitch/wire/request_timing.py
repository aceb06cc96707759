"""Timing of a request. Only the scheduler writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec

# Fields that are omitted if they are empty, and that are not columns of ``infer``.
OPTIONAL: Final = (
    "preprocess_ms",
    "postprocess_ms",
    "resident_bytes",
    "streamed",
    "device",
    "placed",
    "precision",
    "steps",
)


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """Worker, device and precision with which a run was computed."""

    worker: int = -1
    op_id: int = 0
    device: str = ""  # empty if the server has only one
    placed: str = ""  # why this device was chosen
    precision: str = ""  # the model's precision if it is not exact


class RequestTiming(Computed, frozen=True, kw_only=True):
    """Timing of a request in ms. Each request of a batched run gets the whole run's times.

    For a chain or several runs, the times, ``resident_bytes`` and ``streamed`` are sums over its
    steps or runs. ``resident`` is True if all were resident, ``preempted`` names the first job that
    was preempted, and other fields have the values of the last step or run.
    """

    queue_ms: Annotated[float, "Requests that wait for the device"] = 0.0
    preprocess_ms: Annotated[
        float, "Making the model's inputs of what clients sent, beside the device"
    ] = 0.0  # only for models with a stage; also included in ``total_ms``
    switch_ms: Annotated[float, "From the end of that wait to the model's first layer group"] = 0.0
    copy_ms: Annotated[float, "Copying the model to the device, while it computes already"] = 0.0
    stall_ms: Annotated[float, "Waiting for layer groups that had not arrived"] = 0.0
    compute_ms: Annotated[float, "Computing"] = 0.0
    postprocess_ms: Annotated[
        float, "Making the answer of the model's outputs, beside the device"
    ] = 0.0
    total_ms: Annotated[float, "In the server, from arrival to answer"] = 0.0
    resident: bool = False
    preempted: str = ""  # the job that was preempted
    version: int = 1  # version of the model
    batch: int = 1  # rows of the run, summed over its batched requests
    batched: int = 1  # requests in the run
    resident_bytes: int = 0  # bytes that were on the device and not copied, so were not copied
    streamed: int = 0  # bytes copied by a model that is larger than the arena
    steps: dict[str, RequestTiming] = {}  # for a chain: each step's timing by name

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as ``--json`` shows them; ``OPTIONAL`` ones only if they are set."""
        fields = msgspec.structs.asdict(self)
        if self.steps:
            fields["steps"] = {name: timing.as_dict() for name, timing in self.steps.items()}
        return {name: value for name, value in fields.items() if value or name not in OPTIONAL}


PARTS: Final[Mapping[str, str]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RequestTiming, include_extras=True).items()
    if name.endswith("_ms")
}
"""Names of the timing's fields in ms, each with a description of what happens in this time."""


def of_steps(timings: Mapping[str, RequestTiming]) -> RequestTiming:
    """Return the timing of a chain from the timings of its steps, which are in order."""
    return msgspec.structs.replace(_sum([*timings.values()]), steps=dict(timings))


def of_runs(before: RequestTiming, last: RequestTiming) -> RequestTiming:
    """Return the timing of several runs; ``last.total_ms`` counts from the first one's start."""
    return msgspec.structs.replace(_sum([before, last]), total_ms=last.total_ms)


def _sum(parts: Sequence[RequestTiming]) -> RequestTiming:
    summed = (*PARTS, "resident_bytes", "streamed")
    sums = {name: sum(getattr(one, name) for one in parts) for name in summed}
    preempted = next((one.preempted for one in parts if one.preempted), "")
    is_resident = all(one.resident for one in parts)
    return msgspec.structs.replace(parts[-1], **sums, resident=is_resident, preempted=preempted)
