"""The watched folder: what two looks decide, and what they do to the models of a server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, PermissionDenied
from pipeswitch.extras.folder.watch import Folder, decide, places, source_in

ONE, GROWN, TWO = (1, (("a", 3, 1),)), (1, (("a", 9, 2),)), (2, (("a", 3, 1),))


def test_a_stable_place_is_new_once_and_a_name_missing_twice_has_gone() -> None:
    now = {"known": ONE, "new": ONE, "next": TWO, "refused": TWO, "changed": GROWN, "grown": GROWN}
    before = {**now, "grown": ONE, "moved": ONE}
    served = {"known": ONE, "next": ONE, "refused": ONE, "moved": ONE, "gone": ONE}
    refused = {"refused": TWO, "changed": ONE, "gone": TWO, "gone too": ONE}
    now["written"] = ONE
    assert decide(before, now, served, refused) == ["gone", "gone too", "new", "next", "changed"]
    assert not decide(None, now, served, refused), "at the start, or it was unreadable"


class Server(dict[str, dict[str, Any]]):
    """Client of a server with these rows. It refuses empty sources, and to remove an ``error``."""

    def models(self, *, versions: bool) -> list[dict[str, Any]]:
        return [*self.values()]

    def unregister(self, name: str) -> None:
        if error := self.get(name, {}).get("error"):
            raise error
        self.pop(name, None)

    def register(self, name: str, source: str, pin: bool = False, **options: Any) -> dict[str, Any]:
        if not (digest := Path(source.removeprefix("hf:")).read_text()):
            raise InvalidInput(name)
        row = {"name": name, "state": "ready", "digest": digest, "pinned": pin}
        return self.setdefault(name, {**row, "priority": "normal", "aliases": [], **options})


def test_each_model_is_replaced_or_removed_when_it_may_be(tmp_path: Path) -> None:
    server, reports = Server(), list[tuple[str, str]]()
    folder = Folder(tmp_path, tmp_path / ".state", server, lambda *one: reports.append(one))

    def looks(*versions: str, data: str = "one") -> set[str]:
        for version in versions:
            (tmp_path / version).mkdir(parents=True, exist_ok=True)
            (tmp_path / version / "m.gguf").write_text(data)
        folder.look()
        folder.look()
        return {*server}

    looks("keep/1", "m/1", "starts/1", "denied/1", "later/1")
    server["user"] = {**server["keep"], "name": "user"}  # registered by hand, before and after
    looks("user/1")
    server["later"]["digest"] = "another"
    row = server["m"] = {**server["m"], "priority": "high", "aliases": ["gpt"], "pinned": True}
    server["starts"]["state"], server["denied"]["error"] = "storing", PermissionDenied("no owner")
    for name in ("keep/1", "starts", "denied", "later", "user"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "keep/1").touch()  # unreadable as a folder
    looks("m/1", "keep: x/1", "b\udcff/1", "m/02", "m/\u0662", data="")
    assert (len(looks()), server["m"]) == (6, row), "a model stays after a refusal"
    assert [name for name, text in sorted(reports) if text.isascii()] == ["", "", "", "", "m"]
    server["m"] = {**row, "error": AlreadyExists("still being registered")}
    server["starts"]["state"], server["denied"]["error"] = "ready", None
    assert looks("m/2", data="two") == {"keep", "m", "later", "user"}
    server["m"] = row
    assert (len(looks()), server["m"]) == (4, {**row, "digest": "two"})


def test_the_highest_version_is_found_and_files_elsewhere_are_refused(tmp_path: Path) -> None:
    for name in ("net/9/w.bundle", "net/10/w.bundle", "net/10/LICENSE", "flat/w.bundle", ".git/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {name: (place[0], len(place[1])) for name, place in places(tmp_path, {}, set()).items()}
    assert found == {"net": (10, 1), "flat": (0, 0)}
    assert source_in(tmp_path / "net/10").name == "w.bundle"
    (tmp_path / "net/10/w.gguf").touch()
    for place in ("net/10", "flat/0"):
        with pytest.raises(InvalidInput):
            source_in(tmp_path / place)
