"""Choice of a device for a request. Pure: takes summaries, returns a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

Reason = Literal["resident", "free", "shortest"]


class Place(NamedTuple):
    """A device as one request sees it; times are predicted, in milliseconds."""

    device: int
    is_resident: bool  # the request's model is on the device, or is being copied
    is_busy: bool  # a request computes or waits there
    waiting: int  # number of unfinished requests
    queue_ms: float  # time until these are finished; 0: there are none, or no measurement yet
    switch_ms: float  # time to copy the model; 0: it is there, or no measurement yet
    free_bytes: int
    size_bytes: int  # size of the model

    @property
    def finish_ms(self) -> float:
        """Predicted start of the request's run, in ms; an eviction counts as a second switch."""
        has_room = self.size_bytes <= self.free_bytes
        return self.queue_ms + self.switch_ms * (1 if has_room else 2)

    @property
    def reason(self) -> Reason:
        """Main reason to choose the place."""
        if self.is_resident:
            return "resident"
        return "shortest" if self.is_busy else "free"


Rank = Callable[[Place], tuple[float, ...]]


def _least_finish(place: Place) -> tuple[float, ...]:
    """Rank a place by the predicted start. Ties go to a device with the model, then to a free one.
    Further ties go to the shortest queue, then to the most room."""
    order = 2 * (not place.is_resident) + place.is_busy
    return (place.finish_ms, order, place.waiting, -place.free_bytes, place.device)


def _spread(place: Place) -> tuple[float, ...]:
    """Rank a place so that each device gets the same number of requests."""
    return (place.waiting, not place.is_resident, -place.free_bytes, place.device)


def _pack(place: Place) -> tuple[float, ...]:
    """Rank a place so that few devices are used; the others stay idle for training."""
    has_room = place.is_resident or place.size_bytes <= place.free_bytes
    return (not place.is_resident, not has_room, place.device)


PLACEMENTS: Final[dict[str, Rank]] = {
    "least-finish": _least_finish,
    "spread": _spread,
    "pack": _pack,
}
