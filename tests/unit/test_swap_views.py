"""How a swapped job is shown: in its row, in ``ps``, and as copies on the timeline."""

from __future__ import annotations

from typing import Any

from pipeswitch.cli import views
from pipeswitch.ipc.messages.daemon import CopySliceIn, CopySliceOut, SliceCopied
from pipeswitch.ipc.messages.worker import HideSlice, SliceHidden
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.states import TASK_ON_WORKER, TaskState
from tests.unit.test_scheduler_rules import MIB, Rig


def shown(rig: Rig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job's row and its line of ``ps``."""
    job = rig.answers[rig.job_asked("cifar", "show")].body["job"]
    rows = rig.answers[rig.ask(ev.Query, what="ps")].body["rows"]
    return job, next(row for row in rows if row["name"] == "cifar")


def copied(rig: Rig, order: Any, began_at_ms: float) -> list[ev.Span]:
    """End a copy of a slice after 5 ms; return the new spans."""
    rig.daemon(SliceCopied(order.op_id, began_at_ms=began_at_ms, ended_at_ms=began_at_ms + 5))
    return [span for command in rig.commands(ev.Spans) for span in command.spans]


def test_a_swapped_job_shows_its_image_only_while_it_has_one_and_the_copies_as_spans() -> None:
    rig = Rig()
    rig.register("large", 40)
    job = rig.start_training(mib=40)
    own, line = shown(rig)
    assert (own["swaps"], own["evictions"], own["lease_bytes"]) == (0, 0, 40 * MIB)
    assert "swapped_bytes" not in own | line
    rig.infer("large")
    rig.park(job)
    (hide,) = rig.sent(HideSlice)
    rig.worker(job.slot, SliceHidden(op_id=job.op_id, swap_id=hide.swap_id))
    (out,) = rig.sent(CopySliceOut)
    assert shown(rig)[1]["state"] == "swapping_out"
    spans = copied(rig, out, 10.0)
    assert [(one.track, one.name, one.begin_ms, one.end_ms, one.args) for one in spans] == [
        ("slices", "cifar out", 10.0, 15.0, {"bytes": 40 * MIB})
    ]
    for row in shown(rig):
        assert (row["state"], row["swapped_bytes"]) == ("swapped", 40 * MIB)
    own, line = shown(rig)
    assert (own["swaps"], own["evictions"], own["lease_bytes"]) == (1, 0, 0)
    commits = 2 * job.memory.commit_slot_bytes
    assert (line["device"], line["host"]) == (0, 40 * MIB + commits)
    rig.arrived("large")
    rig.done()
    (back,) = rig.sent(CopySliceIn)
    assert shown(rig)[1]["state"] == "swapping_in"
    assert [span.name for span in copied(rig, back, 20.0)] == ["cifar in"]
    own, line = shown(rig)
    assert (own["state"], own["swaps"], own["lease_bytes"]) == ("running", 1, 40 * MIB)
    assert "swapped_bytes" not in own | line


def test_each_state_of_a_job_with_a_process_has_a_colour_and_a_place_in_listings() -> None:
    states = {state.value for state in TASK_ON_WORKER} | {TaskState.PAUSED.value}
    assert states <= set(views.STATE_STYLES)
    assert states <= set(views.BUSY)
