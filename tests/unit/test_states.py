"""The tables are whole: every state is reached, every live one has a good way out."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import pytest

from pipeswitch.errors import InvalidTransition
from pipeswitch.scheduler.states import (
    MODEL_TRANSITIONS,
    RESIDENCY_TRANSITIONS,
    TASK_FINAL,
    TASK_LIVE,
    TASK_ON_WORKER,
    TASK_TRANSITIONS,
    VERSION_TRANSITIONS,
    WORKER_TRANSITIONS,
    ModelState,
    Residency,
    StateMachine,
    TaskEvent,
    TaskState,
    VersionState,
    WorkerState,
    diagram,
)

Table = Mapping[Any, enum.Enum]
TABLES: list[tuple[Table, enum.Enum]] = [
    (TASK_TRANSITIONS, TaskState.PREPROCESSING),
    (WORKER_TRANSITIONS, WorkerState.DEAD),
    (RESIDENCY_TRANSITIONS, Residency.HOST),
    (MODEL_TRANSITIONS, ModelState.BUILDING),
    (VERSION_TRANSITIONS, VersionState.COMING),
]


def reachable(table: Table, start: enum.Enum) -> set[enum.Enum]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (source, _), target in table.items():
            if source is state and target not in found:
                found.add(target)
                todo.append(target)
    return found


@pytest.mark.parametrize(("table", "start"), TABLES)
def test_every_state_is_reached(table: Table, start: enum.Enum) -> None:
    assert reachable(table, start) == set(type(start))


def test_every_live_task_can_still_be_done() -> None:
    for state in TASK_LIVE:
        assert TaskState.DONE in reachable(TASK_TRANSITIONS, state), state


def test_nothing_follows_a_final_state() -> None:
    assert not [row for row in TASK_TRANSITIONS if row[0] in TASK_FINAL]


def test_a_task_on_a_worker_survives_its_death_and_reports_its_error() -> None:
    for state in TASK_ON_WORKER:
        assert TASK_TRANSITIONS[state, TaskEvent.WORKER_DIED] is TaskState.QUEUED
        assert TASK_TRANSITIONS[state, TaskEvent.ERROR] is TaskState.FAILED


def test_an_event_without_a_row_changes_nothing_and_tells_the_story() -> None:
    task = StateMachine("job cifar", TaskState.QUEUED, TASK_TRANSITIONS)
    task.apply(TaskEvent.DISPATCHED, "worker 1")
    with pytest.raises(InvalidTransition, match=r"job cifar.*queued->transmitting") as caught:
        task.apply(TaskEvent.PARKED)
    assert task.state is TaskState.TRANSMITTING
    assert caught.value.data["event"] == "parked"
    assert task.story == ["queued->transmitting dispatched worker 1"]


def test_the_diagram_names_every_transition() -> None:
    text = diagram("task", TASK_TRANSITIONS)
    for (source, event), target in TASK_TRANSITIONS.items():
        line = next(
            one for one in text.splitlines() if f"{source.value} --> {target.value}:" in one
        )
        assert event.value in line
