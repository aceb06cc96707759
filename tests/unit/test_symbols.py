"""Conditions of a trace, and the extents that break them."""

from __future__ import annotations

import sympy
from torch.utils._sympy import functions

from pipeswitch.programs.compiler.symbols import suspects
from pipeswitch.programs.interface.dims import Dim

LENGTH, PAST = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
NAMES = {LENGTH: "length", PAST: "past"}
DIMS = [Dim("length", 1, 512), Dim("past", 1, 4096)]  # too many extents to try all


def test_a_minimum_that_is_one_operand_everywhere_breaks_nowhere() -> None:
    total = LENGTH + PAST
    conditions = [True, sympy.Eq(functions.Min(total, 4 * total), total)]
    assert suspects(conditions, NAMES, DIMS) == []


def test_the_extents_that_break_a_condition_are_suspects() -> None:
    broken = suspects([sympy.Lt(functions.Max(LENGTH, 3), 511)], NAMES, DIMS)
    assert {one["length"] for one in broken} == {511, 512}
