"""``job.shared``: a DataLoader whose batches are a function of seed, pass and index alone.

Each job can therefore load each batch itself, at any time, with the bits that other jobs would
get. A batch from the ring equals a batch that the job loads, also after the job resumes.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...base.errors import SharedInputRefused
from ...workers.training.randomness import generators_of, own_random, seed_all
from .ring import Lent, Ring, private
from .table import Label


class SharedLoader:
    """Iterable over a DataLoader's batches; ``job.steps`` resumes it exactly at the next batch.

    Attributes:
        loaded, found: numbers of batches that this process loaded, and that it got from the ring.
    """

    def __init__(
        self,
        loader: Any,
        name: str,
        *,
        seed: int,
        step: Callable[[], int],
        ring: Ring | None = None,
    ) -> None:
        """Wrap ``loader``; ``step`` returns the job's step. Without ``ring``, load each batch here.

        Raises:
            SharedInputRefused: this loader's batches are not a function of seed, pass and index.
        """
        _refuse(loader, name)
        self._loader, self._name, self._seed, self._step, self._ring = (
            loader,
            name,
            seed,
            step,
            ring,
        )
        self._facts = {
            "samples": str(len(loader.dataset)),
            "batch_size": str(loader.batch_size),
            "drop_last": str(loader.drop_last),
            "sampler": type(loader.sampler).__name__,
            "seed": str(seed),
        }
        self.loaded = self.found = 0
        self._newest = (-1, 0)  # ``begins`` of the newest pass
        self._outer: Callable[[], _Pass | None] = lambda: None
        self._resumed: tuple[tuple[int, int], int] | None = None
        self._lent: Lent | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return attributes that scripts read from a DataLoader, as in ``len(loader.dataset)``."""
        if name not in ("dataset", "batch_size", "sampler", "batch_sampler", "drop_last"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._resumed is None:
            step = self._step()
            self._newest = (step, self._newest[1] + 1 if self._newest[0] == step else 0)
            begun = _Pass(self, self._newest)
        else:
            (begins, skip), self._resumed = self._resumed, None
            begun = _Pass(self, begins, skip)
        outer = self._outer()
        if outer is None or outer.is_over:  # else this pass runs inside the body of the outer pass
            self._outer = weakref.ref(begun)
        return begun

    def state_dict(self) -> dict[str, Any]:
        """Return the newest pass, and the outer pass with the number of batches that it yielded."""
        outer = self._outer()
        begins, batches = ((-1, 0), 0) if outer is None else (outer.begins, outer.batches)
        return {"newest": list(self._newest), "begins": list(begins), "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator continue the outer pass of ``state`` after its last batch."""
        self.pass_by(state)
        step, before = state["begins"]
        self._resumed = (step, before), state["batches"]

    def pass_by(self, state: dict[str, Any]) -> None:
        """Make the next iterator begin a new pass after the newest pass of ``state``."""
        step, before = state["newest"]
        self._newest = step, before

    # ------------------------------------------------------------------------- batches of a pass

    def _begin(self, begins: tuple[int, int]) -> Iterator[Any]:
        """Return an iterator of lists of sample indices, from the loader's own batch sampler."""
        with own_random():
            seed_all(self._seed, begins, 0, "order")  # some samplers draw the whole order now
            order: Iterator[Any] = iter(self._loader.batch_sampler)
            # A DataLoader draws one number from its generator in each pass, too.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return order

    def _get(self, begins: tuple[int, int], index: int, samples: list[Any]) -> Any:
        if self._lent is not None and self._lent.is_written:
            raise SharedInputRefused(
                f'a batch of the shared input "{self._name}" was written in place before step '
                f"{self._step()} ended",
                hint="other jobs use it, too: write to a copy, x = x.clone()",
            )
        self._lent = None

        def load() -> Any:
            self.loaded += 1
            with own_random():
                seed_all(self._seed, begins, index, "samples")
                return self._fetch(samples)

        if self._ring is None:
            self._lent = private(load())
        else:
            order = hashlib.sha256(repr((samples, self._facts)).encode()).hexdigest()[:32]
            label = Label(self._name, begins, index, order)
            self._lent = self._ring.get(label, self._facts, load)
            self.found += self._lent.was_found
        return self._lent.value

    def _fetch(self, samples: list[Any]) -> Any:
        """Load samples as a DataLoader without worker processes does."""
        dataset = self._loader.dataset
        many = getattr(dataset, "__getitems__", None)
        items = many(samples) if many else [dataset[sample] for sample in samples]
        return self._loader.collate_fn(items)


class _Pass:
    """One pass over the loader; ``begins`` and a batch's index seed the global generators."""

    def __init__(self, owner: SharedLoader, begins: tuple[int, int], skip: int = 0) -> None:
        self._owner, self.begins, self.batches = owner, begins, 0
        self.is_over = False
        self._order = owner._begin(begins)
        with own_random():
            for _ in range(skip):
                self._draw()

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        index = self.batches
        try:
            with own_random():
                samples = self._draw()
        except StopIteration:
            self.is_over = True
            raise
        keeps_gradients = torch.is_grad_enabled()
        # Tensors made in inference mode do not count in-place writes (``Lent.is_written``).
        with torch.inference_mode(mode=False), torch.set_grad_enabled(keeps_gradients):
            return self._owner._get(self.begins, index, samples)

    def _draw(self) -> list[Any]:
        seed_all(self._owner._seed, self.begins, self.batches, "order")
        samples = list(next(self._order))
        self.batches += 1
        return samples


def _refuse(loader: Any, name: str) -> None:
    """Raise SharedInputRefused, with a hint, if the loader's batches cannot be shared."""
    why, hint = "", ""
    dataset = getattr(loader, "dataset", None)
    is_map = isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset)
    if not isinstance(loader, DataLoader) or not is_map:
        kind = type(getattr(loader, "dataset", loader)).__name__
        why = f"a {kind} cannot be asked for any one sample"
        hint = "give it a torch DataLoader over a dataset with __getitem__ and __len__"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        why = f"{type(loader).__name__} has an __iter__ of its own"
        hint = "share a plain DataLoader, and do the rest in the loop's body"
    elif loader.num_workers:
        why = f"num_workers={loader.num_workers}"
        hint = "num_workers=0: the jobs that share it load for each other"
    elif loader.batch_sampler is None:
        why, hint = "batch_size=None", "give the DataLoader a batch_size"
    elif hasattr(loader, "state_dict") or hasattr(loader.dataset, "state_dict"):
        why, hint = "its loader or dataset keeps a state of its own", "share a stateless one"
    elif own := [*generators_of(loader.dataset), *generators_of(loader.collate_fn)]:
        why = f"its dataset draws from a generator of its own ({own[0]})"
        hint = "draw from torch's, numpy's or random's global one: here each batch seeds them"
    if why:
        raise SharedInputRefused(f'job.shared("{name}"): {why}', hint=hint)
