"""Seams of the engine: extras are found by their folders, and one that is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeswitch.base import extras
from pipeswitch.base.errors import ConfigError


def test_an_extra_is_a_folder_whose_modules_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more/own").mkdir(parents=True)
    (tmp_path / "more/__init__.py").touch()
    (tmp_path / "more/a_file.py").write_text("raise AssertionError")
    (tmp_path / "more/own/__init__.py").write_text('COMMANDS = {"hello": "greeting:hello"}')
    monkeypatch.syspath_prepend(tmp_path)
    commands = extras.functions("COMMANDS", "more", tmp_path / "more")
    assert commands == {"hello": "more.own.greeting:hello"}
    assert extras.functions("DOORS", "more", tmp_path / "more") == {}


def test_what_no_extra_has_is_named_with_the_place_that_lacks_it() -> None:
    with pytest.raises(ConfigError, match="no connection to 'gopher'") as caught:
        extras.SCHEMES.load("gopher")
    assert extras.PACKAGE in caught.value.hint
