"""Look-ahead: the next request's model is copied during a run, and evicts no needed model."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.programs import program_of
from pipeswitch.extras.lab.world import World
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.ipc.messages.daemon import TransmitModel
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.core import SchedulerSettings

MIB = 1 << 20
COPY_MS = 8.0  # time to copy a model of 4 MiB
COMPUTE_MS = {"long": 100.0, "short": 1.0, "next": 4.0, "other": 4.0}


class Server(World):
    """Server with models of 4 MiB each, none of them resident."""

    def __init__(self, arena_mib: int = 64, **settings: Any) -> None:
        self.ends_ms: dict[ev.Token, float] = {}
        self.sent: list[tuple[float, str]] = []
        self.switches: list[str] = []
        chosen = SchedulerSettings(
            arena_bytes=arena_mib * MIB, store_bytes=64 * MIB, fence_count=64, **settings
        )
        link = Link(bytes_per_ms=MIB / 2)
        super().__init__(Scheduler(chosen), costs=Costs(to_device=link))
        for name, compute_ms in COMPUTE_MS.items():
            program = program_of(name, 4 * MIB, layer_ms=compute_ms / 4)
            self.clients.register(ModelName(name), program)
        self.run()

    def perform(self, commands: list[ev.Command]) -> None:
        super().perform(commands)
        for command in commands:
            match command:
                case ev.Reply(more=False):
                    self.ends_ms[command.token] = self.now_ms
                case ev.Send(message=TransmitModel(model=model)):
                    self.sent.append((self.now_ms, model))
                case ev.Publish(topic="switch.started"):
                    self.switches.append(command.body["model"])

    def ask(self, model: str, **values: Any) -> ev.Token:
        return self.clients.infer(ModelName(model), **values)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_the_third_requests_model_is_sent_while_the_first_computes(look_ahead: bool) -> None:
    """Without look-ahead, the third model's copy begins only during the short second request."""
    server = Server(look_ahead=look_ahead)
    began_ms = server.now_ms
    tokens = [server.ask(name) for name in ("long", "short", "next")]
    server.run()
    first, second, third = (server.ends_ms[token] - began_ms for token in tokens)
    assert (first, second) == (COPY_MS / 2 + 100.0, first + 1.0)
    last_group_ms = COMPUTE_MS["next"] / 2
    assert third - second == (COMPUTE_MS["next"] if look_ahead else COPY_MS - 1.0 + last_group_ms)
    assert [name for _, name in server.sent] == ["long", "short", "next"]
    assert server.sent[2][0] - began_ms == (2 * COPY_MS if look_ahead else first)
    assert server.switches == ["long", "short", "next"]  # each switch is reported once


def test_it_evicts_no_model_that_a_request_waits_for() -> None:
    server = Server(arena_mib=14)  # room for three models
    for name in ("other", "long", "short"):
        server.ask(name)
        server.run()
    server.sent.clear()
    waiting = [server.ask(name) for name in ("long", "short", "other", "next")]
    server.run(server.now_ms + 50.0)
    assert server.sent == []  # "long" and "short" are in use, and a request waits for "other"
    server.run()
    assert [name for _, name in server.sent] == ["next"]
    assert all(token in server.ends_ms for token in waiting)


def test_it_takes_the_place_of_an_idle_one() -> None:
    server = Server(arena_mib=14)
    for name in ("other", "long", "short"):
        server.ask(name)
        server.run()
    server.sent.clear()
    began_ms = server.now_ms
    for name in ("long", "short", "next"):
        server.ask(name)
    server.run()
    assert server.sent == [(began_ms, "next")]


def test_one_copy_at_a_time_is_sent_ahead() -> None:
    server = Server()
    began_ms = server.now_ms
    for name in ("long", "short", "next", "other"):
        server.ask(name)
    server.run()
    assert [(at - began_ms, name) for at, name in server.sent] == [
        (n * COPY_MS, name) for n, name in enumerate(("long", "short", "next", "other"))
    ]
