"""The checker of plain English (``lint/language.py``): it finds each habit that it forbids."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def language() -> ModuleType:
    spec = importlib.util.spec_from_file_location("language", ROOT / "lint/language.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_that_begin_without_subject_or_verb(
    language: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        '"""Fair queue over tenants."""\n'
        'def a() -> None:\n    """Of a result."""\n'
        'def b() -> None:\n    """Return the result."""\n'
        'class C:\n    """Who waits."""\n'
        f"x = 1  # fmt: {'skip'}\n"
    )
    assert [text for _, _, text in language.bad_docstrings(path)] == ["Of a result.", "Who waits."]
    assert [line for _, line, _ in language.fmt_skips(path)] == [8]


def test_sentences_of_a_page(language: ModuleType) -> None:
    page = "# A head\n\nIt has two sentences. The [second one](a.md) is here.\n\n```\nno code\n```"
    assert [*language.sentences(page)] == ["It has two sentences.", "The [second one] is here."]
