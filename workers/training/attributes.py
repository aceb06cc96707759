"""Numbers and tensors that models, optimizers and datasets keep outside of what is committed.

A ``state_dict`` has parameters and buffers; a plain ``self.calls += 1`` is in none. What has
changed since the script made it goes along with each commit, and a life that comes to the place of
the commit with other values says so, once for each job.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from pipeswitch.job import InexactResumeWarning

MAX_NAMES: Final = 16
MAX_ELEMENTS: Final = 1 << 16  # of a tensor that is summed at each step

_Seen = tuple[dict[str, Any], str, Any, int]  # an object's fields, one's name, value and version


class Attributes:
    """What objects had when they were first seen, and which of it has changed. What begins as None
    is made by a call, and made again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def follow(self, holders: Mapping[str, object]) -> None:
        """From now on these, by the names that they are told with; what was seen before stays."""
        for path, holder in holders.items():
            fields = getattr(holder, "__dict__", {})
            for name, value in fields.items():
                known = self._seen.get(f"{path}.{name}")
                if _sum(value) is not None and (known is None or known[0] is not fields):
                    version = getattr(value, "_version", 0)
                    self._seen[f"{path}.{name}"] = fields, name, value, version

    def changed(self) -> dict[str, float]:
        """The present values of what is other than it was; a tensor's is its sum."""
        found: dict[str, float] = {}
        for path, (fields, name, value, version) in self._seen.items():
            now = fields.get(name)
            if now is value and getattr(now, "_version", 0) == version:
                continue
            number = _sum(now)
            if number is not None and len(found) < MAX_NAMES:
                found[path] = number
        return found

    def lost(self, saved: Mapping[str, float]) -> dict[str, float]:
        """What is other than ``saved``, with the present values."""
        there = {path: _sum(self._seen[path][0].get(self._seen[path][1]))
                 for path in saved if path in self._seen}  # fmt: skip
        return {
            path: now
            for path, now in there.items()
            if now is not None and repr(now) != repr(saved[path])
        }


def warn_of_lost(saved: Mapping[str, float], lost: Mapping[str, float], step: int) -> None:
    """Say what began anew at ``step``, and what to do."""
    said = ", ".join(f"{path} is {now:.6g} again (was {saved[path]:.6g})"
                     for path, now in lost.items())  # fmt: skip
    warnings.warn(
        f"this job was restarted at step {step}, and what lies in no state_dict begins anew: "
        f"{said}. In a model make it a buffer (register_buffer) or return it by get_extra_state(); "
        "in an optimizer keep it in its param_groups; what else counts, in a dict that is given "
        "as job.steps(…, extra_state=…)",
        InexactResumeWarning,
        stacklevel=6,
    )


def holders_in(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], loader: Any
) -> dict[str, object]:
    """The objects of a loop that may keep something, by name."""
    return dict(_named(models, optimizers, loader))


def _named(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Any], loader: Any
) -> Iterator[tuple[str, object]]:
    for key, model in models.items():
        yield from model.named_modules(prefix=key)
    yield from optimizers.items()
    yield "dataset", getattr(loader, "dataset", None)


def _sum(value: Any) -> float | None:
    """A number, or that of a small tensor on the host that is no step's intermediate result."""
    if type(value) in (int, float):
        return float(value) if abs(value) < 2**53 else None
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return None
    is_plain = (
        value.layout is torch.strided and value.device.type == "cpu" and not value.is_complex()
    )
    if not is_plain or value.grad_fn is not None or value.numel() > MAX_ELEMENTS:
        return None
    return float(value.sum(dtype=torch.float64))
