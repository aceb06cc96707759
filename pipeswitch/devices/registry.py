"""The kinds of device by name; the only module where a device's name selects the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, cast

from ..base.config import DeviceConfig
from ..base.errors import ConfigError
from . import ChosenDevice, DeviceKind

FALLBACK: Final = "cpu"  # used for "auto" if cuda is not available; every machine has a cpu


def kind_of(name: str) -> DeviceKind:
    """Return the kind of a device: ``KIND`` in ``kind.py`` of the folder with its name.

    Args:
        name: a configured name, or ``DeviceKind.opened``.
    """
    module = import_module(f".{name.partition(':')[0]}.kind", __package__)
    return cast("DeviceKind", module.KIND)


def choose_devices(
    config: DeviceConfig, *, workers: int, available_bytes: int
) -> tuple[ChosenDevice, ...]:
    """Examine and return the requested devices in order; for "auto" the first available kind.

    Raises:
        ConfigError: a requested device cannot be used (see ``DeviceKind.choose``).
    """
    names = ["cuda"] if config.name == "auto" else config.names
    try:
        return tuple(
            kind_of(name).choose(config, name, workers=workers, available_bytes=available_bytes)
            for name in names
        )
    except ConfigError as error:
        if config.name != "auto":
            raise
        chosen = kind_of(FALLBACK).choose(
            config, FALLBACK, workers=workers, available_bytes=available_bytes
        )
        return (replace(chosen, why=f"not cuda: {error.message}"),)


def facts_of(devices: Sequence[ChosenDevice]) -> Mapping[str, Any]:
    """Return facts about the devices for ``stats``; equal values are shown once."""
    facts = {
        "device": ",".join(device.name for device in devices),
        "device_reason": "; ".join(dict.fromkeys(device.why for device in devices)),
    }
    gpus = [device for device in devices if device.title]
    if not gpus:
        return facts
    return {
        **facts,
        "gpu": ", ".join(device.title for device in gpus),
        "gpu_uuid": ", ".join(device.uuid for device in gpus),
        "rungs": "; ".join(dict.fromkeys(device.rungs for device in gpus)),
        "rung_reasons": list(dict.fromkeys(reason for one in gpus for reason in one.reasons)),
    }
