"""Which servers may come from the process that imported torch already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeswitch.keeper import Keeper

SAME = {"PIPESWITCH_SERVER__POOL": "1MiB", "XDG_RUNTIME_DIR": "/run/of/this/server"}


@pytest.mark.parametrize(
    ("more", "may"),
    [({}, True), (SAME, True), ({"PYTHONPATH": "mine"}, True), ({"OMP_NUM_THREADS": "3"}, False)],
)
def test_what_an_import_reads_must_be_the_keepers(more: dict[str, str], may: bool) -> None:
    keeper = Keeper()
    assert keeper.serves({**os.environ, **more}) == may
    keeper.close()


@pytest.mark.parametrize("name", ["sitecustomize.py", "torch.py", "torch"])
def test_a_folder_that_brings_what_the_keeper_imported_is_not_the_keepers(
    name: str, tmp_path: Path
) -> None:
    keeper = Keeper()
    (tmp_path / name).touch()
    assert not keeper.serves({**os.environ, "PYTHONPATH": f"mine:{tmp_path}"})
    keeper.close()


def test_a_variable_that_is_missing_is_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    keeper = Keeper()
    monkeypatch.delenv("MKL_NUM_THREADS")
    assert not keeper.serves(os.environ)
    keeper.close()
