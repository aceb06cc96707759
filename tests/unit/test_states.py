"""State tables are complete: every state can be reached, and every live state can end well."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import pytest

from pipeswitch.base.errors import InvalidTransition
from pipeswitch.scheduler.state import states

Table = Mapping[Any, enum.Enum]
TABLES: list[tuple[Table, enum.Enum]] = [
    (states.TASK_TRANSITIONS, states.TaskState.PREPROCESSING),
    (states.WORKER_TRANSITIONS, states.WorkerState.DEAD),
    (states.OWNER_TRANSITIONS, states.OwnerState.IDLE),
    (states.RESIDENCY_TRANSITIONS, states.Residency.HOST),
    (states.MODEL_TRANSITIONS, states.ModelState.BUILDING),
    (states.VERSION_TRANSITIONS, states.VersionState.COMING),
]


def reachable(table: Table, start: enum.Enum) -> set[enum.Enum]:
    reached, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (source, _), target in table.items():
            if source is state and target not in reached:
                reached.add(target)
                todo.append(target)
    return reached


@pytest.mark.parametrize(("table", "start"), TABLES)
def test_every_state_is_reached(table: Table, start: enum.Enum) -> None:
    assert reachable(table, start) == set(type(start))


def test_every_live_task_can_still_be_done() -> None:
    for state in states.TASK_LIVE:
        assert states.TaskState.DONE in reachable(states.TASK_TRANSITIONS, state), state


def test_nothing_follows_a_final_state_but_the_resume_of_a_failed_job() -> None:
    follows = [row for row in states.TASK_TRANSITIONS if row[0] in states.TASK_FINAL]
    assert follows == [(states.TaskState.FAILED, states.TaskEvent.RESUME)]


def test_a_task_on_a_worker_survives_its_death_and_reports_its_error() -> None:
    for state in states.TASK_ON_WORKER:
        assert (
            states.TASK_TRANSITIONS[state, states.TaskEvent.WORKER_DIED] is states.TaskState.QUEUED
        )
        assert states.TASK_TRANSITIONS[state, states.TaskEvent.ERROR] is states.TaskState.FAILED


def test_an_event_without_a_row_changes_nothing_and_tells_the_story() -> None:
    task = states.StateMachine("job cifar", states.TaskState.QUEUED, states.TASK_TRANSITIONS)
    task.apply(states.TaskEvent.DISPATCHED, "worker 1")
    with pytest.raises(InvalidTransition, match=r"job cifar.*queued->transmitting") as caught:
        task.apply(states.TaskEvent.PARKED)
    assert task.state is states.TaskState.TRANSMITTING
    assert caught.value.data["event"] == "parked"
    assert task.story == ["queued->transmitting dispatched worker 1"]


def test_the_diagram_names_every_transition() -> None:
    text = states.diagram("task", states.TASK_TRANSITIONS)
    for (source, event), target in states.TASK_TRANSITIONS.items():
        line = next(
            one for one in text.splitlines() if f"{source.value} --> {target.value}:" in one
        )
        assert event.value in line
