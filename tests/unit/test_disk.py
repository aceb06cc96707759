"""Tenants' shares of the state directory's disk, and writes that are refused beforehand."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeswitch.base.units import SizeSpec
from pipeswitch.commits.commit_files import write_commit
from pipeswitch.frontend.disk import Disk


def size(size_bytes: int) -> SizeSpec:
    return SizeSpec(size_bytes=size_bytes)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, size(1000), size(400))


def write(path: Path, size_bytes: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size_bytes))
    return path


def test_programs_uploads_and_commits_count_and_nothing_else(disk: Disk, tmp_path: Path) -> None:
    assert disk.left_bytes("") == 1000
    write(tmp_path / "models" / "d" / "program.bundle", 100)
    write(tmp_path / "models" / ".build-7-x" / "program.bundle", 10)
    write(tmp_path / "models" / ".build-gone-e" / "program.bundle", 500)
    write(tmp_path / "uploads" / "u.bundle", 200)
    write(tmp_path / "commits" / "job" / "commit-1-0.safetensors", 300)
    write(tmp_path / "logs" / "server.log", 5000)
    (tmp_path / "uploads" / "link").symlink_to(tmp_path / "logs" / "server.log")
    assert disk.left_bytes("") in range(1000 - 610 - 200, 1000 - 609)  # the link itself counts


def test_a_tenant_pays_for_its_programs_and_uploads_alone(disk: Disk, tmp_path: Path) -> None:
    program = write(tmp_path / "models" / "d" / "program.bundle", 100).parent
    write(tmp_path / "models" / "e" / "program.bundle", 100)
    write(tmp_path / "uploads" / "u.bundle", 50)
    disk.keep_program("m", "d", "a")
    disk.keep_program("also", "d", "b")
    disk.keep_program("n", "e", "")
    disk.keep_upload("u.bundle", "a")
    assert [disk.left_bytes(tenant) for tenant in ("a", "b", "c", "")] == [250, 300, 400, 750]
    assert disk.left_bytes("c", program="e") == 300
    disk.drop_program("m")
    assert (disk.left_bytes("a"), disk.digests()) == (350, {"d", "e"})
    shutil.rmtree(program)
    (tmp_path / "uploads" / "u.bundle").unlink()
    assert [disk.left_bytes(tenant) for tenant in ("a", "b", "")] == [400, 400, 900]


def test_a_refusal_has_the_numbers_and_says_what_to_remove(disk: Disk, tmp_path: Path) -> None:
    assert disk.refusal("a", 400, "a program") is None
    error = disk.refusal("a", 401, "a program")
    assert (error.requested_bytes, error.largest_free_bytes, error.tenant) == (401, 400, "a")
    assert 'client "a" use 0 B of 400 B' in error.message
    assert "pipeswitch unregister" in error.hint
    write(tmp_path / "uploads" / "u.bundle", 900)
    error = disk.refusal("a", 101, "a program")
    assert (error.tenant, error.largest_free_bytes) == ("", 100)
    assert error.hint.endswith("[server] max_disk")


def test_auto_is_a_share_of_the_disk(tmp_path: Path) -> None:
    total_bytes = shutil.disk_usage(tmp_path).total
    auto = Disk(tmp_path, SizeSpec(), SizeSpec())
    assert auto.left_bytes("") == int(0.9 * total_bytes)
    assert auto.left_bytes("a") == int(0.5 * int(0.9 * total_bytes))


def test_a_half_written_commit_counts_until_it_is_removed(disk: Disk, tmp_path: Path) -> None:
    from pipeswitch.commits.commit_files import remove_unnamed

    folder = tmp_path / "commits" / "job"
    write_commit(folder, 1, memoryview(bytes(64)))
    whole = disk.left_bytes("")
    write(folder / "commit-2-1.safetensors.tmp", 300)
    assert disk.left_bytes("") == whole - 300
    for path in (folder, folder.with_name("none")):  # a full disk refuses a job's first commit, too
        remove_unnamed(path)
    assert disk.left_bytes("") == whole


def test_a_programs_folder_is_read_again_only_when_it_has_changed(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "models" / f"{number:064x}" for number in range(20)]
    for folder in folders:
        write(folder / "program.bundle", 10)
    assert disk.left_bytes("") == 800
    scanned: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (scanned.append(str(path)), scan(path))[1])
    assert disk.left_bytes("") == 800
    assert not {*scanned} & {*map(str, folders)}
    write(folders[3] / "derived.bundle", 7)
    shutil.rmtree(folders[4])
    assert disk.left_bytes("") == 803
    assert {*scanned} & {*map(str, folders)} == {str(folders[3])}
