"""Turns live records into plain tuples and back: what makes a state comparable.

Operation ids, turns and process generations mean nothing by themselves. So operation ids are taken
out in a fixed order and numbered anew; states that differ only in how high they have counted are
one state. Those that are compared by size somewhere are taken out negative, and stay so in a frozen
state: what was not touched since it was thawed is as frozen as it was.

The code is made from each class's annotations. A field whose annotation says nothing here must
keep the value it had at the start; when it changes, the model refuses to go on: it would merge
states that differ.
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

from pipeswitch.ipc.messages.worker import SamplingParams
from pipeswitch.planning.streaming import StagingLayout
from pipeswitch.scheduler.state.records import Runs
from pipeswitch.scheduler.state.states import StateMachine

Add = Callable[[int], None]
Next = Callable[[], int]
Freeze = Callable[[Any, Add], Any]
Thaw = Callable[[Any, Next], Any]
Kept = tuple[bytes, tuple[int, ...]]  # marshalled, and its operation ids: see ``frozen_part``

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
    """Something changed whose meaning the model does not know."""


class Codec:
    """``freeze`` and ``thaw`` of one class of records.

    Args:
        drop: fields that are only shown: no decision reads them.
        ordered: operation ids that are compared by size somewhere; turns always are.
        parts: classes of fields that are records themselves. Their fields are named with a dot.

    Attributes:
        still: the fields that must not change. ``thaw`` takes these and the dropped ones from
            its template.
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
        self.parts: dict[str, type] = {}  # by field; "": the record itself
        self.still: list[str] = []
        self._ordered = ordered
        self._plain: list[str] = []
        self._lines_out: list[str] = []
        self._epochs_in: list[str] = []  # before the others, as they were taken out
        self._lines_in: list[str] = []
        self._names: dict[str, Any] = {
            "new": kind.__new__,
            "StateMachine": StateMachine,
            "lands": lands,
            "sampling_params": lambda t: t and SamplingParams(steps=t[0], left=t[1]),
            "runs": lambda t: t and Runs(0.0, None, None, *t),
            "staging": lambda t: t and StagingLayout(*t[:2], frozenset(t[2]), *t[3:]),
        }
        known = {part.__name__: part for part in parts}
        self._fields("", kind, known)
        self.freeze, self.thaw = self._compile()

    def position(self, name: str) -> int:
        """Where a plain field stands in what ``freeze`` gives."""
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
        elif annotation == "SamplingParams | None":
            self._value(
                name, f"o.{name} and (o.{name}.steps, o.{name}.left)", "sampling_params({})"
            )
        elif annotation == "Runs | None":  # the rest is only shown
            shown = f"o.{name} and (o.{name}.is_returning, o.{name}.is_cancelled)"
            self._value(name, shown, "runs({})")
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
    """Return the place of a field in the records that ``thaw`` makes."""
    path, _, field = name.rpartition(".")
    return f"d_{path}[{field!r}]"


def lands(of: StagingLayout | None) -> Any:
    """The landings of a model that streams as plain values."""
    return of and (
        of.offsets,
        of.waits,
        tuple(sorted(of.resident)),
        of.resident_bytes,
        of.size_bytes,
    )


class Still:
    """Attributes that must keep the value they had: what the model does not know of.

    Args:
        owner: a part of the scheduler, or a record.
        known: the attributes that the model freezes, or knows to be shown only.
    """

    def __init__(self, owner: object, *known: str) -> None:
        self._what = type(owner).__name__
        self._values = {
            name: copy.copy(value) if isinstance(value, list | dict | set) else value
            for name, value in vars(owner).items()
            if name not in known
        }

    def check(self, owner: object) -> None:
        """Raise UnknownField when one has changed."""
        mine = vars(owner)
        if self._values.items() <= mine.items():
            return
        for name, value in self._values.items():
            if mine[name] != value:
                raise UnknownField(
                    f"{self._what}.{name} has become {mine[name]!r}: new to the protocol model; "
                    "freeze it, or drop it if no decision reads it"
                )


@cache  # one transition's operation ids look like another's: a few thousand lists in a whole scope
def renumbered(epochs: tuple[int, ...]) -> tuple[int, ...]:
    """The operation ids with new numbers; those that are compared by size are negative, also
    afterwards.

    1. None (0) stays none.
    2. Values that are compared by size somewhere keep their order.
    3. Of the others only equality matters: they are numbered in the order they are met, and one
       that nothing else names is as good as none. New operation ids are larger than all, so it can
       never be met again.
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
    """A part of the world as bytes and operation ids; both stay the same until the part changes."""
    epochs: list[int] = []
    # Version 2 writes no references, so the bytes depend on the values alone.
    return marshal.dumps(freeze(part, epochs.append), 2), tuple(epochs)


def reader(epochs: tuple[int, ...]) -> Next:
    """Gives the operation ids back in the order in which they were taken out."""
    numbers: Iterator[int] = map(abs, epochs)
    return numbers.__next__
