"""Aliases: further names of one model, which the scheduler keeps and the frontend resolves."""

from __future__ import annotations

from typing import Any

import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, PermissionDenied, ServerUnavailable
from pipeswitch.extras.stages.chain_registry import ChainRequest, Chains
from pipeswitch.extras.stages.chains import ChainStep
from pipeswitch.frontend.announced_models import AnnouncedModels
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.scheduler.state import events as ev
from tests.unit.test_scheduler_rules import Rig, publish, register_net, trained, unregister


class Names(Rig):
    """Scheduler, with the aliases that its frontend and its journal have."""

    def __init__(self) -> None:
        self.models, self.journal = AnnouncedModels(1 << 20), dict[str, str]()
        super().__init__(parts=[Chains])

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        for command in commands:
            match command:
                case ev.ModelAvailable():
                    self.models.announce(command)
                case ev.ModelRemoved(model=model, failure=failure, aliases=aliases):
                    self.models.retract(model, failure, aliases)
                case ev.Journal(entry={"kind": "alias", "name": name, "model": model}):
                    self.journal[name] = model
                case ev.Journal(entry={"kind": "alias-gone", "name": name}):
                    self.journal.pop(name, None)

    def add(self, name: str, *aliases: str, **fields: Any) -> Any:
        """Register a new or registered model; return the error, or None."""
        token = self.ask_register(name, aliases=aliases, **fields)
        if builds := self.commands(ev.StartBuild):
            self.built(name, 4, builds[0].op_id)
            self.stored(name, builds[0].op_id)
            self.prepared()
        return self.error(token)

    def rows(self) -> dict[str, list[str]]:
        return {row["name"]: row["aliases"] for row in self.scheduler.listing.models()}


@pytest.fixture
def rig() -> Names:
    return Names()


def test_aliases_are_resolved_shown_and_kept_until_the_model_is_gone(rig: Names) -> None:
    assert rig.add("m", "gpt-4o", "gpt-3.5-turbo") is None
    both = {"gpt-4o": "m", "gpt-3.5-turbo": "m"}
    assert rig.models.aliases == rig.journal == both
    assert rig.add("m", "gpt-4o", "o1") is None  # another registration adds an alias
    assert [one.entry["name"] for one in rig.commands(ev.Journal)] == ["o1"]
    assert rig.rows() == {"m": ["gpt-4o", "gpt-3.5-turbo", "o1"]}
    assert rig.models.aliases == rig.journal == {**both, "o1": "m"}
    assert rig.error(unregister(rig, "gpt-4o")) is None  # removes the alias, but not the model
    assert rig.rows() == {"m": ["gpt-3.5-turbo", "o1"]}
    assert rig.models.aliases == rig.journal == {"gpt-3.5-turbo": "m", "o1": "m"}
    assert rig.error(unregister(rig, "m")) is None
    assert rig.models.aliases == rig.journal == {}
    assert rig.add("n", "o1") is None


def test_an_alias_that_comes_while_a_restored_model_is_stored_is_kept(rig: Names) -> None:
    _, op_id = rig.begin("m", aliases=("a",), is_known=True)  # "a" is in the journal already
    rig.built("m", 4, op_id)
    token = rig.ask_register("m", aliases=("b",))
    rig.stored("m", op_id)
    assert rig.error(token) is None
    assert (rig.models.aliases, rig.journal) == ({"a": "m", "b": "m"}, {"b": "m"})


def test_a_name_is_one_models(rig: Names) -> None:
    rig.add("m", "a")
    rig.add("n", "b")
    for name, aliases in (("a", ()), ("c", ("a",)), ("c", ("m",)), ("m", ("b",)), ("m", ("n",))):
        assert isinstance(rig.add(name, *aliases), AlreadyExists)
    token = rig.ask(ChainRequest, model="a", steps=(ChainStep(model="m"),))
    assert isinstance(rig.error(token), AlreadyExists)
    assert rig.rows() == {"m": ["a"], "n": ["b"]}
    assert isinstance(rig.add("m", *[f"x{number}" for number in range(16)]), InvalidInput)
    rig.begin("k", aliases=("x",))
    assert isinstance(rig.error(rig.ask_register("l", aliases=("x",))), AlreadyExists)
    unregister(rig, "k")  # ends its registration, so its alias is free
    assert rig.ask_register("l", aliases=("x",)) not in rig.answers  # the build runs


def test_only_its_owner_removes_an_alias(rig: Names) -> None:
    rig.add("m", "a", tenant="ada")
    token = rig.ask(ev.UnregisterRequest, model="a", tenant="bob")
    assert isinstance(rig.error(token), PermissionDenied)
    assert rig.models.aliases == {"a": "m"}


def test_an_alias_stands_for_the_current_version(rig: Names) -> None:
    register_net(rig)
    assert rig.add("net", "a", spec="spec", spec_digest="first") is None
    publish(rig, trained(rig))
    assert rig.models.current["net"].version == 2
    assert rig.models.aliases == rig.journal == {"a": "net"}
    unregister(rig, "net@2")
    assert (rig.models.current["net"].version, rig.models.aliases) == (1, {"a": "net"})


def test_a_model_that_cannot_be_restored_keeps_its_aliases(rig: Names) -> None:
    rig.handle(ev.CancelRequest(token=rig.ask_register("m", aliases=("a",), is_known=True)))
    assert rig.rows() == {"m": ["a"]}
    assert rig.models.aliases == {"a": "m"}, "a request by the alias reads why"
    assert isinstance(rig.add("n", "a"), AlreadyExists)
    unregister(rig, "m")
    assert rig.ask_register("n", aliases=("a",)) not in rig.answers


def test_a_request_for_a_failed_model_reads_why_until_the_model_is_back_or_gone(rig: Names) -> None:
    rig.scheduler.registry.names.mark_lost(ModelName("n"), "no file")  # an unusable entry
    rig.handle(ev.CancelRequest(token=rig.ask_register("m", is_known=True)))  # a failed restore
    for name, reason in (("m", "cancelled"), ("n", "no file")):
        with pytest.raises(ServerUnavailable, match=f'"{name}" is failed: .*{reason}') as failed:
            rig.models.find(name, 0, "")
        assert "register it again" in failed.value.hint
        with pytest.raises(ServerUnavailable, match=f'"{name}" is failed [(]reg'):
            rig.models.find(name, 0, "ada")  # only the owner reads the reason
    unregister(rig, "m")
    assert [*rig.models.failures] == ["n"]
    rig = Names()
    rig.scheduler.registry.names.mark_lost(ModelName("n"), "no file")
    assert rig.add("n") is None
    assert rig.models.find("n", 0, "").model == "n"
    assert not rig.models.failures
