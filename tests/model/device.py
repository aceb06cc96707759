"""Freezing and thawing of the simulated device's memory."""

from __future__ import annotations

from typing import Any

from pipeswitch.extras.lab.device import ByteSpan, Held, Image, SimulatedDevice, region_of

from .channel import freeze_items, thaw_items
from .frozen import Add, Next


def freeze_device(device: SimulatedDevice, e: Add) -> Any:
    e(-device.turn)
    fences = sorted(device.fences.items())
    for _, op_id in fences:
        e(op_id)
    contents = device.contents.values()
    e(device.computed[0])
    stops = sorted(device.stop_words.items())
    for _, op_id in stops:
        e(op_id)
    return (
        tuple([slot for slot, _ in stops]),
        device.computed[1],
        tuple([fence for fence, _ in fences]),
        freeze_items([one.order for one in contents], e),
        tuple(
            [
                (one.done, one.order.model in device.intact, one.order.op_id in device.cancelled)
                for one in contents
            ]
        ),
        tuple([(at, tuple(image)) for at, image in sorted(device.slices.items())]),
        tuple([tuple(span) for span in sorted(device.dirty)]),
        tuple(sorted(device.tensors.items())),
    )


def thaw_device(frozen: Any, n: Next) -> SimulatedDevice:
    stops, computed, fences, orders, details, slices, dirty, tensors = frozen
    device = SimulatedDevice()
    device.turn = n()
    device.fences = {fence: n() for fence in fences}  # type: ignore[misc]
    device.computed = (n(), computed)
    device.stop_words = {slot: n() for slot in stops}  # type: ignore[misc]
    for order, (done, is_intact, is_cancelled) in zip(thaw_items(orders, n), details, strict=True):
        device.contents[order.model] = Held(order, done)
        if is_intact:
            device.intact[order.model] = region_of(order)
        if is_cancelled:
            device.cancelled |= {order.op_id}
    device.slices = {at: Image(*image) for at, image in slices}
    device.tensors = dict(tensors)
    device.dirty = tuple([ByteSpan(*span) for span in dirty])
    return device


__all__ = ["freeze_device", "thaw_device"]
