"""The watched folder: what two looks decide."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, ModelNotFound
from pipeswitch.extras.folder.watch import TRIAL, Folder, Places, decide, places, source_in

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


class Server:
    """Client of a server without models' bytes; it refuses sources whose file is empty."""

    def __init__(self, root: Path) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.reports: list[tuple[str, str]] = []
        self.folder = Folder(
            root, root.parent / "state", self, lambda *words: self.reports.append(words)
        )

    def looks(self) -> None:
        self.folder.look()
        self.folder.look()

    def models(self, *, versions: bool) -> list[dict[str, Any]]:
        return [*self.rows.values()]

    def unregister(self, name: str) -> None:
        if name not in self.rows:
            raise ModelNotFound(name)
        if self.rows[name]["state"] == "stuck":
            raise AlreadyExists(name)
        del self.rows[name]

    def register(self, name: str, source: str, **options: Any) -> dict[str, Any]:
        digest = Path(source.removeprefix("hf:")).read_text()
        if not digest or self.rows.get(name, {"digest": digest})["digest"] != digest:
            raise AlreadyExists(f"{name} cannot be {source}")
        row = {"name": name, "state": "ready", "digest": digest, "priority": "normal"}
        options["pinned"] = options.pop("pin", False)
        return self.rows.setdefault(name, {**row, "aliases": [], **options})


@pytest.fixture
def server(tmp_path: Path) -> Server:
    put(tmp_path / "models/keep/1", "keep")
    put(tmp_path / "models/m/1", "one")
    return Server(tmp_path / "models")


def put(version: Path, data: str) -> None:
    version.mkdir(parents=True, exist_ok=True)
    (version / "m.gguf").write_text(data)


@pytest.mark.parametrize("state", ["storing", "stuck"])
def test_a_model_that_starts_leaves_or_is_replaced_later(
    server: Server, tmp_path: Path, state: str
) -> None:
    server.looks()
    server.rows["m"]["state"] = state
    put(tmp_path / "models/m/2", "two")
    if state == "stuck":
        shutil.rmtree(tmp_path / "models/m")
    for _ in range(3):
        server.looks()
    assert server.rows["m"]["digest"] == "one"
    assert len(server.reports) == (state == "stuck")
    server.rows["m"]["state"] = "ready"
    server.looks()
    assert server.rows.get("m", {}).get("digest") == {"storing": "two"}.get(state)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_users_model_stays_when_the_folder_goes(
    server: Server, tmp_path: Path, is_first: bool
) -> None:
    if not is_first:
        server.looks()
        server.unregister("m")
    source = tmp_path / "m.gguf"
    source.write_text("one" if is_first else "another")
    server.register("m", str(source))
    server.looks()
    shutil.rmtree(tmp_path / "models/m")
    shutil.rmtree(tmp_path / "models/keep")
    (tmp_path / "models/other").mkdir()
    server.looks()
    server.looks()
    assert [*server.rows] == ["m"]


def test_a_program_takes_over_the_options_and_a_refused_one_leaves_the_served(
    server: Server, tmp_path: Path
) -> None:
    server.looks()
    kept = {"priority": "high", "aliases": ["gpt"], "pinned": True}
    server.rows["m"] |= kept
    put(tmp_path / "models/m/1", "")  # in place
    server.looks()
    assert server.rows["m"]["digest"] == "one"
    ((name, text),) = server.reports
    assert (name, TRIAL in text) == ("m", False)
    put(tmp_path / "models/m/2", "two")
    server.looks()
    assert server.rows["m"].items() >= {**kept, "digest": "two"}.items()
    assert server.rows.keys() == {"keep", "m"}


def test_one_faulty_name_is_reported_once_and_hides_no_other(
    server: Server, tmp_path: Path
) -> None:
    server.looks()
    shutil.rmtree(tmp_path / "models/m/1")
    (tmp_path / "models/m/1").touch()  # unreadable as a folder
    (tmp_path / "models/keep: x").mkdir()
    (tmp_path / "models/b\udcff").mkdir()
    put(tmp_path / "models/new/1", "new")
    put(tmp_path / "models/new/01", "")
    put(tmp_path / "models/new/\u0662", "")
    server.looks()
    server.looks()
    assert server.rows.keys() == {"keep", "m", "new"}
    assert len(server.reports) == 3
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
