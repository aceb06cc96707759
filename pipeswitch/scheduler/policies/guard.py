"""Guard of a policy; it checks the policy's answers before use.

After an invalid answer or an exception, ``priority`` replaces the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from operator import index
from typing import Any

from . import Policy, Resident, View, Waiting, make_policy
from .policy import SortsBy

PLAIN = (float, int)
FAILURES = BaseException  # a policy's ``sys.exit()`` or interrupt must not end the server
Failed = Callable[[str, str], None]  # called with the policy's name and the error


class PolicyGuard:
    """Guard of a policy, which may be a user's; it checks the policy's answers before use.
    It converts them to plain numbers, so that comparing them runs no code of the user.

    Attributes:
        failure_count: number of failed policies; ranks from before the last failure are invalid.
        failure: why the policy failed; empty if it has not failed.
    """

    def __init__(self, policy: Policy, max_wait_ms: float) -> None:
        self.max_wait_ms = max_wait_ms
        self._failed: Failed = lambda name, why: None
        self.failure_count, self.failure = 0, ""
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        self.aging_ms, self.window = settings_of(policy)
        self.sorts_by: SortsBy = policy.order.sorts_by
        self.ranks_runs = policy.order.ranks_runs
        self.policy = policy

    def when_failed(self, failed: Failed) -> None:
        """Set the callback that reports a policy's failure."""
        self._failed = failed

    @property
    def name(self) -> str:
        return self.policy.name

    def key(self, request: Waiting) -> tuple[float, ...]:
        try:
            return _numbers(self.policy.order.key(request))
        except FAILURES as error:
            self._replace("key", error)
            return self.key(request)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        try:
            return _numbers(self.policy.order.rank(head, view))
        except FAILURES as error:
            self._replace("rank", error)
            return self.rank(head, view)

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        try:
            return _numbers((self.policy.order.stays_until_ms(head, view),))[0]
        except FAILURES as error:
            self._replace("stays_until_ms", error)
            return self.stays_until_ms(head, view)

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        try:
            return bool(self.policy.order.may_backfill(request, blocked, view))
        except FAILURES as error:
            self._replace("may_backfill", error)
            return self.may_backfill(request, blocked, view)

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> list[int]:
        try:
            places = self.policy.order.arrange(heads, counts, view)
            order = [int(index(one)) for one in islice(places, len(heads) + 1)]
            if sorted(order) != list(range(len(heads))):
                raise ValueError(f"{order} does not contain each of the {len(heads)} heads once")
            return order
        except FAILURES as error:
            self._replace("arrange", error)
            return list(range(len(heads)))

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        try:
            cost = self.policy.eviction.cost(resident, view)
            if type(cost) is tuple and len(cost) == 1 and type(cost[0]) is float and cost[0] >= 0.0:
                return cost  # the fast path for built-in policies: each search has many costs
            cost = _numbers(cost)
            if min(cost, default=0.0) < 0.0:
                raise ValueError(f"{cost} is below 0")
            return cost
        except FAILURES as error:
            self._replace("cost", error)
            return self.cost(resident, view)

    def _replace(self, where: str, error: BaseException) -> None:
        """Replace a failed policy by ``priority``, which itself must not fail."""
        if self.failure_count:
            raise error
        self.failure_count += 1
        name, self.failure = self.policy.name, f"{where} raised {described(error)}"
        self._use(make_policy("priority", max_wait_ms=self.max_wait_ms))
        self._failed(name, self.failure)


def described(error: BaseException) -> str:
    """Return an error's type and text. The text comes from the user's code, which may fail, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except FAILURES:
        return f"{type.__repr__(type(error))}, without a text"


def settings_of(policy: Policy) -> tuple[float, int]:
    """Return the ``aging_ms`` and ``window`` of the policy's order, if they are valid.

    Raises:
        ValueError: one of them is not a valid number, or the policy's name is not a text.
    """
    name, aging_ms, window = policy.name, policy.order.aging_ms, policy.order.window
    if type(name) is not str:
        raise ValueError(f"its name is {name!r}, not a text")
    if type(window) is not int or window < 0:
        raise ValueError(f"window is {window!r}, not a whole number")
    if isinstance(aging_ms, bool) or not isinstance(aging_ms, PLAIN):
        raise ValueError(f"aging_ms is {aging_ms!r}, not a number")
    if not 0 <= (aging_ms := float(aging_ms)) <= math.inf:
        raise ValueError(f"aging_ms is {aging_ms!r}, not a number of at least 0")
    return aging_ms, window


def _numbers(values: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the values as plain numbers that can be compared.
    Raises TypeError: they are not a tuple of numbers; ValueError, OverflowError: one of them is not
    a number that can be compared or added."""
    if type(values) is not tuple:
        raise TypeError(f"{values!r} is not a tuple")
    for value in values:
        kind = type(value)
        if kind is int:
            float(value)  # raises if it is too large to be added to a float
        elif kind is not float:
            return _numbers(tuple(map(_plain, values)))
        elif value != value:
            raise ValueError("a number is nan")
    return values


def _plain(value: object) -> float | int:
    """Return a plain float or int for a value of any subclass."""
    if not isinstance(value, PLAIN):
        raise TypeError(f"{value!r} is not a number")
    return int(value) if isinstance(value, int) else float(value)
