"""Addresses that a gateway may listen on; others are refused before a socket is created."""

from __future__ import annotations

import selectors
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.config import GatewayConfig
from pipeswitch.base.errors import ConfigError
from pipeswitch.controller.gateway_process import Gateway
from pipeswitch.wire.tokens import OWNER_FILE, owner_token

TOKENS = "ops 0123456789abcdef operate"


def opened(folder: Path, **settings: Any) -> Gateway:
    log = folder / "log"
    with selectors.DefaultSelector() as selector:
        gateway = Gateway(GatewayConfig(**{"grpc": "off", **settings}), selector, folder, log)
        gateway.open()
    return gateway


def tokens(folder: Path) -> str:
    path = folder / "tokens"
    path.write_text(TOKENS)
    path.chmod(stat.S_IRUSR)
    return str(path)


def test_off_there_is_nothing(tmp_path: Path) -> None:
    gateway = opened(tmp_path, http="off")
    assert (gateway.addresses, list(tmp_path.iterdir())) == ([], [])
    gateway.start("ipc://nowhere")
    assert gateway.wait_s() is None


def test_who_names_one_address_gets_no_other_and_is_told_its_flag(tmp_path: Path) -> None:
    for named, other in (("http", "grpc"), ("grpc", "http")):
        gateway = opened(tmp_path, **{named: "127.0.0.1:0", other: "auto"})
        first, note = gateway.addresses
        assert (first.partition(":")[0], note) == (named, f"(--{other} HOST:PORT: none)")
        gateway.stop()


def test_a_second_server_that_named_no_address_has_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        defaults = {"http": address, "grpc": address}
        monkeypatch.setattr("pipeswitch.controller.gateway_process.DEFAULTS", defaults)
        gateway = opened(tmp_path, grpc="auto")
        addresses = [one.partition("://")[2] for one in gateway.addresses]
        assert len({address, *addresses}) == 3
        assert gateway.warnings == []
        gateway.stop()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:8000", "[::]:8000", "gpu1:8000"])
def test_others_machines_need_tokens_and_tls_or_a_proxy(tmp_path: Path, address: str) -> None:
    for protocol in ("http", "grpc"):
        with pytest.raises(ConfigError, match="need tokens"):
            opened(tmp_path, **{"http": "off", protocol: address})
    with pytest.raises(ConfigError, match="unencrypted"):
        opened(tmp_path, http=address, tokens=tokens(tmp_path))


def test_behind_a_proxy_callers_need_tokens_on_loopback_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need tokens"):
        opened(tmp_path, http="127.0.0.1:0", behind_proxy=True)


def test_what_cannot_be_started_is_tried_again_ever_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pipeswitch.controller.gateway_process.subprocess.Popen", refuses)
    now = [0.0]
    monkeypatch.setattr("pipeswitch.controller.gateway_process.time.monotonic", lambda: now[0])
    with selectors.DefaultSelector() as selector:
        gateway = Gateway(GatewayConfig(http="off", grpc="off"), selector, tmp_path, tmp_path / "l")
        gateway._spawn()
        waits = []
        for _ in range(8):
            wait_s = gateway.wait_s()
            assert wait_s is not None
            waits.append(wait_s)
            gateway.look()  # too early, so it has no effect
            assert gateway.wait_s() == wait_s
            now[0] += wait_s
            gateway.look()
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        gateway.stop()
        assert gateway.wait_s() is None


def test_files_that_are_not_good_are_refused(tmp_path: Path) -> None:
    for settings, words in (
        ({"tokens": str(tmp_path / "none")}, "No such file"),
        ({"tls_cert": "c.pem"}, "need each other"),
        ({"tls_cert": "c.pem", "tls_key": "k.pem"}, "c.pem"),
    ):
        with pytest.raises(ConfigError, match=words):
            opened(tmp_path, http="127.0.0.1:0", **settings)


def test_the_owners_token_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    gateway = opened(tmp_path, http="127.0.0.1:0")
    path = tmp_path / OWNER_FILE
    assert gateway.facts == {"http": gateway.addresses[0], "token_file": str(path)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = owner_token(path)
    assert len(token) >= 32
    gateway.stop()
    opened(tmp_path, http="127.0.0.1:0").stop()
    assert owner_token(path) == token  # so that an open page works with the next server
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        opened(tmp_path, http="127.0.0.1:0")
    path.unlink()
    path.touch(0o600)
    with pytest.raises(ConfigError, match="has no token"):
        opened(tmp_path, http="127.0.0.1:0")
