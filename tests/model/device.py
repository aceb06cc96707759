"""The simulated device's memory as a state."""

from __future__ import annotations

from typing import Any

from pipeswitch.simulator.device import Device, Held, Image, Span, region_of

from .channel import freeze_items, thaw_items
from .frozen import Add, Next


def freeze_device(device: Device, e: Add) -> Any:
    e(-device.turn)
    words = sorted(device.words.items())
    for _, op_id in words:
        e(op_id)
    held = device.contents.values()
    e(device.computed[0])
    stops = sorted(device.stop_words.items())
    for _, op_id in stops:
        e(op_id)
    return (
        tuple([slot for slot, _ in stops]),
        device.computed[1],
        tuple([word for word, _ in words]),
        freeze_items([one.order for one in held], e),
        tuple(
            [
                (one.done, one.order.model in device.intact, one.order.op_id in device.cancelled)
                for one in held
            ]
        ),
        tuple([(at, tuple(image)) for at, image in sorted(device.slices.items())]),
        tuple([tuple(span) for span in sorted(device.dirty)]),
    )


def thaw_device(frozen: Any, n: Next) -> Device:
    stops, computed, words, orders, details, slices, dirty = frozen
    device = Device()
    device.turn = n()
    device.words = {word: n() for word in words}  # type: ignore[misc]
    device.computed = (n(), computed)
    device.stop_words = {slot: n() for slot in stops}  # type: ignore[misc]
    for order, (done, is_intact, is_cancelled) in zip(thaw_items(orders, n), details, strict=True):
        device.contents[order.model] = Held(order, done)
        if is_intact:
            device.intact[order.model] = region_of(order)
        if is_cancelled:
            device.cancelled |= {order.op_id}
    device.slices = {at: Image(*image) for at, image in slices}
    device.dirty = tuple([Span(*span) for span in dirty])
    return device


__all__ = ["freeze_device", "thaw_device"]
