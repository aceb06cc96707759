"""Permissions of TCP clients without a key, with a key, and with each role, on real sockets."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frontend_rig import DEADLINE_S, FakeScheduler, until
from process_tools import command

import pipeswitch as ps
from pipeswitch.base.roles import MODEL_FACTS, Role, in_order
from pipeswitch.extras.curve.curve_keys import KeyFolder, make_pair
from pipeswitch.frontend.transport.clients import Counters
from pipeswitch.frontend.verbs import VERBS
from pipeswitch.scheduler.state.events import Publish
from pipeswitch.testing import RunningServer, server
from pipeswitch.wire.frames import decode_reply
from tests.raw_peer import ask, raw_peer

X = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def nobodys() -> Iterator[RunningServer]:
    with server(http=True, environment={"PIPESWITCH_GATEWAY__ROLES": ""}) as running:
        yield running


DIGEST = "0" * 64
BODIES: dict[str, dict[str, Any]] = {
    "register": {"source": "torchvision:resnet18"},
    "put": {"digest": DIGEST, "size_bytes": 1, "kind": "bundle"},
    "train": {"name": "t", "entry": "pkg.train:main"},
    "job": {"name": "t", "action": "show"},
    "publish": {"job": "t"},
    "cancel": {"id": "none"},
    "ping": {"deep": True},
}
SILENT = ("hello", "prefetch", "infer", "ping", "caller")  # other tests try these verbs


@pytest.mark.parametrize("role", [*Role, None])
def test_without_a_key_a_verb_is_served_when_its_role_is_the_addresss(
    tmp_path: Path, role: Role | None
) -> None:
    roles = () if role is None else (role.value,)  # None means no role, not even infer
    fake = FakeScheduler(tmp_path, tcp_roles=roles, allow_code=("pkg.*",))
    fake.announce("m")
    try:
        with raw_peer(fake.listeners.tcp.address) as sock:
            session = ask(sock, op="hello").session
            for number, (verb, row) in enumerate(VERBS.items()):
                needed = row.role
                if verb in SILENT:
                    continue
                fields = {"op": verb, "model": "m", "body": BODIES.get(verb, {})}
                before = len(fake.seen)
                reply = ask(sock, session=session, id=f"{number}", **fields)
                while reply.more and verb != "events":
                    reply = decode_reply(sock.hear())
                is_denied = reply.error is not None and reply.error.type == "PermissionDenied"
                roles_given = () if role is None else (Role.INFER, role)
                assert is_denied == (needed not in roles_given), (verb, reply.error)
                if is_denied:
                    assert reply.error.data["role"] == needed
                    role_names = ",".join(in_order({*roles_given, needed}))
                    assert f"--tcp-roles {role_names}" in reply.error.hint
                    assert len(fake.seen) == before
    finally:
        fake.close()


class Keyed:
    """A server that requires keys, and its clients by name."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = KeyFolder(folder / "keys").open()
        self.server_key = self.folder.make_server().public.decode()
        self.secrets = folder
        self.admit("first")
        self.fake = FakeScheduler(folder, auth="keys", **{"tcp_roles": ("infer",), **options})
        self.fake.announce("m")

    def admit(self, name: str, *roles: str) -> None:
        self.folder.admit(name, make_pair(name, self.secrets)[1], roles)

    def client(self, name: str) -> ps.Client:
        return ps.Client(
            self.fake.listeners.tcp.address,
            key=self.secrets / f"{name}.key_secret",
            server_key=self.server_key,
        )


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    rig = Keyed(tmp_path)
    yield rig
    rig.fake.close()


def denied(role: Role, call: Callable[[], Any]) -> ps.PermissionDenied:
    with pytest.raises(ps.PermissionDenied) as caught:
        call()
    assert caught.value.role == role
    return caught.value


def test_a_key_without_a_role_may_ask_and_the_error_says_what_gives_more(keyed: Keyed) -> None:
    with keyed.client("first") as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
        assert client.about()["roles"] == ["infer"]
        error = denied(Role.OPERATE, lambda: client.load("m"))
        assert "pipeswitch keys roles first --role infer --role operate" in error.hint
        assert 'key "first" has infer' in str(error)


def test_a_role_that_is_given_or_taken_counts_for_a_client_that_is_in(keyed: Keyed) -> None:
    with keyed.client("first") as client:
        denied(Role.OPERATE, client.jobs)
        keyed.folder.give_roles("first", ["operate"])
        until(lambda: client.about()["roles"] == ["infer", "operate"])
        until(lambda: next(iter(keyed.fake.tcp.sessions.clients.values())).principal.may_operate)
        assert client.jobs() == []
        keyed.folder.give_roles("first", [])
        until(
            lambda: not next(iter(keyed.fake.tcp.sessions.clients.values())).principal.may_operate
        )
        denied(Role.OPERATE, client.jobs)


def test_the_owners_socket_needs_no_role(keyed: Keyed) -> None:
    with ps.Client(keyed.fake.listeners.ipc.address) as owner:
        assert owner.about()["roles"] == [role.value for role in Role]
        assert owner.jobs() == []


def heard(fake: FakeScheduler, reader: Any, within_s: float = DEADLINE_S) -> bool:
    """Publish a record; return True if the reader gets it in time."""
    fake.post(Publish(topic="job.t", body={}))
    return reader.take(within_s) is not None


def test_events_reach_operators_alone(keyed: Keyed) -> None:
    keyed.admit("operator", "operate")
    with keyed.client("operator") as client:
        assert heard(keyed.fake, client.subscribe())
    with keyed.client("first") as client:
        denied(Role.OPERATE, client.events)


def test_a_reader_whose_role_is_taken_hears_no_more(keyed: Keyed) -> None:
    keyed.admit("operator", "operate")
    with keyed.client("operator") as client:
        reader = client.subscribe("job.")
        assert heard(keyed.fake, reader)
        keyed.folder.give_roles("operator", [])
        until(
            lambda: (
                not any(
                    one.principal.may_operate for one in keyed.fake.tcp.sessions.readers.clients
                )
            )
        )
        assert not heard(keyed.fake, reader, 0.3)


def test_without_keys_events_are_told_where_clients_may_operate(tmp_path: Path) -> None:
    for number, roles in enumerate((("infer",), ("infer", "operate"))):
        fake = FakeScheduler(tmp_path / str(number), tcp_roles=roles)
        try:
            with ps.Client(fake.listeners.tcp.address) as client:
                if "operate" in roles:
                    assert heard(fake, client.subscribe())
                else:
                    denied(Role.OPERATE, client.subscribe)
        finally:
            fake.close()


def test_a_factory_and_a_pin_need_their_own_roles(tmp_path: Path) -> None:
    fake = FakeScheduler(tmp_path, tcp_roles=("infer", "register"), allow_code=("pkg.*",))
    try:
        with ps.Client(fake.listeners.tcp.address) as client:
            assert not client.about()["accepts_code"]
            denied(Role.CODE, lambda: client.register("f", "pkg.models:make"))
            denied(Role.OPERATE, lambda: client.register("r", "torchvision:resnet18", pin=True))
            assert client.register("r", "torchvision:resnet18")["model"] == "r"
    finally:
        fake.close()


def test_what_has_no_effect_any_more_is_said_at_the_start(tmp_path: Path) -> None:
    keyed = Keyed(tmp_path)
    keyed.fake.close()
    old = keyed.folder.clients_path / "first.key"
    old.write_text(f'curve\n    public-key = "{keyed.folder.clients()["first"].decode()}"\n')
    keyed.admit("new", "register")
    fake = FakeScheduler(tmp_path, auth="keys")
    (warning,) = fake.listeners.warnings
    assert "infer alone: first;" in warning
    assert f"pipeswitch keys --keys-dir {keyed.folder.path} roles NAME --role register" in warning
    fake.close()
    fake = FakeScheduler(tmp_path / "open", tcp_roles=("infer",), allow_code=("pkg",))
    (warning,) = fake.listeners.warnings
    assert "--tcp-roles infer,register,code" in warning
    fake.close()


# ---- the whole server ----------------------------------------------------------------------------


def linear(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 4)


def test_by_default_a_tcp_client_asks_and_lists_and_does_nothing_else(tmp_path: Path) -> None:
    with server(state_dir=tmp_path) as running, running.client() as owner:
        owner.register("m", linear(0), example_inputs=torch.zeros(1, 4))
        with running.client(tcp=True) as stranger:
            assert stranger.infer("m", X).outputs
            (row,) = stranger.models()
            assert row == stranger.show("m")
            assert set(row) == MODEL_FACTS - {"steps", "embeds"}
            assert stranger.signature("m").inputs
            assert stranger.ping(deep=True)["ready"]
            stats = stranger.stats()
            assert set(stats) == set(Counters().as_dict())
            assert stats["ok"] >= 5
            for role, call in (
                (Role.REGISTER, lambda: stranger.unregister("m")),
                (
                    Role.REGISTER,
                    lambda: stranger.register("n", linear(1), example_inputs=torch.zeros(1, 4)),
                ),
                (Role.OPERATE, stranger.ps),
                (Role.OPERATE, stranger.jobs),
                (Role.OPERATE, stranger.plan),
                (Role.OPERATE, stranger.stop_server),
                (Role.CODE, lambda: stranger.train("pkg.train:main")),
            ):
                denied(role, call)
        refused = command("--host", running.tcp_address, "unregister", "m")
        assert refused.returncode == 1
        assert '"register"' in refused.stderr
        assert "--tcp-roles infer,register" in refused.stderr.replace("\n", " ")
        listed = command("--host", running.tcp_address, "models", "--json")
        assert [one["name"] for one in json.loads(listed.stdout)] == ["m"]
        assert command("--host", running.tcp_address, "models").returncode == 0
        assert command("--host", running.tcp_address, "show", "m").returncode == 0
        assert owner.infer("m", X).outputs


@pytest.mark.parametrize(
    "path",
    ["/v2/models", "/metrics", "/v2/models/m", "/v2/models/m/ready", "/api/jobs", "/v1/models"],
)
def test_an_empty_list_of_roles_is_nobody_over_http(nobodys: RunningServer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{nobodys.http_address}{path}", timeout=20)
    assert refused.value.code == 403
    assert b"has none" in refused.value.read()
    with urllib.request.urlopen(
        f"http://{nobodys.http_address}/v2/health/ready", timeout=20
    ) as answer:
        assert answer.status == 200


def test_a_client_takes_away_its_own_models_also_after_a_restart(tmp_path: Path) -> None:
    keys, secrets = KeyFolder(tmp_path / "keys").open(), tmp_path
    server_key = keys.make_server().public.decode()
    for name, roles in (("a", ["register"]), ("b", ["register"]), ("c", ["operate", "register"])):
        keys.admit(name, make_pair(name, secrets)[1], roles)
    options: dict[str, Any] = {
        "state_dir": tmp_path / "state",
        "args": ("--auth", "keys", "--keys-dir", str(keys.path)),
    }

    def client(running: RunningServer, name: str) -> ps.Client:
        secret = secrets / f"{name}.key_secret"
        return running.client(tcp=True, key=secret, server_key=server_key)

    example = torch.zeros(1, 4)
    with server(**options) as running, client(running, "a") as a, running.client() as owner:
        a.register("of-a", linear(0), example_inputs=example)
        a.register("too", linear(1), example_inputs=example)
        owner.register("of-owner", linear(2), example_inputs=example)
        assert {row["name"] for row in a.models() if "source" in row} == {"of-a", "too"}
        assert owner.show("of-a")["tenant"] == "a"
    with server(**options) as running, client(running, "b") as b, client(running, "a") as a:
        for name in ("of-a", "of-owner"):
            error = denied(Role.OPERATE, lambda name=name: b.unregister(name))  # type: ignore[misc]
            assert "another client's" in error.message
        denied(Role.OPERATE, lambda: a.unregister("of-owner"))
        a.unregister("of-a")
        with client(running, "c") as c:
            c.unregister("too")
            c.unregister("of-owner")
            assert c.models() == []
