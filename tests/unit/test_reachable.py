"""Expressions of the values that a script can reach."""

from __future__ import annotations

import argparse
import functools
import sys
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
from torch import nn

from pipeswitch.base import state_codec
from pipeswitch.workers.training import reachable

Pair = namedtuple("Pair", "left right")
GLOBAL = {"deep": [1.0]}


class Slotted:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = [1]


class Private:
    def __init__(self) -> None:
        self._model = nn.Linear(1, 1)


def names_a_global() -> Any:
    return GLOBAL


def counter() -> Any:
    count = [0]
    return lambda: count


PLACES = {
    "one.lr": lambda: argparse.Namespace(lr=[1]),
    "one[2].weight_of": lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), with_list()),
    "one['a']": lambda: nn.ModuleDict({"a": nn.ReLU()}),
    "one['loss']['val']": lambda: {"loss": {"val": [1]}},
    "one[1][0]": lambda: (1, [[2]]),
    "one.right": lambda: Pair(1, [2]),
    "one[0]": lambda: deque([[1]]),
    "one[3]": lambda: OrderedDict({3: [1]}),
    "one.inner": Slotted,
    "one._model": Private,
    "one.args[0]": lambda: functools.partial(print, [1]),
    "one.count": counter,
    "one.__self__": lambda: with_list().extra_repr,
}


def with_list() -> nn.Module:
    module = nn.ReLU()
    module.weight_of = [1]  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("expression", PLACES)
def test_an_object_is_found_by_its_expression_again(expression: str) -> None:
    one = PLACES[expression]()
    frame = sys._getframe()
    frames = reachable.script_frames(frame)
    found = {reachable.text(path): path for path, _ in reachable.walk(frames, is_private=True)}
    data, blobs = state_codec.encode(found[expression])
    path = state_codec.decode(data, [blob.read() for blob in blobs])
    wanted, kind = id(reachable.resolve(frame, path)), type(reachable.resolve(frame, path))
    assert kind is int or reachable.expressions(frame, {wanted})[wanted] == path
    one = PLACES[expression]()  # as in a later run
    assert type(reachable.resolve(frame, path)) is kind
    del one
    with pytest.raises(LookupError, match="one"):
        reachable.resolve(frame, path)


def test_the_outermost_frame_of_the_script_names_an_object() -> None:
    net = nn.Linear(1, 1)

    def inner(model: nn.Module) -> dict[int, reachable.Path]:
        return reachable.expressions(sys._getframe(), {id(model), id(GLOBAL["deep"])})

    found = inner(net)
    names_a_global()
    assert {reachable.text(path).rpartition(".")[2] for path in found.values()} == {
        "net",
        "GLOBAL['deep']",
    }
