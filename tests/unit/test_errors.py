"""``pipeswitch.errors`` is the public name of ``pipeswitch.base.errors``."""

from __future__ import annotations

import pipeswitch
import pipeswitch.errors
from pipeswitch.base import errors


def test_the_public_module_has_the_very_same_classes() -> None:
    classes = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
    own = {name for name, one in classes.items() if issubclass(one, errors.PipeSwitchError)}
    assert own
    assert all(getattr(pipeswitch.errors, name) is classes[name] for name in own)
    assert pipeswitch.QueueFull is pipeswitch.errors.QueueFull
