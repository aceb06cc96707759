"""The threat model: it names only tests that exist, and all tests in ``test_neighbours`` files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/threat-model.md").read_text("utf-8")
CLASSES = TEXT.partition("## Classes of weakness")[2].partition("\n## ")[0]
MIN_CLASSES = 20


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE))


FILES = {
    path.relative_to(ROOT / "tests").as_posix(): names_in(path)
    for path in (ROOT / "tests").rglob("test_*.py")
}


def files_called(name: str) -> list[set[str]]:
    """Return the tests of each file with this name or with a path that ends with it."""
    return [tests for path, tests in FILES.items() if path == name or path.endswith(f"/{name}")]


def test_every_test_the_threat_model_names_exists() -> None:
    everywhere = set().union(*FILES.values())
    named = re.findall(r"`((?:unit/|process/)?test_[^`]*)`", TEXT)
    assert len(named) > 100
    for name in named:
        file, _, test = name.rpartition("::")
        if file:
            assert any(test in text for text in files_called(file)), name
        elif name.endswith(".py"):
            assert files_called(name), name
        else:
            assert name in everywhere, name


def test_every_class_of_weakness_has_its_test_or_the_reason_why_not() -> None:
    tried, _, without = CLASSES.partition("Classes without a test")
    rows = re.findall(r"^- \*(.+?)\*: (.+)$", tried, re.MULTILINE)
    assert len(rows) == tried.count("\n- ") >= MIN_CLASSES
    assert all(re.search(r"\. `[^`]+::test_\w+`(, `[^`]+::test_\w+`)*$", row[1]) for row in rows)
    assert re.findall(r"^- \*.+?\*: \S", without, re.MULTILINE)


def test_every_test_of_a_neighbours_weakness_is_in_the_threat_model() -> None:
    neighbours = {path: tests for path, tests in FILES.items() if "test_neighbours" in path}
    assert len(neighbours) == 3
    for path, tests in neighbours.items():
        for test in tests:
            assert f"`{Path(path).name}::{test}`" in CLASSES, f"{path}::{test}"
