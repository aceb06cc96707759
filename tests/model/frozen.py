"""Conversion of live records into plain tuples and back, so that states can be compared.

Absolute values of operation ids, turns and process incarnations mean nothing. So operation ids are
extracted in a fixed order and renumbered, and states that differ only in these counters count as
one state. Ids that some code compares by size are extracted as negative numbers, and stay negative
in a frozen state. So a part that has not changed since it was thawed keeps its frozen form.

The code is generated from each class's annotations. A field with an unknown annotation must keep
its first value: if it changes, the model raises UnknownField, because otherwise states that differ
would count as one state.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
import marshal
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any

from msgspec.structs import astuple

from pipeswitch.ipc.messages.run import Run, SamplingParams
from pipeswitch.planning.streaming import StagingLayout
from pipeswitch.scheduler.state.events import Origin
from pipeswitch.scheduler.state.records import RunHistory
from pipeswitch.scheduler.state.states import StateMachine

Add = Callable[[int], None]
Next = Callable[[], int]
Freeze = Callable[[Any, Add], Any]
Thaw = Callable[[Any, Next], Any]
Kept = tuple[bytes, tuple[int, ...]]  # marshalled values, operation ids (from ``frozen_part``)

PLAIN = frozenset(
    {
        "int",
        "float",
        "str",
        "bool",
        "int | None",
        "float | None",
        "bool | None",
        "Slot",
        "Slot | None",
        "Token",
        "ModelName",
        "JobName",
        "JobName | None",
        "ModelName | None",
        "Wanted",
        "tuple[int, ...]",
        "tuple[str, ...]",
        "tuple[Token, ...]",
    }
)
LISTS = frozenset({"list[Token]", "list[JobName]"})
OP_IDS = frozenset({"OpId", "Turn"})


class UnknownField(Exception):
    """Error: a field has changed, and the model does not know its meaning."""


class Codec:
    """Pair of functions ``freeze`` and ``thaw`` for one class of records.

    Args:
        drop: names of fields that are not frozen, because no decision reads them.
        ordered: names of operation ids that some code compares by size; turns are always included.
        parts: classes of nested records; a name of such a record's field has a dot.

    Attributes:
        still: names of the fields that must not change. ``thaw`` copies these fields and the
            dropped ones from its template.
    """

    def __init__(
        self,
        kind: type,
        *,
        drop: tuple[str, ...] = (),
        ordered: tuple[str, ...] = (),
        parts: tuple[type, ...] = (),
    ) -> None:
        self.kind = kind
        self.drop = drop
        self.parts: dict[str, type] = {}  # field -> class of the nested record; "": ``kind``
        self.still: list[str] = []
        self._ordered = ordered
        self._plain: list[str] = []
        self._lines_out: list[str] = []
        self._epochs_in: list[str] = []  # code that runs first, ordered like ``_lines_out``
        self._lines_in: list[str] = []
        self._names: dict[str, Any] = {
            "new": kind.__new__,
            "StateMachine": StateMachine,
            "lands": lands,
            "astuple": astuple,
            "origin": lambda t: Origin(**dict(zip(Origin.__struct_fields__, t, strict=True))),
            "shown_run": shown_run,
            "run": run_of,
            "history": lambda t: t and RunHistory(0.0, None, None, t[0]),
            "staging": lambda t: t and StagingLayout(*t[:2], frozenset(t[2]), *t[3:]),
        }
        known = {part.__name__: part for part in parts}
        self._fields("", kind, known)
        self.freeze, self.thaw = self._compile()

    def position(self, name: str) -> int:
        """Return the index of a plain field in the tuple that ``freeze`` returns."""
        return self._plain.index(f"o.{name}")

    def _fields(self, path: str, kind: type, known: dict[str, type]) -> None:
        self.parts[path.rstrip(".")] = kind
        for field, annotation in kind.__annotations__.items():
            name = path + field
            if annotation in known:
                self._fields(f"{name}.", known[annotation], known)
            elif name not in self.drop:
                self._field(name, annotation)

    def _field(self, name: str, annotation: str) -> None:
        if annotation in PLAIN:
            self._value(name, f"o.{name}", "{}")
        elif annotation in OP_IDS:
            is_ordered = annotation == "Turn" or name in self._ordered
            self._lines_out.append(f"e({'-' if is_ordered else ''}o.{name})")
            self._epochs_in.append(f"{_slot(name)} = n()")
        elif annotation in LISTS:
            self._value(name, f"tuple(o.{name})", "list({})")
        elif annotation.startswith("set["):
            self._value(name, f"tuple(sorted(o.{name}))", "set({})")
        elif annotation.startswith("dict[ModelName, "):
            self._value(name, f"tuple(sorted(o.{name}.items()))", "dict({})")
        elif annotation == "StagingLayout | None":
            self._value(name, f"lands(o.{name})", "staging({})")
        elif annotation == "Run":
            self._value(name, f"shown_run(o.{name})", "run({})")
        elif annotation == "Origin":
            self._value(name, f"astuple(o.{name})", "origin({})")
        elif annotation == "RunHistory | None":  # its other fields are only shown
            shown = f"o.{name} and (o.{name}.is_cancelled,)"
            self._value(name, shown, "history({})")
        elif annotation.startswith("StateMachine["):
            self._machine(name, annotation)
        else:
            self.still.append(name)

    def _value(self, name: str, out: str, into: str) -> None:
        index = len(self._plain)
        self._plain.append(out)
        self._lines_in.append(f"{_slot(name)} = " + into.format(f"t[{index}]"))

    def _machine(self, name: str, annotation: str) -> None:
        import pipeswitch.scheduler.state.records as records
        import pipeswitch.scheduler.state.states as states

        state, event = annotation.removeprefix("StateMachine[").removesuffix("]").split(", ")
        kind: type[Enum] = getattr(records, state)
        table = {
            "TaskEvent": states.TASK_TRANSITIONS,
            "WorkerEvent": states.WORKER_TRANSITIONS,
            "ModelEvent": states.MODEL_TRANSITIONS,
            "ResidencyEvent": states.RESIDENCY_TRANSITIONS,
            "VersionEvent": states.VERSION_TRANSITIONS,
        }[event]
        key = name.replace(".", "_")
        self._names |= {f"s_{key}": {member.value: member for member in kind}, f"m_{key}": table}
        into = f"StateMachine({self.kind.__name__!r}, s_{key}[{{}}], m_{key})"
        self._value(name, f"o.{name}.state._value_", into)

    def _compile(self) -> tuple[Freeze, Thaw]:
        body = "\n    ".join(self._lines_out)
        parts = ", ".join(self._plain)
        begin = []
        for path, kind in self.parts.items():
            self._names[f"kind_{path}"] = kind
            begin.append(f"o_{path} = new(kind_{path})\n    d_{path} = o_{path}.__dict__")
            begin.append(f"if template is not None: d_{path}.update(template[{path!r}])")
            if path:
                begin.append(f"{_slot(path)} = o_{path}")
        source = (
            f"def freeze(o, e):\n    {body}\n    return ({parts},)\n"
            "def thaw(t, n, template=None):\n    "
            + "\n    ".join([*begin, *self._epochs_in, *self._lines_in])
            + "\n    return o_\n"
        )
        exec(compile(source, f"<codec of {self.kind.__name__}>", "exec"), self._names)
        return self._names["freeze"], self._names["thaw"]


def _slot(name: str) -> str:
    """Return the expression for a field in the generated code of ``thaw``."""
    path, _, field = name.rpartition(".")
    return f"d_{path}[{field!r}]"


def shown_run(run: Run) -> tuple[Any, ...]:
    """Return a run as plain values; it has no inputs in this world."""
    params = run.sampling_params
    own = () if params is None else (params.steps, params.left, params.seed)
    return (run.request_id, *own)


def run_of(shown: tuple[Any, ...]) -> Run:
    """Return the run of ``shown_run``."""
    request_id, *parts = shown
    params = SamplingParams(steps=parts[0], left=parts[1], seed=parts[2]) if parts else None
    return Run(request_id=request_id, sampling_params=params)


def lands(of: StagingLayout | None) -> Any:
    """Return the layout of a streamed model (larger than the arena) as plain values."""
    return of and (
        of.offsets,
        of.waits,
        tuple(sorted(of.resident)),
        of.resident_bytes,
        of.size_bytes,
    )


class Still:
    """Attributes that the model does not freeze, and that therefore must keep their values.

    Args:
        owner: a part of the scheduler, or a record.
        known: names of attributes that may change, because they are frozen or only shown.
    """

    def __init__(self, owner: object, *known: str) -> None:
        self._what = type(owner).__name__
        self._values = {
            name: copy.copy(value) if isinstance(value, list | dict | set) else value
            for name, value in vars(owner).items()
            if name not in known
        }

    def check(self, owner: object) -> None:
        """Raise UnknownField if one of the attributes has changed."""
        mine = vars(owner)
        if self._values.items() <= mine.items():
            return
        for name, value in self._values.items():
            if mine[name] != value:
                raise UnknownField(
                    f"{self._what}.{name} has become {mine[name]!r}: new to the protocol model; "
                    "freeze it, or drop it if no decision reads it"
                )


@cache  # calls for a whole scope have only a few thousand different arguments
def renumbered(epochs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the operation ids with new numbers; ids that are compared by size stay negative.

    1. The id 0, which means "none", stays 0.
    2. Ids that some code compares by size keep their order.
    3. Other ids are only tested for equality, so they are numbered in order of appearance. An id
       that appears once becomes 0: new operation ids are larger, so none will equal it.
    """
    ordered = sorted({-op_id for op_id in epochs if op_id < 0})
    numbers = {0: 0} | {op_id: rank for rank, op_id in enumerate(ordered, start=1)}
    counts = Counter(epochs)
    result = []
    for op_id in epochs:
        value = abs(op_id)
        if value not in numbers:
            if counts[op_id] == 1:
                result.append(0)
                continue
            numbers[value] = len(numbers)
        result.append(-numbers[value] if op_id < 0 else numbers[value])
    return tuple(result)


def frozen_part(freeze: Freeze, part: Any) -> Kept:
    """Return a part of the world as bytes and operation ids, which change only with the part."""
    epochs: list[int] = []
    # Version 2 of marshal writes no references, so the bytes depend only on the values.
    return marshal.dumps(freeze(part, epochs.append), 2), tuple(epochs)


def reader(epochs: tuple[int, ...]) -> Next:
    """Return a function that returns the operation ids one by one, in their original order."""
    numbers: Iterator[int] = map(abs, epochs)
    return numbers.__next__
