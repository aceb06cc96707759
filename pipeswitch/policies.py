"""Lookup of a scheduling policy by name: built in, installed, or in a module of the user."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import FrameType
from typing import Final

from .base.config import POLICY_GROUP
from .base.errors import ConfigError
from .scheduler.policies import MAKERS, Maker, Policy
from .scheduler.policies.guard import FAILURES, PolicyGuard, described, settings_of

HINT = (
    "docs/scheduling.md shows one, called with max_wait_ms; it must be in the current folder "
    "or on PYTHONPATH"
)


def find_policy(name: str, *, max_wait_ms: float) -> Policy:
    """Return a new policy object, for one server or one simulated server.

    Args:
        name: a built-in policy, an entry point of ``pipeswitch.policies``, or ``module:name``.

    Raises:
        ConfigError: the policy cannot be imported or created, or is not a ``Policy``.
    """
    try:
        policy = _maker(name)(max_wait_ms=max_wait_ms)
        if isinstance(policy, Policy):
            settings_of(policy)
    except FAILURES as error:
        raise ConfigError(f'policy "{name}": {described(error)}', hint=HINT) from error
    if not isinstance(policy, Policy):
        kind = type(policy).__name__
        raise ConfigError(f'policy "{name}" returned a {kind}, not a Policy', hint=HINT)
    return policy


def _maker(name: str) -> Maker:
    if name in MAKERS:
        return MAKERS[name]
    module, separator, attribute = name.partition(":")
    if separator:
        maker: Maker = getattr(importlib.import_module(module), attribute)
        return maker
    (point,) = metadata.entry_points(group=POLICY_GROUP, name=name)
    loaded: Maker = point.load()
    return loaded


CALLS: Final = {
    getattr(PolicyGuard, name).__code__: name
    for name in ("key", "rank", "stays_until_ms", "may_backfill", "arrange", "cost")
}


def policy_call(frame: FrameType | None) -> tuple[FrameType, str] | None:
    """Return the policy call that a thread has not finished, with a text that names it, or None."""
    while frame is not None:
        if frame.f_code in CALLS:
            name = frame.f_locals["self"].name
            return frame, f'policy "{name}" has not returned from {CALLS[frame.f_code]}'
        if frame.f_code is find_policy.__code__:
            return frame, f'policy "{frame.f_locals["name"]}" is being built'
        frame = frame.f_back
    return None
