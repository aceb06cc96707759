"""The queue of requests: order, counts, deadlines, and the times at which it must wake up."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import math

from pipeswitch.scheduler.state.core import DUE, HUNG, Wakeups
from pipeswitch.scheduler.state.queue import SPARE_DEADLINES, Queue
from pipeswitch.scheduler.state.records import Request
from tests.unit.arrivals import request_of


def request(token: int, model: str = "m", deadline_at_ms: float | None = None) -> Request:
    return request_of(token, model, deadline_at_ms=deadline_at_ms)


def tokens(requests: object) -> list[int]:
    return [one.token for one in requests]  # type: ignore[attr-defined]


def test_requests_keep_their_order_and_are_counted_by_model() -> None:
    queue = Queue()
    first, second, third = request(1, "a"), request(2, "b"), request(3, "a")
    for one in (first, second, third):
        queue.add(one)
    queue.discard(first)
    queue.discard(first)  # has no effect, because the request does not wait
    queue.add(first)  # queues it again, as after its worker's death
    queue.check()
    assert tokens(queue) == [2, 3, 1]
    assert (tokens(queue.of("a")), queue.count("a"), queue.count("b")) == ([3, 1], 2, 1)
    queue.discard(second)
    assert (queue.models(), queue.count("b"), queue.get(2), len(queue)) == (["a"], 0, None, 2)


def test_deadlines_that_pass_together_are_told_in_the_order_of_the_queue() -> None:
    queue = Queue()
    for one in (request(1, deadline_at_ms=9.0), request(2), request(3, deadline_at_ms=5.0)):
        queue.add(one)
    assert queue.expired(4.9) == []
    assert tokens(queue.expired(9.0)) == [1, 3]
    assert queue.expired(9.0) == []


def test_a_request_that_is_queued_again_after_its_deadline_expires() -> None:
    queue, late = Queue(), request(1, deadline_at_ms=5.0)
    queue.add(late)
    queue.discard(late)
    assert queue.expired(6.0) == []  # a request that computes is not in the queue
    queue.add(late)
    assert tokens(queue.expired(6.0)) == [1]


def test_deadlines_of_requests_that_have_left_are_not_kept_for_ever() -> None:
    queue = Queue()
    for token in range(10 * SPARE_DEADLINES):
        one = request(token, deadline_at_ms=1e9)
        queue.add(one)
        queue.discard(one)
    assert len(queue._deadlines) <= SPARE_DEADLINES + 1


def test_an_instant_is_asked_for_once_for_each_thing_and_forgotten_when_it_has_come() -> None:
    wakeups = Wakeups(((7.0, DUE),))
    for at_ms, bits in ((5.0, DUE), (3.0, HUNG), (5.0, DUE), (7.0, DUE)):
        wakeups.add(at_ms, bits)
    assert (wakeups.heap[0][0], wakeups.all) == (3.0, ((3.0, HUNG), (5.0, DUE), (7.0, DUE)))
    assert (wakeups.first_ms(DUE), wakeups.first_ms(HUNG)) == (5.0, 3.0)
    assert wakeups.forget_until(5.0) == DUE | HUNG
    assert (wakeups.all, wakeups.first_ms(HUNG)) == (((7.0, DUE),), math.inf)
    wakeups.add(6.0, HUNG)
    assert wakeups.forget_until(7.0) == DUE | HUNG
    assert not wakeups.heap
