"""The real commit area in plain memory, with checks of invariant I2: a script resumes from a whole
commit, at least as new as the last commit that the scheduler has counted."""

from __future__ import annotations

from typing import Any, Final

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.commits.area import _RECORD_WORDS, HEADER_BYTES, MAGIC, CommitArea
from pipeswitch.extras.lab.device import Image, SimulatedArea, Violation, image_of, require

from .channel import IMAGE_BYTES

_SEQUENCE: Final = 2  # index of the sequence number among the header's words


class Paused(Exception):
    """Interruption of a copy, whose rest is a separate move."""


class _Memory(CommitArea):
    """The real commit area in plain memory, which can be saved and restored."""

    def __init__(self) -> None:
        self.slot_bytes = IMAGE_BYTES
        self._bytes = memoryview(bytearray(HEADER_BYTES + 2 * IMAGE_BYTES))
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        self._words[0], self._words[1] = MAGIC, IMAGE_BYTES
        self._reserved_bytes = [IMAGE_BYTES, IMAGE_BYTES]

    def save(self) -> tuple[Any, ...]:
        """Return the part of the area that can change."""
        words = self._words
        records = tuple([tuple(words[i : i + 4].tolist()) for i in _RECORD_WORDS])
        return (words[_SEQUENCE], records, bytes(self._bytes[HEADER_BYTES:]))

    def set(self, saved: tuple[Any, ...]) -> None:
        """Restore an area that ``save`` returned."""
        sequence, records, slots = saved
        self._words[_SEQUENCE] = sequence
        for first, record in zip(_RECORD_WORDS, records, strict=True):
            for index, value in enumerate(record):
                self._words[first + index] = value
        self._bytes[HEADER_BYTES:] = slots


EMPTY: Final = _Memory().save()


class Area(SimulatedArea):
    """Commit area of one job, with checks of invariant I2."""

    def __init__(self, world: Any, job: str) -> None:
        self._world, self._job = world, job
        self._real = _Memory()
        self._content: Any = EMPTY  # this state's saved content; None: ``_real`` may have changed
        self._loaded: Any = EMPTY  # the saved content that ``_real`` was last set to
        self.on_disk = -1  # step of the commit on disk; -1: none

    @property
    def real(self) -> _Memory:
        """Real commit area with the current content, for reading and writing."""
        if self._content is not None and self._loaded is not self._content:
            self._real.set(self._content)
        self._content = self._loaded = None
        return self._real

    def freeze(self) -> Any:
        """Return the area's content and the step of the commit on disk."""
        if self._content is None:
            self._content = self._loaded = self._real.save()
        return self._content, self.on_disk

    def thaw(self, content: Any, on_disk: int) -> None:
        """Restore a content and a step that ``freeze`` returned."""
        self._content, self.on_disk = content, on_disk

    @property
    def step(self) -> int:  # type: ignore[override]
        newest = self.real.newest()
        return -1 if newest is None else newest.step

    def last(self) -> Image | None:
        area = self.real
        try:
            commit = area.newest()
        except RemoteProtocolError as error:
            raise Violation(f"no commit is whole (I2): {error}") from None
        promised = self._world.recall.moment.seen.promised.get(self._job, -1)
        if commit is None:
            require(promised < 0, f"the commit of step {promised} is lost (I2)")
            return None
        image = Image(*area.image(commit))
        is_right = commit.step < 4 and image == image_of(commit.step)
        require(is_right, f"the commit of step {commit.step} holds {image} (I2)")
        require(commit.step >= promised, f"the commit of step {promised} is lost (I2)")
        return image

    def read(self, step: int, image: Image, *, is_rest: bool) -> None:
        def fill(slot: memoryview) -> None:
            part = slice(1, None) if is_rest else slice(1)
            slot[part] = bytes(image)[part]
            raise Paused

        try:
            self.real.write(step, IMAGE_BYTES, fill)
        except Paused:
            return

    def flip(self, step: int) -> None:
        self.real.write(step, IMAGE_BYTES, lambda _: None)  # ``read`` has written the image
        require(self.last() is not None, "a commit was flipped and is not there (I2)")

    def require_on_disk(self) -> None:
        """Check that the newest commit is on disk, so that the next server can find it."""
        image = self.last()
        is_there = image is None or self.on_disk == image.step
        require(is_there, f"it leaves with a commit that is not on disk: {image} (I2)")


__all__ = ["EMPTY", "Area"]
