"""A factory for each model of the catalogue, such as ``tests.models.factories:odd_experts``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from .catalogue import catalogue

SEED: Final = 7


def factory_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def __getattr__(name: str) -> Callable[[], nn.Module]:
    entries = {factory_name(entry_name): entry for entry_name, entry in catalogue().items()}
    if name not in entries:
        raise AttributeError(name)

    def make() -> nn.Module:
        torch.manual_seed(SEED)
        return entries[name]()[0].eval().requires_grad_(False)

    return make
