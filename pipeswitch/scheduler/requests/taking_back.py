"""Taking a dispatched task back before it has its turn, so that look-ahead costs nobody a turn.

One task is dispatched ahead, while another one computes. Until it has its turn, it is taken back if
its deadline passes, or if a new request goes before it: one of a higher priority, one that the
policy serves first, or one of a caller or connection that has had less service. The requests are
queued again. A task whose turn a parking job writes itself is not taken back: it begins at once.
No request is overtaken for ever: a task whose first request has waited for ``max_wait_ms`` stays.
With ``admission = "deadline"`` no task is overtaken: accepted requests were promised a time.
"""

from __future__ import annotations

from ..state.device_state import DeviceState
from ..state.fair_queue import Charge, FairQueue, S
from ..state.policy_queue import shown
from ..state.records import Request, RunningTask
from .completion import TaskCompletion


class TakingBack:
    """Decisions to take a device's dispatched task back."""

    def __init__(self, device: DeviceState, completion: TaskCompletion) -> None:
        self._core = device.core
        self._device = device
        self._completion = completion

    def late(self, task: RunningTask) -> None:
        """Take the task back if one of its deadlines has passed and it has no turn."""
        requests, now_ms = self._device.requests, self._core.now_ms
        if any(requests[token].due_ms <= now_ms for token in task.tokens):
            self._completion.take_back(task, "its deadline has passed")

    def overtaken(self, task: RunningTask, new: list[Request]) -> None:
        """Take the task back if one of the new requests goes before it."""
        first = self._device.requests[task.tokens[0]]
        core = self._core
        if core.settings.admission != "off":
            return
        if core.now_ms - first.origin.arrived_at_ms >= core.judge.max_wait_ms:
            return
        for request in new:
            if self._goes_before(request, first, task) and request.token in self._device.queue:
                self._completion.take_back(task, f"request {request.run.request_id} goes first")
                return

    def _goes_before(self, new: Request, first: Request, task: RunningTask) -> bool:
        accounts, charge = self._device.accounts, task.charge
        account, own = accounts.of(new.origin.caller), accounts.of(first.origin.caller)
        is_one_line = self._core.judge.sorts_by or new.origin.connection == first.origin.connection
        if account is own and is_one_line:
            return self._is_first_by_policy(new, first)
        if new.origin.priority != first.origin.priority:
            return new.origin.priority < first.origin.priority
        if charge is None:
            return False
        if account is not own:
            part = charge.parts[own], charge.effective_priority, charge.clock
            return self._has_less(accounts, account, own, new, charge, part)
        for queue, effective_priority, parts, clock in charge.connections:
            if queue is account.connections:
                share, other = queue.of(new.origin.connection), queue.of(first.origin.connection)
                part = parts[other], effective_priority, clock
                return self._has_less(queue, share, other, new, charge, part)
        mine, theirs = new.origin.connection, first.origin.connection
        return self._computes_for(theirs) and not self._computes_for(mine)

    def _has_less(
        self,
        queue: FairQueue[S],
        share: S,
        other: S,
        new: Request,
        charge: Charge,
        part: tuple[float, float, float],
    ) -> bool:
        """Return True if the member ``share``, which begins to wait, goes before ``other`` had the
        turn not been given; then set its tag as if the turn had not been given."""
        fraction, effective_priority, clock = part
        if share.waiting[new.origin.priority] != 1 or new.origin.priority != effective_priority:
            return False
        if share.effective_priority != effective_priority:
            return False  # its tag is known for its most urgent requests only
        load_ms = 0.0
        if not self._device.replicas[new.model].is_on_device:
            load_ms = self._device.predictions.predict(new.model, new.batch).load_ms
        before = other.tags[effective_priority] - fraction * charge.ms / other.weight
        if max(share.earned_tag, clock) + load_ms / share.weight >= before:
            return False
        queue.without_last_turn(share, effective_priority, clock)
        return True

    def _is_first_by_policy(self, new: Request, first: Request) -> bool:
        judge = self._core.judge
        if (new.model, new.origin.priority) == (first.model, first.origin.priority):
            return judge.key(shown(new)) < judge.key(shown(first))
        is_resident, current, view = self._device.queue_view
        ranks = [
            judge.rank(shown(one, is_resident(one.model), one.model == current), view)
            for one in (new, first)
        ]
        return ranks[0] < ranks[1]

    def _computes_for(self, connection: str) -> bool:
        owner, requests = self._device.owner, self._device.requests
        begun = [task for task in (owner.running, owner.yielded) if task is not None]
        origins = [requests[token].origin for task in begun for token in task.tokens]
        return any(one.connection == connection for one in origins)
