"""The watched folder: what two looks decide."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, PermissionDenied
from pipeswitch.extras.folder.watch import Folder, Places, decide, places, source_in

ONE, GROWN, TWO = (1, (("a", 3, 1),)), (1, (("a", 9, 2),)), (2, (("a", 3, 1),))


@pytest.mark.parametrize(
    ("looks", "done", "names"),
    [
        ((None, {"a": ONE}), ({"b": ONE}, {}), []),  # the first look, and after an unreadable one
        (({}, {"a": ONE}), ({}, {}), []),  # it may still be written
        (({"a": ONE}, {"a": GROWN}), ({}, {}), []),
        (({"a": ONE}, {"a": ONE}), ({}, {}), ["a"]),
        (({"a": ONE}, {"a": ONE}), ({"a": ONE}, {}), []),
        (({"a": TWO}, {"a": TWO}), ({"a": ONE}, {}), ["a"]),
        (({"a": TWO}, {"a": TWO}), ({"a": ONE}, {"a": TWO}), []),  # not tried again
        (({"a": GROWN}, {"a": GROWN}), ({}, {"a": ONE}), ["a"]),  # changed since
        (({"a": TWO}, {}), ({"a": ONE}, {}), []),  # it may be moved
        (({}, {}), ({"a": ONE}, {"a": TWO, "b": ONE}), ["a", "b"]),
    ],
)
def test_a_stable_place_is_new_once_and_a_name_missing_twice_has_gone(
    looks: tuple[Places | None, Places], done: tuple[Places, Places], names: list[str]
) -> None:
    assert decide(*looks, *done) == names


class Server(dict[str, dict[str, Any]]):
    """Client of a server with these rows. It refuses empty sources, and to remove an ``error``."""

    def __init__(self, root: Path) -> None:
        self.root, self.reports = root, list[tuple[str, str]]()
        self.folder = Folder(
            root, root.parent / "state", self, lambda *one: self.reports.append(one)
        )
        self.looks(**{"keep/1": "keep", "m/1": "one"})

    def looks(self, **sources: str) -> None:
        for version, data in sources.items():
            (self.root / version).mkdir(parents=True, exist_ok=True)
            (self.root / version / "m.gguf").write_text(data)
        for _ in range(2):
            self.folder.look()

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


@pytest.mark.parametrize(
    ("row", "reports"),
    [
        ({"state": "storing"}, []),
        ({"error": AlreadyExists("still being registered")}, []),
        ({"error": PermissionDenied("no owner")}, ["keep", ""]),
    ],
)
def test_a_model_that_stays_is_removed_or_replaced_later(
    tmp_path: Path, row: dict[str, Any], reports: list[str]
) -> None:
    server = Server(tmp_path / "models")
    before = {name: server.pop(name) for name in ("keep", "m")}
    server |= {name: before[name] | row for name in before}
    shutil.rmtree(tmp_path / "models/m")
    server.looks(**{"keep/2": "two"})
    server.looks()
    assert ([name for name, _ in server.reports], server.keys()) == (reports, before.keys())
    server |= before
    server.looks()
    assert {one: server[one]["digest"] for one in server} == {"keep": "keep" if reports else "two"}


def test_a_users_model_stays_when_the_folder_goes(tmp_path: Path) -> None:
    server = Server(tmp_path / "models")
    server |= {name: {**server["m"], "name": name, "digest": "user"} for name in ("m", "n")}
    server.looks(**{"n/1": "user"})
    for name in ("m", "n"):
        shutil.rmtree(tmp_path / "models" / name)
    server.looks()
    assert server.keys() == {"keep", "m", "n"}


def test_a_program_takes_over_the_options_and_a_refused_one_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path / "models")
    row = server["m"] = {**server["m"], "priority": "high", "aliases": ["gpt"], "pinned": True}
    server.looks(**{"m/1": ""})  # in place
    assert (server["m"], len(server.reports)) == (row, 1)
    server.looks(**{"m/2": "two"})
    assert server == {"keep": server["keep"], "m": {**row, "digest": "two"}}


def test_a_faulty_name_is_reported_once_and_hides_no_other(tmp_path: Path) -> None:
    server = Server(tmp_path / "models")
    shutil.rmtree(tmp_path / "models/m/1")
    (tmp_path / "models/m/1").touch()  # unreadable as a folder
    sources = {f"{name}/1": "" for name in ("keep: x", "b\udcff", "new/01", "new/\u0662")}
    server.looks(**sources, **{"new/1": "new"})
    server.looks()
    assert ({*server}, len(server.reports)) == ({"keep", "m", "new"}, 3)
    assert all(not name and text.isascii() for name, text in server.reports)


def test_the_highest_version_is_looked_at_and_what_lies_elsewhere_is_refused(
    tmp_path: Path,
) -> None:
    for name in ("net/9/w.bundle", "net/10/w.bundle", "flat/w.bundle", ".git/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {name: (place[0], len(place[1])) for name, place in places(tmp_path, {}, set()).items()}
    assert found == {"net": (10, 1), "flat": (0, 0)}
    assert source_in(tmp_path / "net/10").name == "w.bundle"
    (tmp_path / "net/10/w.gguf").touch()
    for place in ("net/10", "flat/0"):
        with pytest.raises(InvalidInput):
            source_in(tmp_path / place)
