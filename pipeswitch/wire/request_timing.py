"""The timing: where a request's time went. The scheduler writes it, all others read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec

# Fields that are left out when they are empty, and are no column of ``infer``.
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
    """Place and form in which a run was computed."""

    worker: int = -1
    op_id: int = 0
    device: str = ""  # of a server with several
    placed: str = ""  # why there
    precision: str = ""  # of the model, if it is not exact


class RequestTiming(Computed, frozen=True, kw_only=True):
    """Timing of a request in ms. Each request of a batched run gets the whole run's times.

    For a chain or a generation, the times, ``resident_bytes`` and ``streamed`` are the sums of its
    steps or runs; ``resident`` says whether all were resident, ``preempted`` names the first job
    that stepped aside, and the rest is the last one's.
    """

    queue_ms: Annotated[float, "Requests that wait for the device"] = 0.0
    preprocess_ms: Annotated[
        float, "Making the model's inputs of what clients sent, beside the device"
    ] = 0.0  # of a model with a stage; in no other part but the total
    switch_ms: Annotated[float, "From the order to the model's first layer group"] = 0.0
    copy_ms: Annotated[float, "Copying the model to the device, while it computes already"] = 0.0
    stall_ms: Annotated[float, "Waiting for layer groups that had not arrived"] = 0.0
    compute_ms: Annotated[float, "Computing"] = 0.0
    postprocess_ms: Annotated[
        float, "Making the answer of the model's outputs, beside the device"
    ] = 0.0
    total_ms: Annotated[float, "In the server, from arrival to answer"] = 0.0
    resident: bool = False
    preempted: str = ""  # the job that stepped aside
    version: int = 1  # of the model
    batch: int = 1  # rows of the run, all joined requests together
    batched: int = 1  # requests that it computed
    resident_bytes: int = 0  # of what a model that streams keeps, which were not sent again
    streamed: int = 0  # bytes that came through the arena, of a model that is larger
    steps: dict[str, RequestTiming] = {}  # of a chain: each step's own, by its name

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as ``--json`` shows them; rare ones only if they are set."""
        fields = msgspec.structs.asdict(self)
        if self.steps:
            fields["steps"] = {name: timing.as_dict() for name, timing in self.steps.items()}
        return {name: value for name, value in fields.items() if value or name not in OPTIONAL}


PARTS: Final[Mapping[str, str]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RequestTiming, include_extras=True).items()
    if name.endswith("_ms")
}
"""Those of a request's time, and what is done meanwhile."""


def of_steps(timings: Mapping[str, RequestTiming]) -> RequestTiming:
    """Return the timing of a chain, from those of its steps in order."""
    return msgspec.structs.replace(_sum([*timings.values()]), steps=dict(timings))


def of_runs(before: RequestTiming, last: RequestTiming) -> RequestTiming:
    """Return the timing of a generation, whose last run knows the total time."""
    return msgspec.structs.replace(_sum([before, last]), total_ms=last.total_ms)


def _sum(parts: Sequence[RequestTiming]) -> RequestTiming:
    summed = (*PARTS, "resident_bytes", "streamed")
    sums = {name: sum(getattr(one, name) for one in parts) for name in summed}
    preempted = next((one.preempted for one in parts if one.preempted), "")
    is_resident = all(one.resident for one in parts)
    return msgspec.structs.replace(parts[-1], **sums, resident=is_resident, preempted=preempted)
