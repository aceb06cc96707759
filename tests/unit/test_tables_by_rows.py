"""Tables that requests read by rows: which they are, and the order of their copies (ADR 67)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.controller.device_effects import with_rows
from pipeswitch.devices.order_checks import check_order
from pipeswitch.extras.lab.programs import manifest_of
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.builder import BuildDone
from pipeswitch.ipc.messages.daemon import GroupCopy, TransmitModel
from pipeswitch.ipc.messages.worker import RunInference
from pipeswitch.programs.graphs.indices import lookups
from pipeswitch.programs.interface.layout import LookupSpec, Manifest
from pipeswitch.scheduler.memory.residency import ROW_COST_BYTES
from pipeswitch.scheduler.state import events as ev
from tests.unit.test_indices import LOOKUP, graph, v
from tests.unit.test_scheduler_rules import MIB, Rig, received

ROWS, ROW_BYTES, END = 2048, 4096, 5  # a table of 8 MiB; the last node is END - 1


def with_table(next_reader: int) -> Manifest:
    """Return a program of five groups of a tensor each; the second one is a table."""
    sizes = (MIB, ROWS * ROW_BYTES + 256, MIB, MIB, MIB)
    manifest = manifest_of("digest m", sizes, (0, 1, 2, 3, 4))
    first, table, *others = manifest.tensors
    size = {"size_bytes": ROWS * ROW_BYTES}  # the group is padded
    table = structs.replace(table, shape=(ROWS, ROW_BYTES), **size)
    changed = {"tensors": (first, table, *others), "lookups": (LookupSpec(1, 0, next_reader),)}
    return structs.replace(manifest, **changed)


def slab(count: int, at: int = 0) -> SlabTensor:
    return SlabTensor("ids", "int64", (1, count), offset_bytes=at, size_bytes=8 * count)


class Tables(Rig):
    def __init__(self, next_reader: int, count: int) -> None:
        self.next_reader = next_reader
        super().__init__()
        self.register("m")
        self.infer("m", inputs=(slab(count, 4096),))

    def built(self, name: str, mib: int, op_id: Any) -> None:
        done = BuildDone(model=name, op_id=op_id, digest=f"digest {name}")
        self.handle(received(done, manifest=with_table(self.next_reader)))


def test_only_a_table_that_is_first_read_by_rows_of_an_input_is_one() -> None:
    look, read = (LOOKUP, (v(1), v(0))), ("aten.relu.default", (v(1),))
    for nodes in ((look,), (look, read), (look, look)):
        assert lookups(graph(*nodes)) == (LookupSpec(0, 0, 1),)
    assert lookups(graph(read, look)) == ()
    kept, changed = "aten.view.default", ("aten.to.dtype", "aten.clone.default")
    for first in (kept, *changed):  # a cast may change the rows, and the graph may change a copy
        found = lookups(graph((first, (v(0), [])), (LOOKUP, (v(1), v(2)))))
        assert len(found) == (first == kept)
    assert lookups(structs.replace(graph(look), results=(1,))) == ()  # it is an output


@pytest.mark.parametrize(
    ("next_reader", "count", "order"),
    [
        (END, 3, [5, 0, 2, 3, 4, 1]),  # the table is last
        (3, 3, [5, 0, 2, 1, 3, 4]),  # group 3 reads all of it
        (1, 3, [0, 1, 2, 3, 4]),  # its own group does
        (END, ROWS * ROW_BYTES // ROW_COST_BYTES + 1, [0, 1, 2, 3, 4]),  # too many rows
    ],
)
def test_rows_come_first_the_table_last(next_reader: int, count: int, order: list[int]) -> None:
    rig = Tables(next_reader, count)
    [sent], [run] = rig.sent(TransmitModel), rig.sent(RunInference)
    first_fence = rig.state.replicas["m"].first_fence
    assert [one.fence - first_fence for one in sent.groups] == order
    assert (run.by_rows, run.last_group) == (order[0] == 5, order[-1])
    if run.by_rows:
        rows, table = sent.groups[0], sent.groups[order.index(1)]
        assert structs.replace(rows, fence=table.fence, row_bytes=0, indices=()) == table
        assert (rows.row_bytes, rows.indices) == (ROW_BYTES, (slab(3, 4096),))


def test_only_the_requests_whose_rows_were_copied_are_computed_by_rows() -> None:
    rig = Tables(END, 3)
    rig.worker_exits(rig.state.owner.running.slot)
    [again] = rig.sent(RunInference)
    rig.infer("m", inputs=(slab(3),))
    assert (again.by_rows, rig.sent(RunInference)[0].by_rows) == (True, False)
    rig.arrived("m")
    rig.worker_exits(rig.state.owner.running.slot)
    assert not any(one.by_rows for one in rig.sent(RunInference))


def test_a_run_by_rows_does_not_prove_that_the_table_has_arrived() -> None:
    """Such a run may end before the table's copy ends; the next request waits for that copy."""
    rig, replies = Tables(END, 3), []
    for arrives in (False, True, False):
        if arrives:
            rig.arrived("m")
        rig.done()
        replies += rig.commands(ev.Reply)
        rig.infer("m", inputs=(slab(3),))
    assert [one.timing.resident for one in replies] == [False, False, True]


def test_the_controller_reads_the_rows_that_exist_from_the_pool() -> None:
    copy = GroupCopy(0, MIB, 900, 0, row_bytes=100, indices=(slab(2, 8), slab(3, 16)))
    sent = with_rows(copy, memoryview(np.array([1, 5, 2, -1, 9]).tobytes()))
    assert (sent.rows, sent.indices) == ((0, 2, 5), ())
    assert [part.offset_bytes for part in sent.pieces()] == [0, 200, 500]
    wrong = TransmitModel("m", 1, MIB, MIB, groups=(structs.replace(sent, rows=(9,)),))
    with pytest.raises(RemoteProtocolError):
        check_order(wrong, arena_bytes=2 * MIB, store_bytes=MIB, fence_count=1)
