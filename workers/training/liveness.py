"""Names that a function's code may read before it writes them, from one place on.

A variable that a loop's body always writes before it reads it carries nothing from one pass to the
next, so a resumed script does not miss its value. Attributes count by their name alone, as ``.p``.
"""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterator
from types import CodeType
from typing import Final, TypeAlias

_ACCESS: Final = re.compile(
    r"(LOAD|STORE)_(?:FROM_DICT_OR_)?"
    r"(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE|ATTR|METHOD)(?=_LOAD|_STORE|_CHECK|_BORROW|$)"
)
_ENDS: Final = (
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"),
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
)
_Node: TypeAlias = tuple[int, bool]


@functools.cache
def live(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that ``code`` may read before it writes them, behind ``offset``.

    Each ``for`` loop counts as run at least once. Paths through exception handlers are not
    followed.
    """
    graph, names = _Graph(code), set[str]()
    written: dict[_Node, frozenset[str]] = {node: frozenset() for node in graph.behind(offset)}
    todo = [*written]
    while todo:
        node = todo.pop()
        done = written[node]
        for is_read, name in _accesses(graph.steps[node[0]]):
            if not is_read:
                done |= {name}
            elif name not in done:
                names.add(name)
        for after in graph.successors(node):
            both = written[after] & done if after in written else done
            if written.get(after) != both:
                written[after] = both
                todo.append(after)
    return frozenset(names)


@functools.cache
def assigned(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that ``code`` may write behind ``offset``."""
    steps = _Graph(code).reached(offset)
    return frozenset(n for step in steps.values() for is_read, n in _accesses(step) if not is_read)


@functools.cache
def is_in_loop(code: CodeType, offset: int) -> bool:
    """Return True if what runs behind ``offset`` can run again."""
    graph = _Graph(code)
    first = {index for index, _ in graph.behind(offset)}
    nodes = graph.reached(offset)
    return any(after in first for node in nodes for after, _ in graph.successors(node))


@functools.cache
def carried_attributes(code: CodeType) -> frozenset[str]:
    """Return the attributes that a function writes, and reads before, so that a call depends on
    the call before it."""
    stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(name for name in stored if f".{name}" in live(code, -1))


class _Graph:
    """The ways through a function's instructions. A node is an instruction, and for the head of a
    ``for`` loop whether its body has run."""

    def __init__(self, code: CodeType) -> None:
        self.steps: list[dis.Instruction] = []
        self.at: dict[int, int] = {}
        for step in dis.get_instructions(code):
            self.at[step.offset] = len(self.steps)
            if step.opname != "EXTENDED_ARG":  # a part of the next instruction
                self.steps.append(step)

    def behind(self, offset: int) -> list[_Node]:
        after = (i for i, step in enumerate(self.steps) if step.offset > offset)
        return [(index, False) for index in after][:1]

    def reached(self, offset: int) -> dict[_Node, dis.Instruction]:
        """Return all that may run behind ``offset``."""
        todo = self.behind(offset)
        nodes = dict.fromkeys(todo)
        while todo:
            for after in self.successors(todo.pop()):
                if after not in nodes:
                    nodes[after] = None
                    todo.append(after)
        return {node: self.steps[node[0]] for node in nodes}

    def successors(self, node: _Node) -> Iterator[_Node]:
        index, has_run = node
        step = self.steps[index]
        is_jump = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        if is_jump and step.argval in self.at and (has_run or step.opname != "FOR_ITER"):
            target = self.at[step.argval]
            yield target, target < index and self.steps[target].opname == "FOR_ITER"
        if step.opname not in _ENDS and index + 1 < len(self.steps):
            yield index + 1, False


def _accesses(step: dis.Instruction) -> Iterator[tuple[bool, str]]:
    """Yield what an instruction reads (True) and writes; functions read when they are made."""
    if isinstance(step.argval, CodeType):
        yield from ((True, name) for name in names_in(step.argval))
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    for (action, kind), name in zip(_ACCESS.findall(step.opname), names, strict=False):
        yield action == "LOAD", f".{name}" if kind in ("ATTR", "METHOD") else str(name)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function and in those that it defines."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)
