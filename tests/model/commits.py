"""The job's commits: what a script resumes from must be whole, and no older than was said."""

from __future__ import annotations

from typing import Any

from pipeswitch.errors import RemoteProtocolError
from pipeswitch.simulator.violation import Violation, require

from .daemon import EMPTY_AREA, Area
from .script import image_of


class JobCommits:
    """The commit area, and what invariant I2 asks of it."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._area = Area()
        self._content: Any = EMPTY_AREA  # None: it was written since
        self._loaded: Any = EMPTY_AREA  # what is in ``_area``
        self.is_open = False
        self.on_disk = -1  # the step of the commit that was written there

    @property
    def area(self) -> Area:
        """The real area; whoever takes it may write to it."""
        if self._content is not None and self._loaded is not self._content:
            self._area.set(self._content)
        self._content = self._loaded = None
        return self._area

    def freeze(self) -> Any:
        """Its content, None while there is no area, and what is on disk."""
        if not self.is_open:
            return None, -1
        if self._content is None:
            self._content = self._loaded = self._area.save()
        return self._content, self.on_disk

    def thaw(self, frozen: Any) -> None:
        """As it was when it was frozen."""
        content, self.on_disk = frozen
        self.is_open = content is not None
        self._content = content or EMPTY_AREA

    def create(self) -> None:
        self.is_open, self._content, self.on_disk = True, EMPTY_AREA, -1

    def last(self) -> tuple[int, ...]:
        """The image a script resumes from; empty when there is none."""
        area = self.area
        try:
            commit = area.newest()
        except RemoteProtocolError as error:
            raise Violation(f"no commit is whole (I2): {error}") from None
        promised = self._world.recall.moment.promised_step
        if commit is None:
            require(promised < 0, f"the commit of step {promised} is lost (I2)")
            return ()
        image = tuple(area.image(commit))
        is_right = commit.step < 4 and image == image_of(commit.step)
        require(is_right, f"the commit of step {commit.step} holds {image} (I2)")
        require(commit.step >= promised, f"the commit of step {promised} is lost (I2)")
        return image

    def flipped(self) -> None:
        """The memory daemon has just flipped one."""
        require(self.last() != (), "a commit was flipped and is not there (I2)")

    def persist(self) -> int:
        """The memory daemon writes the newest one to disk; its step, -1 when there is none."""
        commit = self.area.newest()
        self.on_disk = -1 if commit is None else commit.step
        return self.on_disk

    def require_on_disk(self) -> None:
        """The server leaves: the job will resume from what is on disk."""
        if self.is_open:
            image = self.last()
            is_there = not image or self.on_disk == image[2]
            require(is_there, f"it leaves with a commit that is not on disk: {image} (I2)")

    def drop(self) -> None:
        """The job is over."""
        require(
            self.last() == image_of(self._world.scope.steps),
            "the job is over and its last step is not committed (I2)",
        )
        self.is_open = False


__all__ = ["JobCommits"]
