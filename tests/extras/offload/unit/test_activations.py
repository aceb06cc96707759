"""Saved tensors under a budget: gradients are bit-equal, and the device never holds more bytes."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeswitch.base.errors import OutOfDeviceMemory, TaskPreempted
from pipeswitch.devices.cpu.worker_device import CpuCopies
from pipeswitch.extras.offload.activations import Activations
from pipeswitch.extras.offload.copy_streams import CopyStreams
from pipeswitch.extras.offload.saved import StoragePlace
from pipeswitch.ipc.gate import Gate, GateState

Model = Callable[[torch.Tensor], torch.Tensor]
Grads = list[torch.Tensor]


@pytest.fixture(autouse=True)
def lanes_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close copy streams after each test: pytest's report would cut a list of a hundred threads."""
    streams: list[CopyStreams] = []
    begin = CopyStreams.__init__

    def recorded(self: CopyStreams, *arguments: Any) -> None:
        streams.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(CopyStreams, "__init__", recorded)
    yield
    for one in streams:
        one.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------- models


def vgg(*, inplace: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    width = 3
    for out in (8, 8, 0, 16, 16, 0, 32, 32, 0):
        if out:
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace)]
            width = out
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(inplace),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm_one, self.norm_two = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.way, self.relu = nn.Conv2d(width, out, 1), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_two(self.two(self.relu(self.norm_one(self.one(x)))))
        return self.relu(y + self.way(x))  # type: ignore[no-any-return]


def resnet() -> nn.Sequential:
    return nn.Sequential(
        Block(3, 8),
        Block(8, 8),
        nn.MaxPool2d(2),
        Block(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Transformer(nn.Module):
    """Transformer, whose queries, keys and values are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.cut, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)
        self.body = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.cut(x).flatten(2).transpose(1, 2)
        return self.head(self.body(tokens).mean(1))  # type: ignore[no-any-return]


class Cells(nn.Module):
    """LSTM cells; their gates are pieces of one storage, each written in place and then saved."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(96, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = memory = x.new_zeros(len(x), 256)
        for part in x.flatten(1).split(96, 1):
            hidden, memory = self.cell(part, (hidden, memory))
        return self.head(hidden)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.parts, self.use_reentrant = vgg(inplace=False), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[:2](x)
        for part in (self.parts[2:7], self.parts[7:14], self.parts[14:]):
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)  # type: ignore[assignment]
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg": vgg,
    "resnet": resnet,
    "transformer": Transformer,
    "cells": Cells,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(use_reentrant=True),
}


# ------------------------------------------------------------------------------- a device


class Ticking(Activations):
    """Activations that check their byte counts whenever a count may have changed."""

    ticks = 0

    def __init__(self, *arguments: Any) -> None:
        self.asks: list[int] = []  # sizes of host memory that were requested, in bytes
        super().__init__(*arguments, charge=self.asks.append)

    def _finish_copies(self) -> bool:
        changed = super()._finish_copies()
        self.ticks += 1
        there = [
            one.size_bytes
            for one in self._alive
            if one.device is not None or one.place is StoragePlace.COMING
        ]
        assert sum(there) <= self.memory.held <= self.memory.budget
        away = [
            one.size_bytes
            for one in self._alive
            if one.host is not None or one.place is StoragePlace.LEAVING
        ]
        assert sum(away) == self._on_host <= self._charged
        return changed

    def drain(self) -> None:
        """Wait until the copy streams have made all requested copies."""
        while self._streams.is_busy:
            self._wait("forward", 0, lambda: True)
        self._finish_copies()


def open_gate() -> Gate:
    gate = Gate(lambda *_: None)
    gate.grant(1)
    gate.enter()
    return gate


def limited(offload: str, budget: int | None, copies: Any = None, gate: Any = None) -> Ticking:
    return Ticking(offload, budget, copies or CpuCopies(2e9), gate or open_gate())


def train(make: Callable[[], nn.Module], limit: Ticking | None, *, autocast: bool = False) -> Grads:
    """Train for three steps; return every gradient of each step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    grads: Grads = []
    for _ in range(3):
        x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            loss.backward()

        in_body(limit, step, (x, y))
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return grads


def in_body(limit: Ticking | None, step: Callable[[], Any], batch: Any = ()) -> Any:
    if limit is None:
        return step()
    with limit.body(batch):
        return step()


def same(one: Grads, other: Grads) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ------------------------------------------------------------------------------- bits and bytes


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_bit_equal_within_every_budget(model: str, autocast: bool) -> None:
    make = MODELS[model]
    plain = train(make, None, autocast=autocast)
    all_of_it = limited("none", 1 << 40)
    assert same(train(make, all_of_it, autocast=autocast), plain)
    total = all_of_it.memory.peak_bytes
    most = 4 if model in ("vgg", "resnet", "transformer") else 1.5  # budget fits one layer
    for offload, share in (("auto", 1), ("auto", 1.5), ("auto", most), ("all", most), ("all", 0)):
        limit = limited(offload, int(total / share) if share else None)
        assert same(train(make, limit, autocast=autocast), plain), (offload, share)
        limit.drain()
        assert limit.memory.held == limit._on_host == 0, "bytes that nobody uses are counted"
        assert limit.ticks > 20
        figures = limit.figures
        assert limit.asks == sorted({ask >> 20 << 20 for ask in limit.asks}), "as it grows"
        limit.give_back()
        assert limit.asks[-1:] in ([], [0])
        if share:  # else some copies may be late and are cancelled
            assert (figures["offloaded_bytes"] == 0) == (share == 1)


def test_conv_sends_what_convolutions_take_and_nothing_else() -> None:
    limit = limited("conv", None)
    assert same(train(vgg, limit), train(vgg, None))
    limit = limited("conv", None)
    with limit.body(()):
        result = vgg()(torch.randn(8, 3, 16, 16))
        limit.drain()
        stages = ((3 + 8) * 16 * 16, (8 + 16) * 8 * 8, (16 + 32) * 4 * 4)  # two tensors per stage
        assert limit._moved == 8 * sum(stages) * 4
        del result


def test_a_second_backward_finds_everything_again() -> None:
    history = []

    def twice(limit: Ticking | None) -> Grads:
        torch.manual_seed(0)
        model, x = resnet(), torch.randn(8, 3, 16, 16)

        def step() -> None:
            first = model[0](x)
            history.append(first)
            loss = model[1:](first).square().sum()
            if limit is not None:
                limit.drain()
            loss.backward(retain_graph=True)
            loss.backward()

        in_body(limit, step, x)
        return [p.grad for p in model.parameters() if p.grad is not None]

    for offload in ("auto", "all"):
        limit = limited(offload, 300_000)
        assert same(twice(limit), twice(None))
        limit.drain()
        assert limit.memory.held == 0  # tensors that the script keeps do not count


def test_gradients_of_gradients() -> None:
    def penalty(limit: Ticking | None) -> Grads:
        torch.manual_seed(0)
        model, x = vgg(), torch.randn(8, 3, 16, 16, requires_grad=True)

        def step() -> None:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()

        in_body(limit, step, x)
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(penalty(limited("all", None)), penalty(None))
    assert same(penalty(limited("auto", 400_000)), penalty(None))


def test_a_storage_counts_and_travels_once_however_many_views_are_saved() -> None:
    limit = limited("all", None)
    x = torch.randn(64, 64, requires_grad=True)
    with limit.body(x):
        base = x * 1
        loss = (base[:, :32] * base[:, 32:] * base.t()[:64:2].t()).sum()
        limit.drain()
        loss.backward()
    product = 64 * 32 * 4  # bytes of the first product's result, which the second product saves
    assert limit.figures["saved_bytes"] == 64 * 64 * 4 + product
    assert limit.figures["offloaded_bytes"] == 64 * 64 * 4 + product


def test_parameters_buffers_and_the_batch_are_no_activations() -> None:
    limit = limited("all", None)
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    with limit.body({"x": [x]}):
        (model(x) * model.weight).sum().backward()
    assert limit.figures["saved_bytes"] == 64 * 64 * 4  # only the output's bytes count


@pytest.mark.parametrize("offload", ["all", "none"])
def test_a_write_between_save_and_use_is_autograds_own_error(offload: str) -> None:
    limit = limited(offload, None if offload == "all" else 1 << 20)
    x = torch.randn(64, 64, requires_grad=True)
    weight = nn.Parameter(torch.randn(64, 64))
    for written, use in (("saved", torch.sigmoid), ("parameter", lambda x: x @ weight)):
        with limit.body(()):
            result = use(x)
            limit.drain()
            with torch.no_grad():
                (result if written == "saved" else weight).add_(1)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
                result.sum().backward()


def test_a_graph_that_is_kept_is_used_in_a_later_body() -> None:
    limit = limited("all", None)
    x = torch.randn(64, 64, requires_grad=True)
    with limit.body(()):
        loss = x.sigmoid().tanh().sum()
        other = x.sigmoid().tanh().sum()
        limit.drain()
    with limit.body(()):
        loss.backward()
    limit.close()  # the end of a training loop; the next loop has a new budget
    other.backward()
    expected = torch.autograd.grad(x.sigmoid().tanh().sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * expected)


# ------------------------------------------------------------------------------- the budget


def test_a_step_over_its_budget_is_told_by_how_much() -> None:
    whole = limited("none", 1 << 40)
    train(vgg, whole)
    with pytest.raises(OutOfDeviceMemory, match="too much") as caught:
        train(vgg, limited("none", whole.memory.peak_bytes - 1000))
    assert caught.value.requested_bytes == whole.memory.peak_bytes
    assert caught.value.largest_free_bytes == whole.memory.peak_bytes - 1000
    assert 'offload="auto"' in caught.value.hint
    with pytest.raises(OutOfDeviceMemory, match="too much"):
        train(vgg, limited("auto", 30_000))


@pytest.mark.parametrize("make", [vgg, resnet, Transformer])
@pytest.mark.parametrize("offload", ["auto", "all", "conv", "none"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_what_a_refusal_says_to_set_is_enough_at_once(
    make: Callable[[], nn.Module], offload: str, share: float
) -> None:
    whole = limited("none", 1 << 40)
    train(make, whole)
    try:
        train(make, limited(offload, int(share * whole.memory.peak_bytes)))
    except OutOfDeviceMemory as refusal:
        match = re.search(r'activation_memory="(\d+)KiB"', refusal.hint)
        assert match is not None
        train(make, limited(offload, int(match[1]) << 10))


def test_forward_alone_may_save_more_than_fits() -> None:
    limit = limited("none", 10_000)
    with limit.body(()):
        vgg()(torch.randn(8, 3, 16, 16))
    assert limit.memory.peak_bytes <= 10_000


# ------------------------------------------------------------------------------- the lane


class Told(CpuCopies):
    """Copies that log the main thread's requests, and call ``then`` when one piece arrives."""

    def __init__(self, at_piece: int = -1, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(0)
        self.log: list[str] = []
        self.pieces_come, self._at, self._then = 0, at_piece, then

    def mark(self) -> None:
        self.log.append("asked")

    def pieces(self, *args: Any, to_host: bool) -> Iterator[int]:
        for piece in super().pieces(*args, to_host=to_host):
            self.pieces_come += 1
            if self.pieces_come == self._at:
                self._then()
            yield piece


def test_bytes_are_asked_back_one_layer_ahead_of_their_use() -> None:
    copies = Told()
    limit = limited("all", None, copies)
    x = torch.randn(64, 64, requires_grad=True)
    layers = nn.Sequential(*[nn.Tanh() for _ in range(5)])
    with limit.body(()):
        result = x
        for number, layer in enumerate(layers):
            result = layer(result)
            result.register_hook(lambda _, n=number: copies.log.append(f"layer {n}"))
        limit.drain()
        copies.log.clear()
        result.sum().backward()
    assert copies.log == [
        "layer 4",
        "asked",
        "asked",  # the first request, for layer 4, is late; the second request is for layer 3
        "layer 3",
        "asked",
        "layer 2",
        "asked",
        "layer 1",
        "asked",
        "layer 0",
    ]
    figures = limit.figures
    assert (figures["fetched_late"], figures["fetched_ahead"]) == (1, 4)


def test_a_step_that_ends_for_another_job_goes_on_with_its_copies() -> None:
    gate = Gate(lambda *_: None)
    gate.grant(1)
    gate.enter()
    copies = Told(2, lambda: gate.request_stop(1, 2, at_boundary=True))
    limit = limited("all", 3 << 20, copies, gate)
    x = torch.randn(1 << 19, requires_grad=True)  # 2 MiB, 8 pieces
    with limit.body(()):
        x.sigmoid().tanh().sigmoid().sum().backward()
    assert copies.pieces_come > 2
    assert gate.state is GateState.STOPPING


def test_a_main_thread_that_waits_for_a_copy_parks_and_the_lane_is_quiet() -> None:
    parked = threading.Event()
    gate = Gate(lambda *_: parked.set())
    gate.grant(1)
    gate.enter()
    copies = Told(2, lambda: gate.request_stop(1, 2))
    limit = limited("all", 3 << 20, copies, gate)
    pieces: list[int] = []

    def controller() -> None:
        assert parked.wait(10)
        pieces.append(copies.pieces_come)
        gate.grant(2)

    thread = threading.Thread(target=controller)
    thread.start()
    x = torch.randn(1 << 19, requires_grad=True)  # 2 MiB, 8 pieces
    with limit.body(()):
        x.sigmoid().tanh().sigmoid().sum().backward()
    thread.join()
    assert pieces == [2]  # no piece was copied after the stop
    expected = torch.autograd.grad(x.sigmoid().tanh().sigmoid().sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("piece", [2, 26], ids=["forward", "backward"])
def test_an_eviction_unwinds_a_main_thread_that_waits(piece: int) -> None:
    gate = open_gate()
    limit = limited("all", 2 << 20, Told(piece, gate.request_evict), gate)
    x = torch.randn(1 << 19, requires_grad=True)

    def step() -> None:
        result = x.sigmoid().tanh().sigmoid().sum()
        if piece > 8:
            limit.drain()
        result.backward()

    with pytest.raises(TaskPreempted):
        in_body(limit, step)
    limit.close()


def in_flight(then: Callable[[], None]) -> tuple[CopyStreams, Any]:
    """Return copy streams and their first copy, which takes until ``then`` has returned."""
    begun, gate = threading.Event(), open_gate()

    def comes() -> None:
        begun.set()
        then()

    streams = CopyStreams(Told(1, comes), gate)
    copy = streams.submit("first", torch.zeros(64, dtype=torch.uint8), to_host=True)
    assert begun.wait(10)
    return streams, copy


def test_a_cancelled_copy_frees_its_tensor_while_another_is_under_way() -> None:
    may_end = threading.Event()
    streams, first = in_flight(lambda: None if may_end.wait(10) else pytest.fail("never"))
    second = streams.submit("second", torch.zeros(64, dtype=torch.uint8), to_host=True)
    reference = weakref.ref(second.source)
    assert streams.cancel(second)
    del second
    assert reference() is None
    may_end.set()
    while streams.is_busy:
        streams.wait("forward")
        assert streams.take_ended() == [first]
    third = streams.submit("third", torch.zeros(64, dtype=torch.uint8), to_host=True)
    streams.wait("forward")
    assert streams.take_ended() == [third]


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(), KeyError("a bug")])
def test_an_error_in_a_copy_reaches_the_main_thread_and_the_lane_goes_on(
    error: BaseException,
) -> None:
    def fails() -> None:
        raise error

    streams, first = in_flight(fails)
    streams.wait("forward")
    assert streams.take_ended() == [first]
    assert first.error is error
    second = streams.submit("second", torch.zeros(64, dtype=torch.uint8), to_host=True)
    streams.wait("forward")
    assert streams.take_ended() == [second]
    assert second.target is not None
