"""When a process that stands still counts as dead."""

from __future__ import annotations

from pipeswitch.controller.processes import STOPPED_LOOKS, StoppedLooks

PID, OTHER = 71, 72


def test_a_process_found_stopped_often_enough_is_given_up_once() -> None:
    looks = StoppedLooks()
    seen = [looks.look([PID, OTHER] if turn else [PID]) for turn in range(STOPPED_LOOKS)]
    assert seen == [[]] * (STOPPED_LOOKS - 1) + [[PID]]
    assert looks.look([OTHER]) == [OTHER]


def test_a_process_that_goes_on_between_two_looks_starts_anew() -> None:
    looks = StoppedLooks()
    for _ in range(STOPPED_LOOKS - 1):
        assert looks.look([PID]) == []
    assert looks.look([]) == []
    for _ in range(STOPPED_LOOKS - 1):
        assert looks.look([PID]) == []
    assert looks.look([PID]) == [PID]
