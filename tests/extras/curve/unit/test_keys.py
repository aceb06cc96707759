"""Keys on disk: their owners, the list of admitted keys, and refusals."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pipeswitch as ps
from pipeswitch.extras.curve.command import keys
from pipeswitch.extras.curve.curve_keys import (
    AllowList,
    KeyFolder,
    client_keys,
    make_pair,
    read_public,
)


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys").open()


def modes(path: Path) -> set[int]:
    return {stat.S_IMODE(one.stat().st_mode) for one in path.rglob("*") if one.is_file()}


def test_everything_the_server_keeps_is_its_owners_alone(folder: KeyFolder, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder.make_server()
        make_pair("a", tmp_path)
        folder.admit("a", read_public(str(tmp_path / "a.key")))
    finally:
        os.umask(before)
    assert modes(folder.path) == {0o600}
    assert stat.S_IMODE((tmp_path / "a.key_secret").stat().st_mode) == 0o600
    assert {stat.S_IMODE(d.stat().st_mode) for d in (folder.path, folder.clients_path)} == {0o700}


def test_a_server_key_that_others_may_read_is_refused(folder: KeyFolder) -> None:
    folder.make_server()
    (folder.path / "server.key_secret").chmod(0o640)
    with pytest.raises(ps.ConfigError, match="0640"):
        folder.server()


def test_a_link_to_a_folder_is_no_folder_of_keys(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "keys").symlink_to(tmp_path / "real")
    with pytest.raises(ps.ConfigError):
        KeyFolder(tmp_path / "keys").open()


def test_a_second_server_key_does_not_replace_the_first(folder: KeyFolder) -> None:
    first = folder.make_server()
    with pytest.raises(ps.AlreadyExists):
        folder.make_server()
    assert folder.server() == first


def test_a_secret_is_not_in_what_is_printed(folder: KeyFolder, tmp_path: Path) -> None:
    pair = folder.make_server()
    secret_file, _ = make_pair("a", tmp_path)
    own_keys = client_keys(str(secret_file), pair.public.decode())
    assert own_keys.secret.decode() not in repr(own_keys)
    assert pair.secret.decode() not in repr(pair)


def test_a_change_counts_at_the_next_look(folder: KeyFolder, tmp_path: Path) -> None:
    allowed = AllowList(folder)
    _, public = make_pair("a", tmp_path)
    for _ in range(20):  # the file system's clock may show no difference between changes
        assert not allowed.callback("pipeswitch", public)
        folder.admit("a", public)
        assert allowed.callback("pipeswitch", public)
        folder.revoke("a")


def test_a_folder_that_is_gone_admits_nobody(folder: KeyFolder, tmp_path: Path) -> None:
    _, public = make_pair("a", tmp_path)
    folder.admit("a", public)
    allowed = AllowList(folder)
    assert allowed.callback("pipeswitch", public)
    folder.clients_path.rename(tmp_path / "elsewhere")
    assert not allowed.standings()


def test_a_damaged_file_admits_nobody_and_hides_nobody(folder: KeyFolder, tmp_path: Path) -> None:
    _, public = make_pair("a", tmp_path)
    folder.admit("a", public)
    (folder.clients_path / "b.key").write_bytes(b"\0\xff public-key = 'short'")
    (folder.clients_path / "c.key").write_text('public-key = "short"')
    assert folder.clients() == {"a": public}


@pytest.mark.parametrize("name", ["../a", "a/b", "", "A", ".a", "a" * 65, "a\n"])
def test_a_name_that_is_no_name_is_refused(folder: KeyFolder, tmp_path: Path, name: str) -> None:
    _, public = make_pair("good", tmp_path)
    with pytest.raises(ps.InvalidInput):
        folder.admit(name, public)
    with pytest.raises(ps.InvalidInput):
        folder.revoke(name)
    with pytest.raises(ps.InvalidInput):
        make_pair(name, tmp_path)


@pytest.mark.parametrize("text", ["", "short", "x" * 39, "~" * 40, "é" * 20, "\x00" * 40, "x" * 41])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ps.InvalidInput):
        read_public(text)


def test_one_key_has_one_name_and_one_name_one_key(folder: KeyFolder, tmp_path: Path) -> None:
    _, public = make_pair("a", tmp_path)
    _, other = make_pair("b", tmp_path)
    folder.admit("a", public)
    folder.admit("a", public)  # admitting the same key again changes nothing
    for name, key in (("a", other), ("b", public)):
        with pytest.raises(ps.AlreadyExists):
            folder.admit(name, key)


def test_a_client_needs_both_keys(tmp_path: Path) -> None:
    secret_file, public = make_pair("a", tmp_path)
    for key, server_key in ((str(secret_file), ""), ("", public.decode())):
        with pytest.raises(ps.ConfigError):
            client_keys(key, server_key)
    with pytest.raises(ps.ConfigError):
        client_keys(str(tmp_path / "a.key"), public.decode())


def cli(*words: str) -> Any:
    result = CliRunner().invoke(keys, [*words], catch_exceptions=False, standalone_mode=False)
    assert (words[2] == "pair") == (result.stderr == "")  # it only writes the client's files
    assert result.stderr in ("", f"key folder: {words[1]}\n")
    return json.loads(result.stdout)


def test_the_commands_make_admit_list_and_revoke(tmp_path: Path) -> None:
    where = ("--keys-dir", str(tmp_path / "keys"))
    out = ("--out", str(tmp_path), "--json")
    server = cli(*where, "server", "--json")
    row = cli(*where, "client", "a", *out)
    assert row["server_key"] == server["server_key"]
    assert cli(*where, "server", "--show", "--json")["server_key"] == server["server_key"]
    pair = cli(*where, "pair", "b", *out)
    assert [row["name"] for row in cli(*where, "ls", "--json")] == ["a"]
    cli(*where, "admit", "b", pair["key"], "--json")
    assert [row["name"] for row in cli(*where, "ls", "--json")] == ["a", "b"]
    with pytest.raises(ps.AlreadyExists):
        cli(*where, "client", "a", "--out", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()  # no secret that nobody admits
    cli(*where, "revoke", "a", "--json")
    assert cli(*where, "ls", "--json") == [{"name": "b", "key": pair["key"], "roles": ["infer"]}]
    dashed = "-}TYWmW=i!x>lW(ZIUh<*5OH9(@:ytRP]5=LXaMk"  # "-" may begin a key, not only an option
    assert cli(*where, "admit", "c", dashed, "--json")["key"] == dashed
