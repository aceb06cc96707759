"""The policy's answers, and those of ``priority`` from the moment a policy fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index

from .policies import Order, Policy, Resident, View, Waiting, make_policy

NUMBERS = (float, int)
FAILURES = (Exception, SystemExit)  # of a policy; its ``sys.exit()`` does not end the server
Failed = Callable[[str, str], None]  # told the policy's name and what happened


class Judge:
    """Asks a policy that may be a user's; what it answers is checked before it is believed.

    Attributes:
        generation: how many policies failed; what an earlier one ranked is void.
    """

    def __init__(self, policy: Policy, max_wait_ms: float) -> None:
        self._max_wait_ms = max_wait_ms
        self._failed: Failed = lambda name, why: None
        self.generation = 0
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        self.patience_ms, self.window = settings_of(policy.order)
        self.policy = policy

    def when_failed(self, failed: Failed) -> None:
        """Whom to tell."""
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

    def may_overtake(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        try:
            return bool(self.policy.order.may_overtake(request, blocked, view))
        except FAILURES as error:
            self._replace("may_overtake", error)
            return self.may_overtake(request, blocked, view)

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> list[int]:
        try:
            order = [index(one) for one in self.policy.order.arrange(heads, counts, view)]
            if sorted(order) != list(range(len(heads))):
                raise ValueError(f"{order} are not the {len(heads)} heads, each once")
            return order
        except FAILURES as error:
            self._replace("arrange", error)
            return list(range(len(heads)))

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        try:
            cost = _numbers(self.policy.eviction.cost(resident, view))
            if min(cost, default=0.0) < 0.0:
                raise ValueError(f"{cost} is below 0")
            return cost
        except FAILURES as error:
            self._replace("cost", error)
            return self.cost(resident, view)

    def _replace(self, where: str, error: BaseException) -> None:
        """Once for each policy; ``priority`` itself must not fail."""
        if self.generation:
            raise error
        self.generation += 1
        name = self.policy.name
        self._use(make_policy("priority", max_wait_ms=self._max_wait_ms))
        self._failed(name, f"{where} raised {type(error).__name__}: {error}")


def settings_of(order: Order) -> tuple[float, int]:
    """Its ``patience_ms`` and ``window``, if they can be used.

    Raises:
        ValueError: one of them is no number that it may be.
    """
    patience_ms, window = order.patience_ms, order.window
    if type(window) is not int or window < 0:
        raise ValueError(f"window is {window!r}, no whole number of lines")
    if isinstance(patience_ms, bool) or not isinstance(patience_ms, (float, int)):
        raise ValueError(f"patience_ms is {patience_ms!r}, no number of milliseconds")
    if not 0 <= patience_ms <= math.inf:
        raise ValueError(f"patience_ms is {patience_ms!r}, no number from 0 on")
    return float(patience_ms), window


def _numbers(values: tuple[float, ...]) -> tuple[float, ...]:
    """As they are, if they can be compared.

    Raises:
        TypeError: they are no tuple of numbers.
        ValueError, OverflowError: one of them is not a number to compare, or to add.
    """
    if type(values) is not tuple:
        raise TypeError(f"{values!r} is no tuple")
    for value in values:
        if type(value) is not float:
            if not isinstance(value, NUMBERS):
                raise TypeError(f"{value!r} is no number")
            float(value)  # else it could not be added to one
        if value != value:
            raise ValueError("a number is nan")
    return values
