"""Loaders of accelerate, and training loops of Transformers' and Lightning's ``Trainer``.

These loops fetch from a ``LoaderProxy``, and each fetch ends a step. All epochs of one ``train()``
are one loop of the session: work of the framework between two epochs belongs to the last step of
the earlier epoch.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from pipeswitch.base.errors import InvalidInput

from .attributes import Attributes, Keepers
from .randomness import RandomState
from .reachable import is_own
from .snapshot import DataPosition, DataState

Moment = tuple[tuple[Any, ...], tuple[Any, ...]]  # states of generators: global, loader's


class Source:
    """Batches of a framework's loader, epoch after epoch, and the position to resume from.

    Accelerate's loader fetches one batch ahead, to recognise the last batch. This fetch used the
    generators' states of the step before, so a resumed script restores them to fetch it again.
    """

    # No __dict__: the session would find this object's generators there and capture them, too.
    __slots__ = (
        "_ahead",
        "_before",
        "_data",
        "_device",
        "_entry",
        "_held",
        "_is_fresh",
        "_iterator",
        "_loader",
        "given",
        "is_closed",
    )

    def __init__(self, loader: Any, device: str) -> None:
        self._ahead = hasattr(loader, "base_dataloader")  # accelerate's public name
        self._loader, self._device = loader, device
        self._data = DataPosition(loader.base_dataloader if self._ahead else loader, {})
        self._data.warn_if_inexact()
        self._held: deque[Any] = deque()
        self._entry: Moment | None = None  # generators at the start of this epoch
        self._before: Moment | None = None  # generators at the start of the last fetch
        self._is_fresh = False  # an epoch has begun, but no batch was fetched
        self.given = 0  # number of this epoch's returned batches
        self.is_closed = False  # the framework has finished and fetches no more batches

    def begin(self, behind: int) -> None:
        """Begin the next epoch after its first ``behind`` batches."""
        self.given, self._is_fresh = behind, True
        self._entry = self._before = now = self._now()
        self._open(DataState(*now[1]) if behind else None)

    @property
    def is_over(self) -> bool:
        """True if this epoch's last batch was returned."""
        if self._ahead:
            return not (self._is_fresh or self._held)
        return bool(self.given == len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_closed:
            raise StopIteration
        if self._ahead and self._is_fresh:
            self._fetch()
        self._is_fresh = False
        try:
            batch = self._held.popleft() if self._held else next(self._iterator)
        except StopIteration:
            raise InvalidInput(
                f"the loader returned only {self.given} batches, fewer than its length"
            ) from None
        if self._ahead:
            self._fetch()
        self.given += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position; called between two steps, while no fetch is under way."""
        names = ("given", "is_closed", "_is_fresh", "_entry", "_before")
        iteration = self._loader.iteration if self._ahead else 0
        state = {name: getattr(self, name) for name in names}
        data = self._data.capture()
        now = (data.generators, data.own)
        return {**state, "held": len(self._held), "iteration": iteration, "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position; used batches are fetched again only if the loader requires it."""
        for name in ("given", "is_closed", "_is_fresh", "_entry", "_before"):
            setattr(self, name, state[name])
        if self.is_closed:
            return
        self.pass_by(state)
        now = DataState(*state["now"])
        self._go_to(state["_entry"])
        self._open(DataState(*state["_before"][1]) if state["held"] else now)
        if state["held"]:
            self._go_to(state["_before"])
            self._held.append(next(self._iterator))
        self._data.restore_generators(now)

    def pass_by(self, state: dict[str, Any]) -> None:
        """Set the loader's epoch to that of ``state``; fetch nothing."""
        if self._ahead:
            self._loader.iteration = state["iteration"]

    def _open(self, data: DataState | None) -> None:
        """Open the loader at a position; with None, at its start."""
        self._held.clear()
        if self._ahead:  # like DataLoaderShard.__iter__
            self._loader.begin()
            self._loader.set_epoch(self._loader.iteration)
        if data is None:
            self._iterator = self._data.open_new()
        elif self._data.is_checked and self._entry is not None:  # the state may omit a buffer
            self._iterator = self._data.open_again(self.given, DataState(*self._entry[1]))
        else:
            self._iterator = self._data.open_at(self.given, data)

    def _fetch(self) -> None:
        self._before = self._now()
        try:
            self._held.append(next(self._iterator))
        except StopIteration:
            self._loader.end_of_dataloader = True

    def _now(self) -> Moment:
        data = self._data.capture()
        return RandomState(self._device).values(), (data.generators, data.own)

    def _go_to(self, moment: Moment) -> None:
        RandomState.from_values(moment[0]).restore(self._device)
        self._data.restore_generators(DataState(*moment[1]))


class AcceleratedEpoch(Source):
    """One epoch of accelerate's loader in a ``job.steps`` loop."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._entry is None:  # not resumed
            self.begin(0)
        return self

    def __next__(self) -> Any:
        from accelerate.utils import send_to_device

        if self.is_over:  # like the end of DataLoaderShard.__iter__
            self._loader.iteration += 1
            self._loader.end()
            raise StopIteration
        return send_to_device(super().__next__(), self._loader.device)


class LoaderProxy:
    """Proxy of a framework's loader, with an iteration of its own and the loader's attributes."""

    def __init__(self, loop: TrainerLoop, loader: Any) -> None:
        self._loop, self._loader, self._behind = loop, loader, 0
        self._source = Source(loader, loop.session.device)
        self._steps: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:  # Lightning sets the loader's worker_init_fn
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        behind, self._behind = self._behind, 0
        self._source.begin(behind)
        return self

    def __next__(self) -> Any:
        if self._source.is_over:
            raise StopIteration
        return self.step()

    def step(self) -> Any:
        """Return the next batch; the first call begins or resumes the session's loop."""
        if self._steps is None:
            self._steps = self._loop.session.steps(self._source, **self._loop.objects())
        return next(self._steps)

    def skip(self, batches: int) -> LoaderProxy:
        """Begin the next epoch after ``batches`` batches, unless a commit sets the position."""
        if self._loop.session.place.upcoming() is None:
            self._behind = batches
        return self

    def close(self) -> None:
        """End and commit the session's loop, because the framework has finished."""
        self._source.is_closed = True
        if self._steps is not None:
            next(self._steps, None)


class TrainerLoop:
    """One trainer's loop; as an ``extra_state`` it captures the trainer's own state."""

    def __init__(self, session: Any, trainer: Any) -> None:
        self.session, self.trainer = session, trainer
        self.feed: LoaderProxy | None = None
        self.was_over = False  # True: the loop had ended in the job's last commit

    def objects(self) -> dict[str, Any]:
        """Return the keyword arguments for ``job.steps``."""
        raise NotImplementedError

    def extras(self, scaler: Any, keepers: Keepers) -> dict[str, Any]:
        extras = {"trainer": self, "callbacks": keepers}
        return extras if scaler is None else {**extras, "scaler": scaler}

    def attributes(self, model: Any, owners: dict[str, Any], **others: Any) -> Attributes:
        """Return the attributes of a model's modules and of further objects."""
        for name, module in model.named_modules():
            file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
            (owners if is_own(file or "") else others)[f"model.{name}"] = module
        return Attributes(owners, others)

    def began(self, *_: Any, **__: Any) -> None:
        """Restore a loop that had ended; called as a callback when training begins."""
        if self.was_over and self.feed is not None:
            with contextlib.suppress(StopIteration):
                self.feed.step()

    def ended(self, *_: Any, **__: Any) -> None:
        if self.feed is not None:
            self.feed.close()
