"""Variants share their equal bytes in the host store. Pure."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pipeswitch.base.errors import HostStoreFull
from pipeswitch.extras.lab.programs import program_of, variant_of
from pipeswitch.scheduler.memory.allocators import HostStoreAllocator
from pipeswitch.scheduler.state.records import Model
from pipeswitch.scheduler.state.states import ModelEvent
from pipeswitch.scheduler.state.variants import Lent

LAYER = 1 << 20
COUNT = 8
TOTAL = COUNT * LAYER


class Store:
    """Host store with the digest of the tensor at each place."""

    def __init__(self, size: int = 20 * TOTAL) -> None:
        core: Any = SimpleNamespace(settings=SimpleNamespace(store_bytes=size))
        self.ledger = HostStoreAllocator(core)
        self.models: dict[str, Model] = {}
        self.content: dict[int, str] = {}

    def add(self, name: str, *own: int, tenant: str = "") -> Model:
        program = variant_of(program_of("p", TOTAL, groups=COUNT // 2), name, own)
        return self.take(Model(name, 1, False, 0.0, tenant=tenant, manifest=program.manifest))  # type: ignore[arg-type]

    def take(self, model: Model, lent: Lent = ()) -> Model:
        model.state.apply(ModelEvent.BUILT, "")
        self.ledger.take(model, lent)
        region = self.ledger.regions.get(model.owner)
        assert region is not None
        fills = self.ledger.fills(model)
        for at, digest in self.places(model):
            if fills or region.offset_bytes <= at < region.end_bytes:
                self.content[at] = digest
        self.models[model.name] = model
        return model

    def restart(self, size: int, models: list[Model]) -> Store:
        """Return the store of the next server, which has room for ``size`` bytes."""
        again = Store(size)
        for one in models:
            model = Model(one.name, 1, False, 0.0, tenant=one.tenant, manifest=one.manifest)
            again.take(model, self.ledger.lent(one))
        again.check()
        return again

    def remove(self, name: str, *, is_proven: bool = True) -> None:
        model = self.models.pop(name)
        for event in (ModelEvent.STORED, ModelEvent.UNREGISTERED) if is_proven else ():
            model.state.apply(event, "")
        self.ledger.remove(model)

    def places(self, model: Model) -> list[tuple[int, str]]:
        return [
            (source + one.offset_bytes - at, one.digest)
            for one in model.built.tensors
            for source, at, size in model.pieces
            if at <= one.offset_bytes < at + size
        ]

    def check(self) -> None:
        self.ledger.regions.check()
        for model in self.models.values():
            places = self.places(model)
            assert len(places) == COUNT
            assert all(self.content[at] == digest for at, digest in places)

    @property
    def held(self) -> int:
        return self.ledger.regions.capacity_bytes - self.ledger.regions.free_bytes


def test_a_variant_takes_only_what_differs() -> None:
    store = Store()
    store.add("base")
    for number in range(31):
        one = store.add(f"v{number}", COUNT - 1)
        assert store.ledger.sharing(one)["shared_bytes"] == TOTAL - LAYER
    assert store.held == TOTAL + 31 * LAYER
    assert store.ledger.shared_bytes == 31 * (TOTAL - LAYER)
    store.add("ends", 0, 3, 4, COUNT - 1)
    store.check()


def test_the_base_stays_until_nobody_uses_its_bytes_and_its_name_is_free() -> None:
    store = Store()
    store.add("base")
    one = store.add("v", 1)
    assert store.ledger.sharing(one)["shares"] == "7.0 MiB with base"
    store.remove("base")
    assert store.held == TOTAL + LAYER
    assert "has left" in store.ledger.sharing(one)["shares"]
    store.add("base", *range(COUNT))
    assert store.held == 2 * TOTAL + LAYER
    store.add("w", 2)
    store.remove("v")
    store.remove("base")
    store.check()
    store.remove("w")
    assert store.held == 0


def test_models_of_other_tenants_and_those_that_differ_in_most_bytes_share_nothing() -> None:
    store = Store()
    store.add("base", tenant="a")
    assert not store.add("other", 1, tenant="b").image
    assert not store.add("most", *range(5), tenant="a").image


def test_what_fits_only_by_sharing_is_accepted_and_charged_to_its_tenant() -> None:
    store = Store(int(1.9 * TOTAL))
    store.add("base")
    assert store.add("most", *range(6)).image
    with pytest.raises(HostStoreFull):
        store.add("all", *range(COUNT))
    store = Store(4 * TOTAL)
    store.add("base", tenant="a")
    store.add("v", 1, tenant="a")
    store.remove("base")
    assert store.ledger._held_bytes["a"] == store.held


def test_bytes_that_were_not_proven_are_no_ones_base() -> None:
    store = Store()
    store.add("base")
    store.add("v", 1)
    store.remove("base", is_proven=False)
    assert not store.add("w", 2).image


@pytest.mark.parametrize("seed", range(8))
def test_after_a_restart_models_whose_base_has_left_take_no_more_room(seed: int) -> None:
    draw, store = random.Random(seed), Store()
    store.add("base")
    for number in range(10):
        store.add(f"v{number}", *draw.sample(range(COUNT), 3))
    store.remove("base")
    again = store.restart(store.held, draw.sample([*store.models.values()], 10))
    assert again.held == store.held
    assert again.ledger.shared_bytes == store.ledger.shared_bytes


@pytest.mark.parametrize("seed", range(20))
def test_any_order_keeps_each_models_bytes_and_frees_all(seed: int) -> None:
    draw, store = random.Random(seed), Store(6 * TOTAL)
    for number in range(60):
        if store.models and draw.random() < 0.45:
            store.remove(draw.choice([*store.models]), is_proven=draw.random() < 0.8)
        else:
            own = draw.sample(range(COUNT), draw.randrange(COUNT))
            try:
                store.add(f"m{number}", *own, tenant=draw.choice(["", "a"]))
            except HostStoreFull:
                continue
        store.check()
    again = store.restart(6 * TOTAL, [*store.models.values()])
    assert again.held <= store.held
    for name in [*store.models]:
        store.remove(name)
        again.remove(name)
    assert store.held == again.held == 0
