"""The queue's first request: the fast search finds the same request as a look at all requests."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.scheduler import policies
from pipeswitch.scheduler.policies.guard import PolicyGuard
from pipeswitch.scheduler.state.fair_queue import CallerQueue
from pipeswitch.scheduler.state.queue import Queue
from pipeswitch.scheduler.state.records import Request
from tests.unit.arrivals import request_of

MODELS = ("a", "b", "c", "d")
MAX_WAIT_MS = 100.0


class Device:
    """Queue, with the facts that its policy uses; a test changes them at random."""

    def __init__(self, policy: policies.Policy) -> None:
        self.order = policy.order
        self.judge = PolicyGuard(policy, MAX_WAIT_MS)
        self.queue = Queue(self.judge, CallerQueue({}, MAX_WAIT_MS))
        self.on_device: set[str] = set()
        self.current: str | None = None
        self.now_ms = 0.0
        self.count = 0

    def view(self, request: Request) -> policies.Waiting:
        return policies.Waiting(
            request.token,
            request.model,
            request.origin.priority,
            request.origin.deadline_at_ms,
            request.origin.arrived_at_ms,
            request.batch,
            request.size_bytes,
            request.model in self.on_device,
            request.model == self.current,
        )

    def at(self) -> policies.View:
        return policies.View(self.now_ms)

    def by_looking_at_all(self) -> list[Request]:
        """Return all requests in the order in which the policy ranks them."""
        return sorted(self.queue, key=lambda r: self.order.rank(self.view(r), self.at()))

    def heads(self) -> list[tuple[policies.Waiting, Request]]:
        return list(self.queue.heads(self.on_device.__contains__, self.current, self.at()))


def tried(pairs: list[tuple[policies.Waiting, Request]], device: Device) -> list[int]:
    """Return the tokens that a dispatch tries in turn if no request has memory."""
    blocked: list[policies.Waiting] = []
    tokens = []
    for view, request in pairs:
        if any(view.model == other.model for other in blocked):
            continue
        if not all(device.order.may_backfill(view, b, device.at()) for b in blocked):
            break
        blocked.append(view)
        tokens.append(request.token)
    return tokens


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 3),
            st.integers(0, 2),
            st.sampled_from((None, 10.0, 50.0, 1e4)),
            st.sampled_from((0.0, 0.0, 60.0)),
        ),
        st.tuples(st.just("leave"), st.integers(0, 1 << 16)),
        st.tuples(st.just("move"), st.integers(0, 3)),
        st.tuples(st.just("compute"), st.integers(-1, 3)),
        st.tuples(st.just("wait"), st.sampled_from((0.0, 0.1, 1.0, 30.0, 100.0, 99.9, 250.0))),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(steps=STEPS, name=st.sampled_from(list(policies.MAKERS)), callers=st.integers(1, 3))
def test_the_same_requests_are_tried_as_by_a_look_at_all(
    steps: list[Any], name: str, callers: int
) -> None:
    device = Device(policies.make_policy(name, max_wait_ms=MAX_WAIT_MS))
    for step in steps:
        match step:
            case ("add", model, priority, deadline_ms, aged_ms):
                device.count += 1
                deadline = None if deadline_ms is None else device.now_ms + deadline_ms
                came_at_ms = device.now_ms - aged_ms  # as if queued again after a worker's death
                device.queue.add(
                    request_of(
                        device.count,
                        MODELS[model],
                        came_at_ms,
                        priority=priority,
                        deadline_at_ms=deadline,
                        caller=str(device.count % callers),
                    )
                )
            case ("leave", number) if len(device.queue):
                device.queue.discard(list(device.queue)[number % len(device.queue)])
            case ("move", model):
                device.on_device ^= {MODELS[model]}
                device.queue.changed(MODELS[model])
            case ("compute", model):
                device.current = MODELS[model] if model >= 0 else None
            case ("wait", ms):
                device.now_ms += ms
        device.queue.check()
        by_all = [(device.view(request), request) for request in device.by_looking_at_all()]
        if not device.order.window and callers == 1:
            assert tried(device.heads(), device) == tried(by_all, device)
        assert {request.token for _, request in device.heads()} <= {r.token for r in device.queue}
        device.queue.check_heads(device.on_device.__contains__, device.current, device.at())


@pytest.mark.parametrize("name", policies.MAKERS)
def test_a_decision_ranks_only_the_lines_that_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[str] = []
    device = Device(policies.make_policy(name, max_wait_ms=MAX_WAIT_MS))
    rank = device.judge.rank

    def counted(head: policies.Waiting, view: policies.View) -> tuple[float, ...]:
        ranked.append(head.model)
        return rank(head, view)

    monkeypatch.setattr(device.judge, "rank", counted)
    rng = random.Random(1)
    for token in range(1000):
        model = f"m{rng.randrange(200)}"
        device.queue.add(request_of(token, model, priority=rng.randrange(3)))
    device.heads()
    ranked.clear()
    _, first = device.heads()[0]
    assert ranked == []  # without a change, a second search ranks no request
    device.queue.discard(first)
    device.on_device.add("m1")
    device.queue.changed("m1")
    device.heads()
    assert set(ranked) <= {first.model, "m1"}
    assert len(ranked) <= 4  # one request for each model and priority


def test_a_window_runs_what_waited_in_its_lines_before_anything_later() -> None:
    class Backwards(policies.Order):
        window = 2

        def arrange(self, heads: Any, counts: Any, view: policies.View) -> list[int]:
            windows.append(([head.model for head in heads], list(counts)))
            return list(range(len(heads)))[::-1]

    windows: list[Any] = []
    device = Device(policies.Policy("backwards", Backwards(), policies.Eviction()))
    arrivals = iter(range(100))

    def ask(model: str) -> None:
        at = next(arrivals)
        device.queue.add(request_of(at, model, float(at)))

    def run() -> str:
        _, request = device.heads()[0]
        device.queue.discard(request)
        return request.model

    for model in "abac":
        ask(model)
    assert run() == "b"
    ask("b")  # this request belongs to the next window
    assert [run() for _ in range(4)] == ["a", "a", "b", "c"]
    assert windows == [(["a", "b"], [2, 1]), (["c", "b"], [1, 1])]
    assert device.heads() == []
