"""Which servers may come from the process that imported torch already."""

from __future__ import annotations

import os

import pytest

from pipeswitch.keeper import Keeper

SAME = {"PIPESWITCH_SERVER__POOL": "1MiB", "XDG_RUNTIME_DIR": "/run/of/this/server"}


@pytest.mark.parametrize(
    ("more", "may"),
    [({}, True), (SAME, True), ({"PYTHONPATH": "mine"}, False), ({"OMP_NUM_THREADS": "3"}, False)],
)
def test_what_an_import_reads_must_be_the_keepers(more: dict[str, str], may: bool) -> None:
    keeper = Keeper()
    assert keeper.serves({**os.environ, **more}) == may
    keeper.close()


def test_a_variable_that_is_missing_is_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "here")
    keeper = Keeper()
    monkeypatch.delenv("HF_HOME")
    assert not keeper.serves(os.environ)
    keeper.close()
