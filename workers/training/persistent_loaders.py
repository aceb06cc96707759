"""Random state of DataLoaders' persistent workers, so that a resumed script continues it.

A loader with ``persistent_workers`` starts its workers in its first pass and keeps them. So a later
pass draws no base seed, and its workers' generators continue from the last pass. A resumed script
starts new workers in the middle of the job. They would draw one more base seed, from the generator
that also shuffles, and their own generators would start over. So workers send the state of their
generators with each batch, commits contain these states, and new workers begin with them. A loader
is identified by the order in which the script creates its loaders.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, dataloader, get_worker_info

from .randomness import RandomState, generators_of
from .snapshot import load_state, state_of

Workers = tuple[torch.Tensor, dict[int, Any]]
"""Workers of one loader: the state from which their base seed was drawn, and the generators of each
worker that has made a batch."""
_Base: Any = getattr(dataloader, "_MultiProcessingDataLoaderIter", object)
_Loader: Any = DataLoader
_begin = _Loader.__init__
_get_iterator = getattr(_Loader, "_get_iterator", None)
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_saved: WeakKeyDictionary[Any, Workers] = WeakKeyDictionary()


class _Sent:
    """Generator states of a worker; no tuple, because pinning memory turns tuples into lists."""

    def __init__(self, worker_id: int, states: Any) -> None:
        self.worker_id, self.states = worker_id, states


class _Worker:
    """The script's ``worker_init_fn`` and ``collate_fn``, with restored and sent generators."""

    def __init__(self, loader: Any, states: dict[int, Any]) -> None:
        self._init, self._collate, self._states = loader.worker_init_fn, loader.collate_fn, states

    def start(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        if worker_id in self._states:
            (of_torch, *others), own = self._states[worker_id]
            RandomState.from_values((torch.tensor(of_torch), *others)).restore("cpu")
            for path, generator in _generators().items():
                if path in own:
                    load_state(generator, own[path])

    def collate(self, samples: Any) -> Any:
        batch = self._collate(samples)
        of_torch, *others = RandomState("cpu").values()
        own = {path: state_of(generator) for path, generator in _generators().items()}
        states = (of_torch.numpy(), *others), own
        return batch, _Sent(get_worker_info().id, states)  # type: ignore[union-attr]


def _generators() -> dict[str, Any]:
    return generators_of(get_worker_info().dataset)  # type: ignore[union-attr]


class PersistentIterator(_Base):  # type: ignore[misc]
    """Iterator of a loader whose workers send their generators with each batch.

    Args:
        saved: the workers whose state is continued; None for a loader's first workers.
    """

    def __init__(self, loader: Any, saved: Workers | None) -> None:
        self._indices, self._began_with, self.is_exhausted = loader._index_sampler, saved, False
        drawn_from = (loader.generator or torch.default_generator).get_state()
        self._drawn_from, states = (drawn_from, {}) if saved is None else saved
        self._states = dict(states)
        worker, view = _Worker(loader, states), copy.copy(loader)
        view.worker_init_fn, view.collate_fn = worker.start, worker.collate
        if saved is not None:  # same base seed, no other draw, and the sampler does not start
            view.generator = torch.Generator()
            view.generator.set_state(self._drawn_from)
            vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = ()
        super().__init__(view)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._index_sampler = self._indices
        if not first_iter:
            self.end_pass()
            self._began_with = self.workers()
        self.is_exhausted = False
        super()._reset(loader, first_iter)

    def _next_data(self) -> Any:
        try:
            return super()._next_data()
        except StopIteration:
            self.is_exhausted = True
            raise

    def _process_data(self, data: Any, *rest: Any) -> Any:
        batch, sent = super()._process_data(data, *rest)
        self._states[sent.worker_id] = sent.states
        return batch

    def end_pass(self) -> None:
        """End this pass: wait for the batches that workers fetch ahead, and drop them."""
        # Workers at the end of their iterable dataset send no more replies.
        count: int = 0 if isinstance(self._dataset, IterableDataset) else self._tasks_outstanding
        if not self.is_exhausted:
            self.is_exhausted = True
            self._tasks_outstanding: int = 0
            ahead = [info[1] for info in self._task_info.values() if len(info) == 2]
            with contextlib.suppress(RuntimeError):  # a worker has died
                ahead += [self._get_data()[1] for _ in range(count)]
            for _, sent in (one for one in ahead if isinstance(one, (tuple, list))):  # no errors
                self._states[sent.worker_id] = sent.states

    def workers(self) -> Workers | None:
        """Return the state for new workers (None: fresh ones), which repeat an unfinished pass."""
        return (self._drawn_from, {**self._states}) if self.is_exhausted else self._began_with


def watch() -> None:
    """Replace the methods of ``DataLoader`` that create loaders and iterators."""
    _numbers.clear()
    _saved.clear()
    if _Base is object or _get_iterator is None:
        return  # this torch has other names
    created = itertools.count()

    @functools.wraps(_begin)
    def begin(loader: Any, *args: Any, **keywords: Any) -> None:
        _begin(loader, *args, **keywords)
        if loader.persistent_workers:
            _numbers[loader] = next(created)

    def get_iterator(loader: Any) -> Any:
        if loader in _numbers:
            return PersistentIterator(loader, _saved.pop(loader, None))
        return _get_iterator(loader)

    _Loader.__init__, _Loader._get_iterator = begin, get_iterator


def unwatch() -> None:
    """Restore the methods of ``DataLoader``."""
    _Loader.__init__, _Loader._get_iterator = _begin, _get_iterator


def _references(loader: Any) -> int:
    iterator = loader._iterator
    return sys.getrefcount(iterator)


HELD_ONCE: Final = _references(SimpleNamespace(_iterator=object()))


def capture() -> dict[int, Workers]:
    """Return the workers of each loader that has begun, by the loader's number."""
    pools: dict[int, Workers | None] = {}
    if not _numbers:  # most scripts have none, and this runs at each point
        return {}
    for loader, number in _numbers.items():
        if not isinstance(loader._iterator, PersistentIterator):
            pools[number] = _saved.get(loader)
            continue
        if _references(loader) <= HELD_ONCE:  # no loop refers to it: the pass is over
            loader._iterator.end_pass()
        pools[number] = loader._iterator.workers()
    return {number: workers for number, workers in pools.items() if workers is not None}


def restore(workers: dict[int, Workers]) -> None:
    """Continue with these workers in each loader's next pass."""
    for loader, number in _numbers.items():
        loader._iterator = None
        _saved.pop(loader, None)
        if number in workers:
            _saved[loader] = workers[number]


def end_pass(loader: Any) -> None:
    """End the pass of a loader whose loop may have been left early."""
    iterator = getattr(loader, "_iterator", None)
    if isinstance(iterator, PersistentIterator):
        iterator.end_pass()
