"""What a script carries along in plain variables, and a restart loses: ``best``, ``total``.

A loop's own source says which names it carries: its body reads them before it writes them. Their
numbers go along with each commit. A life that comes to the place of the commit with others says
so, once for each job. What a body computes anew, reads from ``extra_state``, or takes from a clock
is not carried; a loop whose source cannot be had is not looked at.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import numbers
import sys
import warnings
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Final

import torch

from pipeswitch.job import InexactResumeWarning

MAX_NAMES: Final = 16  # of a loop
MAX_FRAMES: Final = 8  # between a loop and the ``for`` that runs it: ``tqdm(job.steps(…))``
_CLOCKS: Final = {"time", "perf_counter", "monotonic", "process_time", "now"}


class CarriedNames:
    """The numbers that the loops which run now carry along.

    Args:
        told: an earlier life has warned.
    """

    def __init__(self, *, told: bool) -> None:
        self._told = told
        # No frame is kept: it may hold the loop's generator, whose end would then come too late.
        self._loops: dict[str, tuple[CodeType, list[str]]] = {}

    def enter(self, loop: str) -> None:
        """Call in the generator ``job.<loop>`` as it begins: a ``for`` of the script runs it."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(0 if self._told else MAX_FRAMES):
            if frame is None:
                return
            source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
            names = carried_names(source, frame.f_lineno, loop)
            if names is not None:
                self._loops[loop] = frame.f_code, names[:MAX_NAMES]
                return
            frame = frame.f_back

    def leave(self, loop: str) -> None:
        """The loop is over."""
        self._loops.pop(loop, None)

    def values(self) -> dict[str, float] | None:
        """What they are now, by name; None: their loss was told already. The loops' own frames
        must be among the callers: one that has returned carries nothing on.
        """
        if self._told:
            return None
        found = {}
        for code, names in self._loops.values():
            frame = _calling(code) if names else None
            if frame is not None:
                own = frame.f_locals
                found.update({n: _number(own.get(n, frame.f_globals.get(n))) for n in names})
        return {name: number for name, number in found.items() if number is not None}

    def warn_of_lost(self, saved: dict[str, float], step: int) -> list[str]:
        """Which differ from those that were committed at ``step``; it is said, if any do."""
        now = self.values() or {}
        lost = [name for name in saved if name in now and repr(saved[name]) != repr(now[name])]
        if not lost:
            return []
        self._told = True
        code, _ = next(iter(self._loops.values()))
        frame = _calling(code)
        said = ", ".join(f"{n} is {now[n]:.6g} again (was {saved[n]:.6g})" for n in lost)
        keys = ", ".join(f'"{name}": {_typed(now[name])}' for name in lost)
        warnings.warn_explicit(
            f"this job was restarted at step {step}, and plain variables begin anew: {said}. Keep "
            f"them in a dict that job restores: kept = {{{keys}}} before the loops, "
            f'job.steps(…, extra_state=kept), and kept["{lost[0]}"] for {lost[0]}',
            InexactResumeWarning,
            code.co_filename,
            code.co_firstlineno if frame is None else frame.f_lineno,
        )
        return lost


def _calling(code: CodeType) -> FrameType | None:
    """The innermost frame that runs this code; None: it has returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def carried_names(source: str, line: int, loop: str) -> list[str] | None:
    """The names that the ``for`` over ``job.<loop>`` at ``line`` carries; None: there is none."""
    for node in _loops_in(source):
        if not node.lineno <= line <= (node.iter.end_lineno or 0):
            continue
        if any(loop in (getattr(n, "attr", ""), getattr(n, "id", "")) for n in ast.walk(node.iter)):
            uses = _Uses()
            uses.visit_all([node.target, *node.body])
            return [name for name in uses.read_first if name in uses.written - uses.clocks]
    return None


@functools.lru_cache(maxsize=MAX_FRAMES)
def _loops_in(source: str) -> list[ast.For]:
    """Its ``for`` statements: looked for once, since loops begin again with each epoch."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.For)]


def _number(value: Any) -> float | None:
    """A number, or a tensor of one on the host."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu" or value.is_complex():
            return None
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    return float(value) if isinstance(value, numbers.Real) else None


def _typed(number: float) -> str:
    """As a script would write it."""
    return str(number) if math.isfinite(number) else f'float("{number}")'


class _Uses(ast.NodeVisitor):
    """Names in the order in which a body comes to them; other scopes are left out."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.read_first: list[str] = []
        self.written: set[str] = set()
        self.clocks: set[str] = set()

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _read(self, name: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            self.read_first.append(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node.id)
        else:
            self._seen.add(node.id)
            self.written.add(node.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.visit(node.target)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit_all([node.value, *node.targets])
        if any({getattr(n, "attr", ""), getattr(n, "id", "")} & _CLOCKS
               for n in ast.walk(node.value)):  # fmt: skip
            self.clocks |= {n.id for t in node.targets for n in ast.walk(t)
                            if isinstance(n, ast.Name)}  # fmt: skip

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit_all([node.value, node.target])

    def visit_For(self, node: ast.For) -> None:
        self.visit_all([node.iter, node.target, *node.body, *node.orelse])

    def _comprehension(self, node: Any) -> None:
        """A list's or a generator's: its own names are its own."""
        inner = _Uses()
        inner.visit_all(node.generators)
        inner.visit_all([getattr(node, key, None) for key in ("key", "value", "elt")])
        for name in inner.read_first:
            self._read(name)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit_all([node.iter, node.target, *node.ifs])

    def _scope(self, node: Any) -> None:
        """A function or a class of its own."""

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _scope
