"""The record of which task has a device's turn: its state always agrees with its tasks."""

from __future__ import annotations

import random
from collections.abc import Callable

from pipeswitch.scheduler.state.device_owner import DeviceOwner
from pipeswitch.scheduler.state.records import RunningTask
from pipeswitch.scheduler.state.states import OWNER_TRANSITIONS, OwnerEvent


def test_any_events_keep_the_owner_and_its_tasks_in_agreement() -> None:
    rows: set[tuple[object, OwnerEvent]] = set()
    for seed in range(200):
        chance, owner = random.Random(seed), DeviceOwner()
        for number in range(1, 100):
            events = [*OwnerEvent][: len(OwnerEvent) - (chance.random() < 0.9)]  # rarely TASKS_LOST
            event = chance.choice(events)
            if owner.pending is None and chance.random() < 0.5:
                owner.pending = RunningTask(number, 0, (number,), "m", 0.0, was_resident=True)
            if not owner.allows(event) or (event is OwnerEvent.TASK_STARTED and not owner.pending):
                continue
            rows.add((owner.state, event))
            tasks = owner.tasks
            happen(owner, event)
            owner.check()
            ended = {OwnerEvent.TASK_ENDED, OwnerEvent.YIELDED_ENDED} & {event}
            assert event is OwnerEvent.TASKS_LOST or len(owner.tasks) == len(tasks) - len(ended)
    assert rows == set(OWNER_TRANSITIONS), "a row was never followed"


def happen(owner: DeviceOwner, event: OwnerEvent) -> None:
    does: dict[OwnerEvent, Callable[[], object]] = {
        OwnerEvent.TASK_STARTED: lambda: owner.start(owner.pending, ""),  # type: ignore[arg-type]
        OwnerEvent.TASK_ENDED: lambda: owner.drop(owner.running, ""),  # type: ignore[arg-type]
        OwnerEvent.STEPPED_ASIDE: lambda: owner.step_aside(""),
        OwnerEvent.RESUMED: lambda: owner.start(owner.yielded, ""),  # type: ignore[arg-type]
        OwnerEvent.YIELDED_ENDED: lambda: owner.drop(owner.yielded, ""),  # type: ignore[arg-type]
        OwnerEvent.JOB_STARTED: lambda: owner.train("j", ""),  # type: ignore[arg-type]
        OwnerEvent.STOP_REQUESTED: lambda: owner.stop_job(0, 7),  # type: ignore[arg-type]
        OwnerEvent.JOB_LEFT: lambda: owner.job_left(""),
        OwnerEvent.TASKS_LOST: lambda: owner.lose_tasks(""),
    }
    does[event]()
