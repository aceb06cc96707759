"""Names that a function's code may read before it writes them, from one place on.

A variable that a loop's body always writes before it reads it carries nothing from one pass to the
next, so a resumed script does not miss its value. Attributes count by their name alone, as ``.p``.
An inner function reads when it is made.
"""

from __future__ import annotations

import dis
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType
from typing import Final, TypeAlias

_ACCESS: Final = re.compile(
    r"(LOAD|STORE)_(?:FROM_DICT_OR_)?"
    r"(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|ATTR|METHOD)(?=_LOAD|_STORE|_CHECK|_BORROW|$)"
)
_CLOSURES: Final = ("LOAD_CLOSURE", "LOAD_FAST")  # Python 3.13 has only the second
INITS: Final = ("__init__", "__post_init__", "__new__")  # run once for each object
_MATCHES: Final = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")
_ENDS: Final = (
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"),
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
)
_Node: TypeAlias = tuple[int, bool]


@functools.cache
def live(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that ``code`` may read before it writes them, behind ``offset``.

    Each ``for`` loop counts as run at least once. An ``except`` is followed if the script goes on
    behind ``offset`` after it, or if it catches the end of an iteration.
    """
    graph, names = _Graph(code), set[str]()
    followed = graph.followed(offset)
    written: dict[_Node, frozenset[str]] = {node: frozenset() for node in graph.behind(offset)}
    todo = [*written]
    while todo:
        node = todo.pop()
        done = written[node]
        for is_read, name in graph.accesses(node[0]):
            if not is_read:
                done |= {name}
            elif name not in done:
                names.add(name)
        for after in followed.intersection(graph.successors(node)):
            both = written[after] & done if after in written else done
            if written.get(after) != both:
                written[after] = both
                todo.append(after)
    return frozenset(names)


@functools.cache
def assigned(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names that ``code`` may write behind ``offset``, or its inner functions."""
    graph, names = _Graph(code), set[str]()
    for index in {index for index, _ in graph.reached(graph.behind(offset))}:
        names.update(name for is_read, name in graph.accesses(index) if not is_read)
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_name not in INITS:
            names.update(n for n in assigned(one, -1) if n[0] == "." or n in one.co_freevars)
    return frozenset(names)


@functools.cache
def captured(code: CodeType, offset: int) -> frozenset[str]:
    """Return the variables that ``code`` gives to functions outside of the innermost loop around
    ``offset``; each pass may call these."""
    graph = _Graph(code)
    ends = dict[int, int]()
    for index, step in enumerate(graph.steps):
        if graph.is_jump(step) and (head := graph.at[step.argval]) <= index:
            ends[head] = index
    here = max(i for i, step in enumerate(graph.steps) if step.offset <= max(offset, 0))
    head = max((head for head, end in ends.items() if head <= here <= end), default=here)
    outside = graph.steps[:head] + graph.steps[ends.get(head, here) + 1 :]
    names = {step.argval for step in outside if step.opname in _CLOSURES}
    return frozenset(code.co_freevars).union(names.intersection(code.co_cellvars))


@functools.cache
def is_in_loop(code: CodeType, offset: int) -> bool:
    """Return True if what runs behind ``offset`` can run again."""
    graph = _Graph(code)
    nodes = graph.behind(offset)
    first = {index for index, _ in nodes}
    return any(one in first for node in graph.reached(nodes) for one, _ in graph.successors(node))


@functools.cache
def carried_attributes(code: CodeType) -> frozenset[str]:
    """Return the attributes that a function writes, and reads before, so that a call depends on
    the call before it."""
    stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(name for name in stored if f".{name}" in live(code, -1))


@functools.cache
def attributes_read(code: CodeType) -> frozenset[str]:
    """Return the attributes that a function reads, or one that it defines."""
    inner = (attributes_read(one) for one in code.co_consts if isinstance(one, CodeType))
    pairs = (pair for step in dis.get_instructions(code) for pair in _accesses(step))
    return frozenset(n[1:] for is_read, n in pairs if is_read and n[0] == ".").union(*inner)


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
        entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        self.handlers = [
            (self.at[one.start], self.at.get(one.end, len(self.steps)), self.at[one.target])
            for one in entries
            if self._catches(self.at[one.target]) is not None
        ]

        self.hidden = dict(self._hidden())

    def _hidden(self) -> Iterator[tuple[tuple[int, str], None]]:
        """Yield where which names are variables of a comprehension that is compiled in line."""
        for index, step in enumerate(self.steps):
            if step.opname == "LOAD_FAST_AND_CLEAR":
                rest = self.steps[index:]
                loop = next(one for one in rest if one.opname == "FOR_ITER")
                end = self.at[loop.argval]
                while (False, step.argval) not in _accesses(self.steps[end]):
                    end += 1
                yield from (((one, step.argval), None) for one in range(index, end + 1))

    def accesses(self, index: int) -> Iterator[tuple[bool, str]]:
        """Yield what an instruction reads (True) and writes."""
        for is_read, name in _accesses(self.steps[index]):
            if (index, name) not in self.hidden:
                yield is_read, name

    def behind(self, offset: int) -> list[_Node]:
        after = (i for i, step in enumerate(self.steps) if step.offset > offset)
        return [(index, False) for index in after][:1]

    def reached(self, nodes: list[_Node]) -> set[_Node]:
        """Return all that may run from ``nodes`` on."""
        todo, known = [*nodes], {*nodes}
        while todo:
            after = {*self.successors(todo.pop())} - known
            known |= after
            todo += after
        return known

    def followed(self, offset: int) -> set[_Node]:
        """Return what may run behind ``offset`` without an error, or before it runs again."""
        start = self.behind(offset)
        callers = defaultdict[_Node, list[_Node]](list)
        for node in self.reached(start):
            for after in self.successors(node):
                callers[after].append(node)
        todo = [node for node in callers if node[0] == start[0][0]] if start else []
        repeated = {*todo}
        while todo:
            before = {*callers[todo.pop()]} - repeated
            repeated |= before
            todo += before
        handlers, ends = self.handlers, "StopIteration"
        self.handlers = [one for one in handlers if ends in (self._catches(one[2]) or ())]
        usual = self.reached(start)
        self.handlers = handlers
        return usual | repeated

    def _catches(self, target: int) -> set[str] | None:
        """Return the names of what an ``except`` catches; None for other handlers, which pass the
        exception on."""
        if self.steps[target].opname == "END_ASYNC_FOR":
            return {"StopIteration"}
        names = set[str]()
        for step in self.steps[target + 1 :]:
            if step.opname in _MATCHES or (step.opname == "POP_TOP" and not names):
                return names
            if not step.opname.startswith(("LOAD_", "BUILD_TUPLE")):
                return None
            names.add(str(step.argval))
        return None

    def is_jump(self, step: dis.Instruction) -> bool:
        return (step.opcode in dis.hasjrel or step.opcode in dis.hasjabs) and step.argval in self.at

    def successors(self, node: _Node) -> Iterator[_Node]:
        index, has_run = node
        step = self.steps[index]
        if self.is_jump(step) and (has_run or step.opname != "FOR_ITER"):
            target = self.at[step.argval]
            yield target, target < index and self.steps[target].opname == "FOR_ITER"
        if step.opname not in _ENDS and index + 1 < len(self.steps):
            yield index + 1, False
        for start, end, handler in self.handlers:
            if start <= index < end:
                yield handler, False


def _accesses(step: dis.Instruction) -> Iterator[tuple[bool, str]]:
    if isinstance(step.argval, CodeType):
        inner = step.argval
        yield from ((True, n) for n in live(inner, -1).difference(inner.co_varnames))
        if inner.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):  # runs at once
            yield from ((False, n) for n in assigned(inner, -1).difference(inner.co_varnames))
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    for (action, kind), name in zip(_ACCESS.findall(step.opname), names, strict=False):
        yield action == "LOAD", f".{name}" if kind in ("ATTR", "METHOD") else str(name)


@functools.cache
def names_in(code: CodeType, actions: str = "LOAD|STORE") -> frozenset[str]:
    """Return the names of globals in a function and in those that it defines."""
    inner = (names_in(one, actions) for one in code.co_consts if isinstance(one, CodeType))
    steps = dis.get_instructions(code)
    own = re.compile(rf"({actions})_(GLOBAL|NAME)$")
    return frozenset(str(one.argval) for one in steps if own.match(one.opname)).union(*inner)
