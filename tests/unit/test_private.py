"""Trusted folders and files: they are refused if another user owns them or may write to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeswitch.base.config import load
from pipeswitch.base.errors import ConfigError
from pipeswitch.controller.folders import StateDir
from pipeswitch.controller.main import serve
from pipeswitch.extras.curve.curve_keys import KeyFolder, client_keys, make_pair

OTHER_USER = 4711
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
TRUSTED = (
    "journal.sqlite",
    "commits/job/commit.json",
    "models/abc/program.bundle",
    "models/abc/manifest.json",
    "uploads/abc.bundle",
    "profiles/m.abc.cpu.json",
    "keys/clients/a.key",
)


def make(path: Path) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text("x")
    return path


@pytest.fixture
def places(tmp_path: Path) -> StateDir:
    places = StateDir(root=tmp_path / "state")
    places.create()
    places.sweep("1")
    return places


def test_a_state_directory_that_others_may_write_is_refused(places: StateDir) -> None:
    places.root.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777") as caught:
        places.create()
    assert f"chmod -R go-w {places.root}" in caught.value.hint
    assert caught.value.exit_code == 2
    places.root.chmod(0o755)
    places.create()


@pytest.mark.parametrize("name", TRUSTED)
def test_a_file_in_it_that_others_may_write_is_refused(places: StateDir, name: str) -> None:
    path = make(places.root / name)
    places.root.chmod(0o755)
    for folder in path.relative_to(places.root).parents:
        (places.root / folder).chmod(0o755)
    path.chmod(0o662)
    with pytest.raises(ConfigError, match="mode 0662"):
        places.create()
    path.parent.chmod(0o700)  # other users cannot reach the file
    places.create()


@pytest.mark.parametrize("name", TRUSTED)
@as_root
def test_a_file_in_it_that_another_user_put_there_is_refused(places: StateDir, name: str) -> None:
    path = make(places.root / name)
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(ConfigError, match=f"user {OTHER_USER}") as caught:
        places.create()
    assert f"chown -R {os.getuid()} {path}" in caught.value.hint


@as_root
def test_a_state_directory_of_another_user_is_refused(places: StateDir) -> None:
    os.chown(places.root, OTHER_USER, -1)
    with pytest.raises(ConfigError, match=f"user {OTHER_USER}"):
        places.create()


def test_a_link_in_it_is_refused(places: StateDir, tmp_path: Path) -> None:
    (places.commits / "job").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        places.create()


def test_a_server_does_not_start_from_such_folders(places: StateDir, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    flags = {"server": {"state_dir": str(places.root)}, "profiles_dir": str(profiles)}
    for folder in (profiles, places.root):
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="mode 0777"):
            serve(load(flags={**flags, "device": {"name": "cpu"}}, environ={}))
        folder.chmod(0o700)


@as_root
def test_a_clients_key_that_another_user_put_there_admits_nobody(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys").open()
    make_pair("a", tmp_path)
    (tmp_path / "a.key").rename(folder.clients_path / "a.key")
    os.chown(folder.clients_path / "a.key", OTHER_USER, -1)
    with pytest.raises(ConfigError, match=f"user {OTHER_USER}"):
        folder.open()


def test_a_configuration_file_that_is_come_across_must_not_be_others_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pipeswitch.toml"
    path.write_text("[workers]\nstandby = 3\n")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="another user"):
        load(environ={})
    assert load("pipeswitch.toml", environ={}).workers.standby == 3  # the user named the file
    path.chmod(0o644)
    assert load(environ={}).workers.standby == 3


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_clients_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    secret, public = make_pair("a", tmp_path)
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        client_keys(str(secret), public.decode())
    assert caught.value.hint == f"chmod 600 {secret}"
    secret.chmod(0o400)
    keys = client_keys(str(secret), public.decode())
    assert keys.public == public
