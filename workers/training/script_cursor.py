"""Position of a job in its script, and the commit images from which its loops resume.

A *phase* is a ``job.epochs``, or a ``job.steps`` outside of any ``job.epochs``. A phase's end is
always committed, and later images contain it. A resumed script skips a finished phase without
fetching batches and restores its end, so code between two phases finds the same state as before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput
from pipeswitch.commits.image import compact_image, images_in, parse_image

from .randomness import RandomState
from .snapshot import DataState

Order = tuple[int, int, int]
PAST: Final = "past/"
BEGINNING: Final = -1  # ``loop`` of the position at an epoch's beginning
MIN_PAST_PHASES: Final = 4  # phases whose images are always kept; each enlarges every commit
MAX_PAST_BYTES: Final = 32 << 20  # limit for all images: cross-validation has many models


@dataclass(frozen=True)
class CursorPosition:
    """Position in the script: a loop, and the progress in that loop."""

    phase: int  # number of the job.epochs, or of the job.steps outside of them
    epoch: int  # -1 outside job.epochs
    loop: int  # number of the loop in its epoch; BEGINNING: before the first one
    batches: int  # number of batches used so far
    finished: bool  # the loop was left early, or ended between two commit points
    name: str
    step: int

    @property
    def order(self) -> Order:
        """Sort key of the loop: it grows from each loop to the next one in the script."""
        return self.phase, self.epoch, self.loop

    @property
    def needs(self) -> list[Order]:
        """Earlier states that a resume needs (ADR 65): those at the epoch's beginning and at the
        ends of its earlier loops, because the script's code behind them runs again."""
        if self.epoch < 0:
            return []
        first = BEGINNING if self.epoch else 0  # the script itself makes the state of epoch 0
        return [(self.phase, self.epoch, loop) for loop in range(first, self.loop)]


class SavedImage:
    """A parsed commit image; valid only while its memory is valid."""

    def __init__(self, image: memoryview) -> None:
        self._image, *older = images_in(image)
        self.older_bytes = sum(map(len, older))
        self.content, self._ranges = parse_image(self._image)
        meta = self.content["meta"]
        self.values = state_codec.decode(meta["state"], [self.blob(n) for n in meta["state_blobs"]])
        self.position = CursorPosition(*self.values["position"])
        self.older = {one.position.order: one for one in map(SavedImage, older)}

    @functools.cached_property
    def options(self) -> Any:
        """State of the script's objects; decoded when the script has defined its named tuples."""
        meta = self.content["meta"]
        return state_codec.decode(meta["options"], [self.blob(n) for n in meta["options_blobs"]])

    @property
    def own_bytes(self) -> int:
        """Number of bytes without the older images."""
        return len(self._image)

    @property
    def bytes_to_keep(self) -> int:
        """Number of bytes that the next commits in this loop or epoch contain as well."""
        return self.own_bytes if self.position.loop == BEGINNING else self.older_bytes

    def at(self, order: Order) -> SavedImage | None:
        """Return the image of an epoch's beginning or a loop's end; None if it is not there."""
        return self if self.position.order == order else self.older.get(order)

    def blob(self, name: str) -> memoryview:
        """Return the bytes of a tensor or blob, without copying them."""
        offset, size = self._ranges[name]
        return self._image[offset : offset + size]

    def random(self, name: str) -> RandomState:
        """Return the stored random generators with this name."""
        return RandomState.from_values(self.values[name])

    def data(self, name: str) -> DataState:
        """Return the stored data position with this name."""
        return DataState(*self.values[name])

    def past(self) -> dict[int, bytes]:
        """Return the images of finished phases by phase number."""
        names = [name for name in self.content["blobs"] if name.startswith(PAST)]
        return {int(name.removeprefix(PAST)): bytes(self.blob(name)) for name in names}


class OutsidePart(Protocol):
    """State outside of a script's objects, restored when the script reaches the last commit."""

    def capture(self) -> Any: ...
    def restore(self, value: Any) -> None: ...


class ScriptCursor:
    """The script's current loop, and the images in the job's last commit.

    Args:
        image: the last commit; None if the job begins.
    """

    def __init__(self, image: memoryview | None) -> None:
        self.saved = None if image is None else SavedImage(image)  # None after the resume
        self.past: dict[int, bytes] = {} if self.saved is None else self.saved.past()
        self.has_updated = self.saved is not None and bool(self.saved.values["has_updated"])
        self._is_past = False  # this phase continues from the image of its end
        self.is_over = False  # the script has ended: there are no further commits
        self.phase = -1  # number of the newest phase
        self.in_epochs = False
        self.position = CursorPosition(0, -1, 0, 0, False, "", 0)  # after the last finished body
        self.step = 0  # finished steps, over all loops
        self.parts: Mapping[str, OutsidePart] = {}
        self.entry: dict[str, Any] = {}  # states at the start of script, epoch and loop
        self._epoch, self._loop = -1, 0
        self.loops = 0  # number of loops in the last epoch; 0: unknown

    @property
    def may_commit(self) -> bool:
        """True if the script runs and has reached the position of its last commit."""
        return self.saved is None and not self.is_over

    def begin_epochs(self, count: int) -> SavedImage | None:
        """Begin a ``job.epochs`` and with it a phase; return the image to resume from, or None.

        Raises:
            InvalidInput: the commit has another ``count``. If a script skips epochs itself, ``job``
                would skip epochs a second time.
        """
        if self.in_epochs:
            raise InvalidInput(
                "job.epochs inside job.epochs", hint="use range() for the inner loop"
            )
        self._next_phase()
        self.in_epochs = True
        saved = self.image_of_phase()
        if saved is not None and saved.position.phase == self.phase:
            committed = saved.values["epochs"]
            if count != committed:
                raise InvalidInput(
                    f"job.epochs({count}) was job.epochs({committed}) when the job was committed",
                    hint="job.epochs skips what is finished: give it the total number, and do not "
                    "resume from a checkpoint of your own",
                )
        self.entry["epochs"] = count
        self.loops = 0 if saved is None else saved.values.get("loops", 0)
        return saved

    def begin_epoch(self, epoch: int) -> None:
        if self._epoch >= 0:
            self.loops = self._loop
        self._epoch, self._loop = epoch, 0
        self.entry["loops"] = self.loops

    @property
    def is_last_epoch(self) -> bool:
        return bool(self._epoch == self.entry["epochs"] - 1)

    @property
    def beginning(self) -> CursorPosition:
        """The position at the beginning of the current epoch."""
        at = (self.phase, self._epoch, BEGINNING, self.position.batches)
        return CursorPosition(*at, finished=False, name="", step=self.step)

    def end_epochs(self) -> None:
        self.in_epochs, self._epoch = False, -1

    def begin_phase(self) -> None:
        """Begin the phase of a ``job.steps`` outside any ``job.epochs``."""
        self._next_phase()
        self._loop = 0
        self.entry["epochs"] = 0

    def _next_phase(self) -> None:
        self.phase, self._is_past = self.phase + 1, False

    def reached(self, saved: SavedImage) -> bool:
        """Record that the state of ``saved`` is restored; return True if it is the last commit.

        Otherwise it is the end of a finished phase; or an earlier state of that phase, whose rest
        is computed again, if code behind the phase's last loop had changed the state.
        """
        self._is_past = saved is not self.saved
        if not self._is_past:
            for name in self.parts.keys() & saved.values.keys():
                self.parts[name].restore(saved.values[name])
            self.saved = None
        return not self._is_past

    def begin_loop(self, name: str | None) -> CursorPosition:
        """Return the position at which the next ``job.steps`` begins."""
        name = name or f"steps-{self.phase}"
        start = CursorPosition(self.phase, self._epoch, self._loop, 0, False, name, self.step)
        self._loop += 1
        return start

    def end_body(self) -> None:
        self.step += 1
        self.position = replace(self.position, batches=self.position.batches + 1, step=self.step)

    def steps_left(self, length: int | None) -> int:
        """Return the steps until the last epoch ends; -1 if the loader has no ``length``."""
        if length is None:
            return -1
        epoch = self.position.epoch
        loops = self.entry["epochs"] - epoch if epoch >= 0 else 1
        return int(loops * length - self.position.batches)

    def end_loop(self) -> None:
        """Mark the current loop as finished."""
        self.position = replace(self.position, finished=True, step=self.step)

    def upcoming(self) -> tuple[SavedImage, bool] | None:
        """Return the image from which the next ``job.steps`` resumes, and whether it had ended.

        Return None if the loop begins from its start.
        """
        if self.in_epochs:
            raise InvalidInput("a Trainer inside job.epochs", hint="use range() here")
        phase = self.phase + 1
        saved = self.image_of_phase(phase)
        if saved is None:
            return None
        own = saved.data("data").own  # a ``LoaderProxy`` stores whether it was closed
        is_over = saved.position.finished or saved.position.phase != phase
        return saved, is_over or (isinstance(own, dict) and bool(own.get("is_closed")))

    def image_of_phase(self, phase: int | None = None) -> SavedImage | None:
        """Return the image from which to resume this phase, or None to start afresh."""
        phase = self.phase if phase is None else phase
        if self.saved is None or (self._is_past and phase == self.phase):
            return None
        if phase == self.saved.position.phase:
            return self.saved
        if phase > self.saved.position.phase:
            raise InvalidInput("the script passed the position of its commit: it has changed")
        later = [past for past in sorted(self.past) if past >= phase]
        return SavedImage(memoryview(self.past[later[0]])) if later else self.saved

    def go_to(self, saved: SavedImage, start: CursorPosition) -> None:
        """Continue the loop that begins at ``start`` from the position of ``saved``."""
        place = saved.position
        if place.phase == start.phase and start.order > place.order:
            raise InvalidInput("the script passed the position of its commit: it has changed")
        self.step, self.position = place.step, place

    @property
    def past_bytes(self) -> int:
        """Number of bytes that images of finished phases take in a slice."""
        return sum(len(image) + 64 for image in self.past.values())

    def keep_past(self, phase: int, image: memoryview) -> bool:
        """Keep the image of a finished phase; return False if older images had to be dropped."""
        images = (compact_image(one, without=PAST) for one in images_in(image))
        self.past[phase] = b"".join(images)
        return not self.drop_past(MAX_PAST_BYTES)

    def drop_past(self, max_bytes: int) -> bool:
        """Drop the oldest images of phases beyond the limit; return True if any was dropped."""
        dropped = False
        if sum(map(len, self.past.values())) > max_bytes:  # first the states within the last epochs
            self.past = {n: bytes(images_in(memoryview(one))[0]) for n, one in self.past.items()}
        while len(self.past) > MIN_PAST_PHASES and sum(map(len, self.past.values())) > max_bytes:
            del self.past[min(self.past)]
            dropped = True
        return dropped
