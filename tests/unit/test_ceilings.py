"""Ceilings of the rooms (``lint/budgets.toml``), and the tool that guards them."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def budgets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("budgets", ROOT / "lint/budgets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_room_exceeds_its_ceiling_and_none_rises_at_nobodys_cost(budgets: ModuleType) -> None:
    assert not budgets.problems(), "shorten it, or: python lint/budgets.py --fit"


def test_every_folder_of_the_product_has_a_ceiling() -> None:
    table = tomllib.loads((ROOT / "lint/budgets.toml").read_text())["product"]
    folders = {path.parent for path in (ROOT / "pipeswitch").glob("*/__init__.py")}
    folders |= {path.parent for path in (ROOT / "pipeswitch/extras").glob("*/__init__.py")}
    names = {folder.relative_to(ROOT).as_posix() for folder in folders if not folder.is_symlink()}
    assert names | {"workers", "memory_daemon"} <= set(table)


def test_a_ceiling_rises_only_where_another_falls(budgets: ModuleType) -> None:
    before = {"product": {"a": {"lines": 100, "verbs": 3}, "reserve": {"lines": 50}}}
    moved = {"product": {"a": {"lines": 150, "verbs": 3}, "reserve": {"lines": 0}}}
    assert not [*budgets.raised(before, moved)]
    for row in ({"lines": 101, "verbs": 3}, {"lines": 100, "verbs": 4}):
        after = {"product": {"a": row, "reserve": {"lines": 50}}}
        assert len([*budgets.raised(before, after)]) == 1


def test_fitting_takes_from_the_reserve_and_keeps_the_sum(budgets: ModuleType) -> None:
    text = (ROOT / "lint/budgets.toml").read_text()
    tables = tomllib.loads(text)
    tables["product"]["reserve"]["lines"] += 2000
    tables["product"]["pipeswitch/wire"] |= {"lines": 50, "modules": 900}
    fitted = budgets.fit(tables)
    assert not [*budgets.over(fitted["product"])]
    assert budgets.sums(fitted) == budgets.sums(tables)
    assert tomllib.loads(budgets.written(text, fitted)) == fitted
