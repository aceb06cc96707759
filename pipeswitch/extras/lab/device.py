"""Memory of a simulated device: its contents, its permitted users (I4), and the turn word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...ipc.messages.base import ModelName, OpId
from ...ipc.messages.daemon import GroupCopy, TransmitModel
from ...ipc.messages.worker import RunInference
from ...scheduler.state.device_state import FENCE_BYTES
from .programs import SimulatedProgram


class Violation(AssertionError):
    """Invariant of docs/architecture.md that the scheduler has broken."""


def require(is_so: bool, text: str) -> None:
    """Raise Violation with ``text`` unless ``is_so``."""
    if not is_so:
        raise Violation(text)


class ByteSpan(NamedTuple):
    """A range of bytes."""

    start: int
    end: int

    def overlaps(self, other: ByteSpan) -> bool:
        return self.start < other.end and other.start < self.end


User = tuple[str, ByteSpan]  # text about a reader or writer, and its range

NOWHERE = ByteSpan(0, 0)
BASE = 6  # base of the digits in a script's state


class Image(NamedTuple):
    """State of a script: two halves of its parameters, and its number of finished steps.

    Step *k* appends digit *k* to each half.
    """

    first: int
    second: int
    step: int


ZEROS = Image(0, 0, 0)


def after_step(half: int, step: int) -> int:
    """Return one half of the parameters after step number ``step`` (from 0)."""
    return half * BASE + step + 1


def image_of(step: int) -> Image:
    """Return the state after steps 1…step of an undisturbed run."""
    half = 0
    for index in range(step):
        half = after_step(half, index)
    return Image(half, half, step)


class Held(NamedTuple):
    """Transfer to the arena; its region has had no other owner since."""

    order: TransmitModel
    done: int  # number of groups that have arrived


class SimulatedArea:
    """A job's commit area: the newest image, and the next one (ADR 8)."""

    def __init__(self) -> None:
        self.step = -1  # step of the newest commit; -1: none
        self._newest: Image | None = None
        self._next = ZEROS

    def last(self) -> Image | None:
        """Return the image from which a script resumes; None if there is no commit."""
        return self._newest

    def read(self, step: int, image: Image, *, is_rest: bool) -> None:
        """Copy the first half, or the rest; the newest image stays until ``flip``."""
        self._next = image._replace(first=self._next.first) if is_rest else image

    def flip(self, step: int) -> None:
        """Make the copied image the newest."""
        self.step, self._newest = step, self._next


class SimulatedDevice:
    """Bytes of models and slices, fences, and the two words of the control page.

    The values of its fields are replaced, never changed, so a state of the world can be saved.
    """

    def __init__(self) -> None:
        self.turn = 0
        self.stop_words: dict[int, int] = {}  # slot -> operation id of a task that must stop
        self.clear()

    def clear(self) -> None:
        """Clear the memory, which was lost with its daemon."""
        self.fences: dict[int, OpId] = {}
        self.computed = (0, 0)  # streaming: operation id of the copy, number of computed groups
        self.contents: dict[ModelName, Held] = {}  # models on the device or being copied
        self.slices: dict[int, Image] = {}  # offset of a written slice -> its content
        self.intact: dict[ModelName, ByteSpan] = {}  # rest of each last complete copy
        self.cancelled: frozenset[OpId] = frozenset()  # copies that may end early
        self.tensors: dict[int, str] = {}  # offset of a tensor -> its digest, if it has one
        self.dirty: tuple[ByteSpan, ...] = ()  # slices without a process that are not zeroed yet

    def claim(self, span: ByteSpan, why: str, users: Iterable[User]) -> None:
        """Give a range to a new owner: nobody may use the range, and its old content is lost."""
        self._claim(span, why, users)
        self._overwrite([span])

    def _overwrite(self, spans: Sequence[ByteSpan]) -> None:
        if self.tensors:
            self.tensors = {
                at: digest
                for at, digest in self.tensors.items()
                if not any(span.start <= at < span.end for span in spans)
            }

    def _claim(self, span: ByteSpan, why: str, users: Iterable[User]) -> None:
        require_unused(span, why, users)
        for dirty in self.dirty:
            require(not span.overlaps(dirty), f"{why} overlaps a slice that is not zeroed (I4)")
        self.contents = {
            name: content
            for name, content in self.contents.items()
            if not span.overlaps(region_of(content.order))
        }
        self.intact = {name: _without(content, span) for name, content in self.intact.items()}

    def send(
        self,
        order: TransmitModel,
        fence_count: int,
        users: Iterable[User],
    ) -> None:
        """Begin the copy of a model; groups that are not sent again must be on the device."""
        start = order.arena_offset_bytes
        require(start >= fence_count * FENCE_BYTES, "a model over the fences")
        intact = self.intact.get(order.model, NOWHERE)
        for group in resident_groups(order) if order.waits else ():
            end = group.arena_offset_bytes + group.size_bytes
            require(
                intact.start <= group.arena_offset_bytes and end <= intact.end,
                f"{order.model}: group at {group.arena_offset_bytes} is not there, and not sent",
            )
        self._claim(region_of(order), f"the copy of {order.model}", users)
        self._overwrite([span for group in order.groups for span in _written(group)])
        self.intact = {name: span for name, span in self.intact.items() if name != order.model}
        self.contents = {**self.contents, order.model: Held(order, 0)}

    def arrived(self, order: TransmitModel, group: GroupCopy, program: SimulatedProgram) -> None:
        """Record the arrival of a group's bytes, and then of its fence."""
        for span in _written(group):
            self.tensors = {**self.tensors, **_digests(order, span, program)}
        content = self.contents.get(order.model)
        if content is not None and content.order.op_id == order.op_id:
            self.contents = {**self.contents, order.model: Held(content.order, content.done + 1)}
        self.fences = {**self.fences, group.fence: order.op_id}

    def completed(self, order: TransmitModel) -> None:
        """Record that all groups have arrived."""
        content = self.contents.get(order.model)
        if content is not None and content.order.op_id == order.op_id:
            self.intact = {**self.intact, order.model: region_of(order)}

    def has_arrived(self, order: RunInference, group: int) -> bool:
        return self.fences.get(order.first_fence + group) == order.residency_id

    def check_order(self, order: RunInference, group_count: int) -> None:
        """Require that the model is on the device or being copied, as the worker's order says."""
        content = self.contents.get(order.model)
        require(content is not None, f"{order.model} does not lie in the arena")
        assert content is not None
        sent = content.order
        require(sent.op_id == order.residency_id, f"stale epoch for {order.model}")
        is_whole = order.model in self.intact or sent.op_id not in self.cancelled
        require(is_whole, f"the copy of {order.model} was cancelled")
        require(sent.arena_offset_bytes == order.arena_offset_bytes, "another region")
        require(sent.groups[0].fence == order.first_fence, "other fences")
        require(len(sent.groups) == group_count, "it was sent in other groups")

    def check_read(self, order: RunInference, group: int, program: SimulatedProgram) -> None:
        """Require that a group is on the device when a worker computes with it."""
        content = self.contents.get(order.model)
        is_there = content is not None and content.order.op_id == order.residency_id
        require(is_there, f"{order.model} is read after its eviction (I4)")
        assert content is not None
        require(content.done > group, f"group {group} of {order.model} is read and not there (I4)")
        [sent] = [one for one in content.order.groups if one.fence == order.first_fence + group]
        start = sent.arena_offset_bytes
        expected = _digests(content.order, ByteSpan(start, start + sent.size_bytes), program)
        right = all(self.tensors.get(at) == digest for at, digest in expected.items())
        require(right, f"group {group} of {order.model} has another model's bytes")

    def has_room(self, order: TransmitModel, group: int) -> bool:
        """Return True if a streaming group may be copied: the groups in its place have computed."""
        count = order.waits[group] if order.waits else 0
        return not count or (self.computed[0] == order.op_id and self.computed[1] >= count)

    def slice_at(self, span: ByteSpan) -> Image:
        return self.slices.get(span.start, ZEROS)

    def write_slice(self, span: ByteSpan, image: Image) -> None:
        self.slices = {**self.slices, span.start: image}

    def leave(self, span: ByteSpan) -> None:
        """Record that a slice may hold bytes and that no process uses it."""
        self.dirty = (*self.dirty, span)

    def take(self, span: ByteSpan) -> None:
        """Record that a process uses a slice that ``leave`` has named."""
        require(span in self.dirty, f"a process uses {span} as its slice (I4)")
        self.dirty = tuple([dirty for dirty in self.dirty if dirty != span])

    def zero(self, span: ByteSpan) -> None:
        """Zero a slice's bytes."""
        self.slices = {at: image for at, image in self.slices.items() if at != span.start}
        self.dirty = tuple([dirty for dirty in self.dirty if dirty != span])


def require_unused(span: ByteSpan, why: str, users: Iterable[User]) -> None:
    """Require that no user's range overlaps this one."""
    for owner, other in users:
        require(not span.overlaps(other), f"{why} overlaps {owner} (I4)")


def _without(span: ByteSpan, cut: ByteSpan) -> ByteSpan:
    """Return the part of ``span`` before ``cut``, or if there is none, the part after ``cut``."""
    if not span.overlaps(cut):
        return span
    return (
        ByteSpan(span.start, cut.start) if span.start < cut.start else ByteSpan(cut.end, span.end)
    )


def region_of(order: TransmitModel) -> ByteSpan:
    """Return the arena range that a transmission writes."""
    start = order.arena_offset_bytes
    return ByteSpan(start, start + order.region_bytes)


def _written(group: GroupCopy) -> list[ByteSpan]:
    """Return the ranges of the arena that a copy writes."""
    start = group.arena_offset_bytes
    parts = group.within(0, group.size_bytes)
    return [ByteSpan(start + at, start + at + size) for _, at, size in parts]


def _digests(order: TransmitModel, span: ByteSpan, program: SimulatedProgram) -> dict[int, str]:
    """Return the digests of a model's tensors in a range of the arena. Streaming models, whose
    tensors have no fixed places, have none."""
    start = order.arena_offset_bytes
    tensors = program.manifest.tensors if not order.waits else ()
    return {
        start + one.offset_bytes: one.digest
        for one in tensors
        if one.digest and span.start <= start + one.offset_bytes < span.end
    }


def resident_groups(order: TransmitModel) -> list[GroupCopy]:
    """Return the groups that are on the device already, and are not sent again."""
    return [group for group in order.groups if group.parts == ()]
