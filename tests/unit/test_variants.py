"""Variants: models with one layout, of which a switch copies only what differs (ADR 68)."""

# mypy: disable-error-code="arg-type, union-attr"

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pipeswitch.extras.lab.programs import program_of, variant_of
from pipeswitch.ipc.messages.builder import BuildDone
from pipeswitch.ipc.messages.daemon import CopyPart, StoreModel, TransmitEnded, TransmitModel
from pipeswitch.programs.interface.layout import LookupSpec
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.states import Residency, VersionEvent
from pipeswitch.scheduler.state.variants import (
    GAP_BYTES,
    MAX_PAIRS,
    MAX_RANGES,
    Family,
    difference,
    image_of,
    layout_of,
    parts_of,
)
from tests.unit.test_scheduler_rules import MIB, Rig, received
from tests.unit.test_tables_by_rows import slab

LAYER = 5 * MIB  # each model has two groups of two layers
OWN = {"a": (), "b": (3,), "c": (0, 3), "d": (2,), "ada.d": (3,), "all": range(4)}


class Variants(Rig):
    """Server with room for one model, beside the fences."""

    def __init__(self, arena_mib: int = 22, **settings: Any) -> None:
        self.orders: list[TransmitModel] = []
        super().__init__(arena_bytes=arena_mib * MIB, **settings)
        for name in ("a", "b", "c", "d", "ada.d", "all", "older", "code"):
            self.register(name, 20)

    def built(self, name: str, mib: int, op_id: Any) -> None:
        program = program_of(f"digest {name}", mib * MIB)
        if name != "older":
            program = variant_of(program, name, OWN.get(name, ()))
        manifest = program.manifest
        if name == "code":
            manifest = structs.replace(manifest, mode="module")
        done = BuildDone(model=name, op_id=op_id, digest=f"digest {name}")
        self.handle(received(done, manifest=manifest))

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        self.orders += self.sent(TransmitModel)

    def copied(self, name: str) -> list[tuple[CopyPart, ...] | None]:
        """Send a request for a model that is not on the device; return its groups' parts."""
        self.infer(name)
        [order] = self.sent(TransmitModel)
        return self.parts(order)

    def parts(self, order: TransmitModel) -> list[tuple[CopyPart, ...] | None]:
        """Return the parts of each group; None: all of it, from wherever the store has it."""
        is_shared = bool(self.state.replicas[order.model].model.image)
        is_whole = is_shared and all(one.copied_bytes == one.size_bytes for one in order.groups)
        return [None if is_whole else one.parts for one in order.groups]

    def served(self, name: str) -> list[tuple[CopyPart, ...] | None]:
        parts = self.copied(name)
        self.arrived(name)
        self.done()
        return parts

    def at(self, name: str, offset: int) -> int:
        """Return where the host store has a byte of a model."""
        pieces = self.state.replicas[name].model.pieces
        [found] = [s + offset - at for s, at, size in pieces if at <= offset < at + size]
        return found


@pytest.fixture
def rig() -> Variants:
    return Variants()


def test_a_variant_takes_an_idle_ones_place_and_only_what_differs_is_copied(rig: Variants) -> None:
    assert rig.served("a") == [None, None]
    at = rig.at("b", 3 * LAYER)
    assert rig.served("b") == [(), (CopyPart(at, LAYER, LAYER),)]
    replica = rig.state.replicas["b"]
    assert (replica.resident_bytes, replica.transfer.share) == (3 * LAYER, 0.25)
    assert "b takes its place" in rig.state.replicas["a"].residency.story[-1]
    both = CopyPart(rig.at("c", 0), 0, LAYER), CopyPart(rig.at("c", 3 * LAYER), LAYER, LAYER)
    assert rig.served("c") == [both[:1], both[1:]]
    assert rig.served("all") == [None, None]


def test_a_new_daemon_loads_models_that_lend_bytes_first() -> None:
    rig = Variants(max_builds=2)
    builds = {name: rig.begin(name, client=name)[1] for name in ("borrows", "lends")}
    for name in ("lends", "borrows"):
        rig.built(name, 12, builds[name])
    rig.daemon_exits()
    rig.daemon_returns()
    assert [order.model for order in rig.sent(StoreModel)] == ["lends", "borrows"]


def test_with_room_elsewhere_both_stay() -> None:
    rig = Variants(arena_mib=44)
    assert rig.served("a") == rig.served("b") == [None, None]
    assert rig.state.replicas["a"].residency.state is Residency.RESIDENT


def test_the_variant_that_is_cheapest_to_bring_back_loses_its_place() -> None:
    rig = Variants(arena_mib=44)
    rig.served("a")
    rig.now_ms = 10.0
    rig.served("c")
    rig.now_ms = 1000.0  # both are long idle
    rig.infer("b")
    [order] = rig.sent(TransmitModel)
    assert order.arena_offset_bytes == rig.state.replicas["a"].preferred_offset_bytes
    assert rig.state.replicas["c"].residency.state is Residency.RESIDENT


def test_of_two_variants_that_cost_about_the_same_the_one_at_its_home_leaves() -> None:
    rig = Variants(arena_mib=44)
    for name in ("a", "b", "d"):  # d takes the place of a
        rig.served(name)
        rig.now_ms += 10.0
    home = rig.state.replicas["a"].preferred_offset_bytes
    rig.now_ms = 1000.0
    rig.infer("a")
    assert rig.sent(TransmitModel)[0].arena_offset_bytes == home


@pytest.mark.parametrize(
    ("first", "then"), [("a", "ada.d"), ("a", "older"), ("older", "a"), ("code", "a")]
)
def test_models_of_other_tenants_earlier_releases_and_modules_share_nothing(
    rig: Variants, first: str, then: str
) -> None:
    rig.served(first)
    assert rig.served(then) == [None, None]
    assert rig.served(first) == [None, None]


def test_a_model_in_use_keeps_its_place(rig: Variants) -> None:
    rig.infer("a")
    rig.arrived("a")
    rig.infer("b")
    assert not rig.sent(TransmitModel)
    rig.done()
    assert rig.sent(TransmitModel)[0].groups[0].parts == ()


@pytest.mark.parametrize("waits", [False, True])
def test_a_version_awaits_the_last_task_of_the_one_it_replaces(*, waits: bool) -> None:
    """If further requests wait for the old version, both versions get a place."""
    rig = Variants(arena_mib=64)
    rig.infer("a")
    rig.arrived("a")
    models = rig.scheduler.machine.models
    models["a"].serving.apply(VersionEvent.REPLACED, "published")
    models["b"].base = models["a"].base
    rig.handle(ev.PrefetchHint(model="b"))
    for name in "ab" if waits else "b":
        rig.infer(name)
        assert not rig.sent(TransmitModel)
    if waits:
        rig.infer("a")
    else:
        rig.done()
    [order] = rig.sent(TransmitModel)
    is_in_place = order.arena_offset_bytes == rig.state.replicas["a"].preferred_offset_bytes
    assert (order.groups[0].parts == (), is_in_place) == (not waits, not waits)


@pytest.mark.parametrize("own", [(), (3,)])
def test_a_restored_model_has_its_former_place_unless_it_was_packed_again(
    own: tuple[int, ...],
) -> None:
    rig, program = Rig(), program_of("digest v", 20 * MIB)
    former = [(0, "digest of the place")]
    rig.ask_register("v", restored=variant_of(program, "v", ()).manifest, lent=former)
    [start] = rig.commands(ev.StartBuild)
    done = BuildDone(model="v", op_id=start.op_id, digest="digest v")
    rig.handle(received(done, manifest=variant_of(program, "v", own).manifest))
    store = rig.scheduler.machine.store
    assert list(store.lent(rig.scheduler.machine.models["v"])) == ([] if own else former)


@pytest.mark.parametrize("ends", ["cancelled", "daemon"])
def test_after_a_copy_that_broke_off_the_place_is_nobodys(rig: Variants, ends: str) -> None:
    rig.served("a")
    assert rig.copied("b")[0] == ()
    [slot] = [task.slot for task in rig.state.owner.tasks]
    if ends == "daemon":
        rig.daemon_exits()
        rig.daemon_returns()
    else:
        rig.arrived("b", is_complete=False)
        assert rig.state.replicas["b"].residency.state is Residency.ABANDONED
        rig.worker_exits(slot)
    rig.worker_restarts(slot)
    *_, again = rig.orders
    assert rig.parts(again) == [None, None]


def test_predictions_are_in_proportion_to_what_the_copy_brings(rig: Variants) -> None:
    predict = rig.state.predictions.predict

    def arrived(name: str, took_ms: float) -> None:
        rig.infer(name)
        op_id = rig.state.replicas[name].residency_id
        ended = TransmitEnded(name, op_id, True, 2, 1, started_at_ms=0.0, ended_at_ms=took_ms)
        rig.daemon(ended)
        rig.done()

    arrived("b", 40.0)
    assert predict("b", 1).load_ms == 40.0
    arrived("a", 10.0)
    assert predict("b", 1).load_ms == 10.0, "a has all but a quarter of it"
    assert predict("a", 1).load_ms == 10.0, "it is on the device"
    arrived("older", 40.0)
    assert (predict("a", 1).load_ms, predict("b", 1).load_ms) == (40.0, 40.0)


def test_ranges_are_merged_if_the_gap_between_them_is_small() -> None:
    for blocks in ((GAP_BYTES >> 9) - 1, GAP_BYTES >> 9):
        program = program_of("d", 3 * 512 * blocks, groups=3, layers_per_group=1)
        old, new = (variant_of(program, name, (0, 2)).manifest for name in "xy")
        family = Family()
        family.members |= {"x": old, "y": structs.replace(new, digest="other")}
        assert layout_of("", old) == layout_of("", new) != layout_of("t", new)
        ranges = family.difference("y", "x")
        assert len(ranges) == (1 if 512 * blocks < GAP_BYTES else 2)
        family.remove("y")
        assert [*family.members] == ["x"]


def test_models_without_bytes_are_no_variants() -> None:
    assert layout_of("", structs.replace(program_of("d", 512).manifest, total_bytes=0)) is None


@pytest.mark.parametrize("count", [8, 3000])
def test_the_parts_are_few_and_are_exactly_the_ranges(count: int) -> None:
    size = 2 * GAP_BYTES
    program = program_of("d", count * size, groups=8, layers_per_group=count // 8)
    old, new = (variant_of(program, name, range(0, count, 2)).manifest for name in "xy")
    ranges = difference(new, old)
    assert len(ranges) == (4 if count == 8 else 1) <= MAX_RANGES  # gaps doubled until they are few
    image = image_of(old.total_bytes, ranges, 1 << 40, 0)
    copied = [
        (source, group.offset_bytes + at, end)
        for group in new.groups
        for source, at, end in parts_of(group, ranges, image)
    ]
    ends = [at + end for _, at, end in copied]
    bytes_of = {at: source for source, at, _ in copied}
    assert sum(end for *_, end in copied) == sum(end - start for start, end in ranges)
    assert all(source >= 1 << 40 for source in bytes_of.values())
    assert {start for start, _ in ranges} <= {*bytes_of}
    assert {end for _, end in ranges} <= {*ends}


def test_a_family_keeps_the_ranges_of_few_pairs() -> None:
    program, family = program_of("d", 8 * MIB), Family()
    for number in range(MAX_PAIRS):
        manifest = variant_of(program, str(number), (number % 4,)).manifest
        family.members[str(number)] = structs.replace(manifest, digest=str(number))
    for other in family.members:
        assert {family.share(one, other) for one in "01"} <= {0.0, 0.25, 0.5}
    assert len(family._ranges) == MAX_PAIRS


class Tables(Variants):
    """Models whose second group is a table that requests read by rows."""

    def built(self, name: str, mib: int, op_id: Any) -> None:
        program = variant_of(
            program_of(f"digest {name}", mib * MIB, groups=4, layers_per_group=1),
            name,
            OWN.get(name, ()),
        )
        first, table, *others = program.manifest.tensors
        table = structs.replace(table, dtype="uint8", shape=(1280, 4096))
        changed = {"tensors": (first, table, *others), "lookups": (LookupSpec(1, 0, 4),)}
        manifest = structs.replace(program.manifest, **changed)
        done = BuildDone(model=name, op_id=op_id, digest=f"digest {name}")
        self.handle(received(done, manifest=manifest))


@pytest.mark.parametrize(("name", "is_first"), [("b", False), ("all", True)])
def test_rows_are_copied_first_only_if_the_table_differs(name: str, is_first: bool) -> None:
    rig = Tables()
    for one in ("a", name):
        rig.infer(one, inputs=(slab(3, 4096),))
        [order] = rig.sent(TransmitModel)
        rig.arrived(one)
        rig.done()
    assert bool(order.groups[0].row_bytes) == is_first
    assert order.groups[-1].size_bytes == LAYER
