"""The watched folder: what two looks decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.extras.folder.watch import Places, decide, places, source_in

ONE, GROWN, TWO = (1, (("a", 3, 1),)), (1, (("a", 9, 2),)), (2, (("a", 3, 1),))


@pytest.mark.parametrize(
    ("looks", "done", "gone", "new"),
    [
        (({}, {"a": ONE}), ({}, {}), [], []),  # it may still be written
        (({"a": ONE}, {"a": GROWN}), ({}, {}), [], []),
        (({"a": ONE}, {"a": ONE}), ({}, {}), [], ["a"]),
        (({"a": ONE}, {"a": ONE}), ({"a": ONE}, {}), [], []),
        (({"a": TWO}, {"a": TWO}), ({"a": ONE}, {}), [], ["a"]),
        (({"a": TWO}, {"a": TWO}), ({"a": ONE}, {"a": TWO}), [], []),  # not tried again
        (({"a": GROWN}, {"a": GROWN}), ({}, {"a": ONE}), [], ["a"]),  # changed since
        (({"a": TWO}, {}), ({"a": ONE}, {"a": TWO, "b": ONE}), ["a", "b"], []),
    ],
)
def test_a_stable_place_is_new_once_and_a_missing_name_has_gone(
    looks: tuple[Places, Places], done: tuple[Places, Places], gone: list[str], new: list[str]
) -> None:
    assert decide(*looks, *done) == (gone, new)


def test_the_highest_version_is_looked_at_and_what_lies_elsewhere_is_refused(
    tmp_path: Path,
) -> None:
    for name in ("net/9/w.bundle", "net/10/w.bundle", "flat/w.bundle", ".git/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {name: (place[0], len(place[1])) for name, place in places(tmp_path).items()}
    assert found == {"net": (10, 1), "flat": (0, 0)}
    assert source_in(tmp_path / "net/10").name == "w.bundle"
    (tmp_path / "net/10/w.gguf").touch()
    for place in ("net/10", "flat/0"):
        with pytest.raises(InvalidInput):
            source_in(tmp_path / place)
