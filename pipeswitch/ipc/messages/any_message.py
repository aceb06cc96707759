"""The union of all messages, which a channel decodes."""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

from . import base, builder, daemon, fork_server, gateway, processor, worker

TYPES: Final = [
    one
    for module in (base, builder, daemon, fork_server, gateway, processor, worker)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, base.Message) and one is not base.Message
]
AnyMessage: Final[Any] = functools.reduce(operator.or_, TYPES)
