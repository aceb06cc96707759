"""Public module of the errors that the SDK raises: ``except pipeswitch.errors.QueueFull``."""

from .base.errors import *  # noqa: F403
