"""Small state that changes within a step: random generators, options, schedulers, data position.

It is captured at every commit point, so capturing must stay cheap: tens of microseconds. Parameters
and optimizer tensors are not captured here; they do not change before ``optimizer.step()``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import marshal
import random
import sys
import warnings
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput
from pipeswitch.job import InexactResumeWarning, script_level

from .randomness import GENERATORS, RandomState, generators_of
from .torch_private import Drawn, advance_sampler, is_plain_map_loader, version

_logger = logging.getLogger(__name__)
KNOWN_LOADERS: Final = (list, tuple, range, str, dict, torch.Tensor, np.ndarray)  # without state
BLOB_BYTES: Final = 96  # overhead of an attachment in a commit
CHANGED: Final = (
    "The data differ: pass what changes them, too, as in extra_state={'indices': subset.indices}"
)
SMALL_BYTES: Final = 1 << 16  # smaller attachments are copied at once, larger ones are watched


class Captured:
    """State at one instant: small attachments are copied, large tensors watched by version."""

    def __init__(self, value: Any, fingerprint: bytes | None = None) -> None:
        self.data, attachments = state_codec.encode(value)
        text = json.dumps(self.data)
        # ``marshal`` cannot distinguish bytes from numpy's scalars.
        has_raw = bool(attachments) or '{"bytes":' in text or '{"scalar":' in text
        self.fingerprint = None if has_raw else fingerprint
        # Number of bytes in a commit, including the names of attachments.
        self.size_bytes = len(text) + sum(part.size_bytes + BLOB_BYTES for part in attachments)
        self._parts: list[bytes | tuple[torch.Tensor, int]] = []
        self._sum = 0
        for part in attachments:
            watch = part.size_bytes > SMALL_BYTES and isinstance(part.source, torch.Tensor)
            watch = watch and not part.source.is_inference()
            self._parts.append((part.source, version(part.source)) if watch else part.read())

    def is_intact(self) -> bool:
        """Return True if no watched tensor was written since the capture."""
        return all(
            version(part[0]) == part[1] for part in self._parts if not isinstance(part, bytes)
        )

    def checksum(self) -> int:
        """Return a checksum of the watched tensors, which also shows writes through ``.data``; if
        one was written visibly, return the last checksum."""
        watched = (part[0] for part in self._parts if not isinstance(part, bytes))
        if self.is_intact():
            self._sum = sum(zlib.crc32(state_codec.Attachment(one, 0).read()) for one in watched)
        return self._sum

    def read(self) -> list[bytes]:
        """Return the attachments' bytes."""
        return [
            part if isinstance(part, bytes) else state_codec.Attachment(part[0], 0).read()
            for part in self._parts
        ]


def captured(value: Any, last: Captured | None) -> Captured:
    """Capture ``value``, or return ``last`` if it is plain data and unchanged.

    Learning rates and the like seldom change, and comparing costs a fifth of capturing them.
    ``marshal`` distinguishes equal values of other types (1, 1.0, True; 0.0, -0.0). Its bytes are
    never loaded. It refuses tensors, so values that contain tensors are captured each time.
    """
    try:
        fingerprint = marshal.dumps(value, 2)  # 2: the last version that ignores identities
    except ValueError:
        return Captured(value)
    if last is not None and last.fingerprint == fingerprint:
        return last
    return Captured(value, fingerprint)


def named(value: Any, what: str) -> dict[str, Any]:
    """Return one object, several objects, or a dict of objects as a dict with stable names."""
    if value is None:
        return {}
    items = {what: value}
    if isinstance(value, Mapping) and not has_state(value):
        keys = [key if isinstance(key, str) else str(index) for index, key in enumerate(value)]
        if len(set(keys)) < len(keys):
            raise InvalidInput(f"{what}: two keys look the same", hint="use names: strings")
        items = dict(zip(keys, value.values(), strict=True))
    elif isinstance(value, Iterable) and not has_state(value):
        items = {str(index): item for index, item in enumerate(value)}
    for item in items.values() if what != "extra_state" else ():  # ``named_extras`` checks these
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise InvalidInput(
                f"{what}: a {type(item).__name__} has no state_dict() and load_state_dict()",
                hint="pass an object with both, or several in a list or dict",
            )
    return items


_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)
NOTES: Final = (*_DICTS, list, set, deque, torch.Tensor, np.ndarray)
"""Containers in which a script may keep plain values, such as the best loss so far or a hidden
state."""


def has_state(value: Any) -> bool:
    """Return True if the value is a generator or has a ``state_dict()``."""
    return hasattr(value, "state_dict") or isinstance(value, GENERATORS)


def named_extras(value: Any, *, is_literal: bool) -> dict[str, Any]:
    """Return ``extra_state`` by name. A dict or list of plain values counts as one state.

    Args:
        is_literal: True if only the call refers to ``value``. Then later assignments to the
            script's variables do not change it.

    Raises:
        InvalidInput: it contains something that cannot be captured.
    """
    kind = type(value)
    items = value.values() if kind in _DICTS else value if kind in (list, tuple) else ()
    is_plain = not any(map(has_state, items))
    if kind in NOTES and is_plain and not (is_literal and kind in (*_DICTS, list)):
        return {"extra_state": value}
    if not (value is None or has_state(value) or isinstance(value, (Mapping, list, tuple))):
        raise InvalidInput(
            f"extra_state: a {kind.__name__} has no state_dict()",
            hint="pass a dict that contains it: note = {'best': 0.0}; extra_state=note",
        )
    is_literal = is_literal and isinstance(value, (Mapping, list, tuple))
    if is_literal and (paths := _values_of_now(value, "extra_state")):
        warnings.warn(
            f"job.steps: {', '.join(paths[:4])}: a number or text is passed by value. What the "
            "script assigns to its variable later is not captured and starts over in a resumed "
            "script. Keep it in a dict: note = {'best': best}; extra_state=note; note['best'] = …",
            InexactResumeWarning,
            stacklevel=script_level(),
        )
    extras = named(value, "extra_state")
    states = {name: item for name, item in extras.items() if has_state(item) or type(item) in NOTES}
    if len(states) < len(extras) and not is_plain:
        name, item = next((n, item) for n, item in extras.items() if n not in states)
        raise InvalidInput(
            f"extra_state {name!r}: a {type(item).__name__} has no state_dict()",
            hint="keep it in a dict: note = {'best': 0.0}; extra_state={'note': note}",
        )
    for name, item in states.items():
        if hasattr(item, "state_dict") and not hasattr(item, "load_state_dict"):
            raise InvalidInput(
                f"extra_state {name!r}: a {type(item).__name__} has a state_dict() "
                "and no load_state_dict()"
            )
    return states


def _values_of_now(value: Any, path: str) -> list[str]:
    """Return the paths of plain values in containers that only the call refers to."""
    (alone,) = [sys.getrefcount(one) for one in [dict[str, Any]()]]
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    paths: list[str] = []
    for key, item in [*pairs]:
        if type(item) in (*_DICTS, list, tuple):
            if type(item) is tuple or sys.getrefcount(item) <= alone + 1:  # 1: the list
                paths += _values_of_now(item, f"{path}[{key!r}]")
        elif not (has_state(item) or type(item) in NOTES):
            paths.append(f"{path}[{key!r}]")
    return paths


def state_of(item: Any) -> Any:
    """Return a generator's or other object's state; for a container, return the container."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    if isinstance(item, np.random.RandomState):
        return item.get_state(legacy=False)
    if isinstance(item, random.Random):
        return item.getstate()
    return item if type(item) in NOTES else item.state_dict()


def load_state(item: Any, state: Any) -> None:
    """Load a result of ``state_of`` into the item."""
    if isinstance(item, torch.Generator):
        item.set_state(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    elif isinstance(item, np.random.RandomState):
        item.set_state(state)
    elif isinstance(item, random.Random):
        item.setstate(state)
    elif type(item) in NOTES:
        filled(item, state)
    else:
        item.load_state_dict(state)


def filled(item: Any, state: Any, used: dict[int, Any] | None = None) -> Any:
    """Copy ``state`` into ``item`` and return ``item``; if their types differ, return ``state``.

    Args:
        used: the containers that were filled, by id. If one is met again with another state, as in
            ``h = c = torch.zeros(9)`` before a loop replaced both, return that state.
    """
    kind, used = type(item), {} if used is None else used
    is_tensor = isinstance(item, torch.Tensor) and isinstance(state, torch.Tensor)
    if kind is not type(state) and not is_tensor:
        return state
    if kind in NOTES or is_tensor:
        if id(item) in used and not _is_same(item, state):
            return state
        used[id(item)] = item
    if kind in _DICTS:
        values = {key: filled(item.get(key), value, used) for key, value in state.items()}
        item.clear()
        item.update(values)
    elif kind in (list, deque, tuple):
        pairs = zip_longest(item, state)
        items = [filled(*pair, used) for pair in pairs][: len(state)]
        if kind is tuple:
            return tuple(items)
        item.clear()
        item.extend(items)
    elif kind is set:
        item.clear()
        item.update(state)
    elif kind is np.ndarray and item.dtype == state.dtype and item.shape == state.shape:
        item[...] = state
    elif is_tensor and item.dtype == state.dtype:
        with torch.no_grad():
            if item.shape == state.shape:
                item.copy_(state)
            else:
                item.set_(state.to(item.device))
    else:
        return state
    return item


def _is_same(one: Any, other: Any) -> bool:
    (data, parts), (other_data, others) = state_codec.encode(one), state_codec.encode(other)
    return repr((data, [part.read() for part in parts])) == repr(
        (other_data, [part.read() for part in others])
    )


@dataclass(frozen=True)
class Proof:
    """Newest batch and the state before its fetch, to check that the state yields this batch."""

    random: RandomState
    generators: dict[str, Any]
    own: Any
    batch: Any  # as it was fetched; if the script has written to it, there is no proof
    versions: tuple[int, ...]

    def values(self) -> tuple[Any, ...] | None:
        """Return the values for ``state_codec``, or None if the batch has changed or is unknown."""
        is_as_fetched = tuple(map(version, tensors_of(self.batch))) == self.versions
        mark = digest_of(self.batch) if is_as_fetched else None
        return None if mark is None else (self.random.values(), self.generators, self.own, mark)


def order_mark(indices: Any) -> int | None:
    """Return a checksum of a batch's indices."""
    return None if indices is None else zlib.crc32(repr(indices).encode())


def _parts_of(batch: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples."""
    leaves, todo = [], [batch]
    while todo:
        part = todo.pop()
        if isinstance(part, Mapping):
            todo += [one for pair in part.items() for one in pair]
        elif isinstance(part, (list, tuple)):
            todo += part
        else:
            leaves.append(part)
    return leaves


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [part for part in _parts_of(batch) if isinstance(part, torch.Tensor)]


def digest_of(batch: Any) -> str | None:
    """Return a digest of a batch, or None if it contains objects of unknown types."""
    total = hashlib.sha256()
    for part in _parts_of(batch):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            total.update(repr((part.dtype, part.shape)).encode())
            total.update(state_codec.Attachment(part, 0).read())
        elif isinstance(part, (str, bytes, int, float, complex, np.generic)) or part is None:
            total.update(repr(part).encode())
        elif isinstance(part, np.ndarray) and part.dtype.kind in state_codec.NUMPY_KINDS:
            total.update(repr((part.dtype, part.shape)).encode() + part.tobytes())
        else:
            return None
    return total.hexdigest()


@dataclass(frozen=True)
class DataState:
    """Position of a loader: the states of its generators, and its ``state_dict()`` if any."""

    generators: dict[str, Any]  # by the generator's path
    own: Any  # state_dict() of the loader or its dataset, or None
    workers: dict[int, Any] = field(default_factory=dict)  # see ``persistent_loaders.py``
    proof: Proof | None = None
    drawn: Any = None  # indices of the last batch


class DataPosition:
    """Position of a loader in its data; capturing it fetches no data.

    Args:
        loader: the argument of ``job.steps``.
        extras: ``extra_state``, whose generators a sampler may use.
    """

    def __init__(self, loader: Any, extras: Mapping[str, Any]) -> None:
        self.loader = loader
        self._generators = generators_of(loader)
        known = {id(generator) for generator in self._generators.values()}
        for name, item in extras.items():
            if isinstance(item, GENERATORS) and id(item) not in known:
                self._generators[f"extra_state.{name}"] = item
        self._keeper = _state_keeper(loader)
        dataset = getattr(loader, "dataset", None)
        self._is_behind = not any(self._keeper is one for one in (None, loader, dataset))
        is_ours = hasattr(loader, "pass_by")
        is_iterated = self._keeper is loader or isinstance(dataset, IterableDataset)
        self.is_checked = self._keeper is not None and is_iterated and not is_ours
        self._proof: Proof | None = None
        self._drawn = Drawn(None)

    @property
    def length(self) -> int | None:
        """Number of batches in one pass, or None if the loader has no length."""
        try:
            return len(self.loader)
        except Exception:  # the script's own object
            return None

    def capture(self) -> DataState:
        """Return the position; cheap, called at every commit point while no fetch is under way."""
        own = None if self._keeper is None else self._keeper.state_dict()
        generators = {path: state_of(g) for path, g in self._generators.items()}
        return DataState(generators, own, proof=self._proof, drawn=self._drawn.last)

    def parts(self) -> dict[str, Any]:
        """Return the generators, and the loader or dataset that keeps its own state, by name."""
        is_kept = self._keeper is not None and not hasattr(self._keeper, "pass_by")
        return {**self._generators, **({"": self._keeper} if is_kept else {})}

    def fetched(self, batch: Any, random: RandomState, before: DataState) -> None:
        """Record a batch with the state before its fetch, as a proof for a checked loader."""
        if self.is_checked:
            versions = tuple(map(version, tensors_of(batch)))
            self._proof = Proof(random, before.generators, before.own, batch, versions)

    def restore_generators(self, state: DataState) -> None:
        """Restore the loader's generators.

        Raises:
            InvalidInput: a generator is missing: the loop created it, or the script has changed.
        """
        for path, value in state.generators.items():
            if path not in self._generators:
                raise InvalidInput(
                    f"the random generator {path} existed when the loop was committed, but does "
                    "not any more",
                    hint="create it before the first job.steps",
                )
            load_state(self._generators[path], value)

    def pass_by(self, state: DataState) -> None:
        """Skip a finished loop: no batch of this pass is fetched."""
        if hasattr(self.loader, "pass_by"):
            self.loader.pass_by(state.own)

    def open_new(self) -> Iterator[Any]:
        """Return an iterator that begins at the start of the data."""
        iterator: Iterator[Any] = iter(self.loader)
        if is_plain_map_loader(self.loader):
            self._drawn = Drawn(iterator)
        return iterator

    def check_order(self, drawn: int | None) -> None:
        """Warn if the sampler has not drawn the indices of the last batch again."""
        if None not in (drawn, self._drawn.last) and order_mark(self._drawn.last) != drawn:
            self.warn(
                "its sampler draws other indices in the resumed script, because it reads state "
                "while it iterates: the data differ. Let its __iter__ draw the whole order first"
            )

    def open_at(
        self, batches: int, state: DataState, begin: DataState | None = None
    ) -> Iterator[Any]:
        """Return an iterator after ``batches`` batches; generators must be as at the loop's start.

        Args:
            begin: state at the loop's start; a loader behind a wrapper is restored to it.

        If the loader has fewer batches than were already used, warn, and end the loop.
        """
        if self._keeper is self.loader:
            self._keeper.load_state_dict(state.own)
            return iter(self.loader)
        if self._is_behind and begin is not None:
            return self.open_again(batches, begin)
        if self._keeper is not None:
            self._keeper.load_state_dict(state.own)
        iterator = self.open_new()
        is_iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        if self._keeper is not None and is_iterable:
            return iterator
        try:
            if not (is_plain_map_loader(self.loader) and advance_sampler(iterator, batches)):
                _drop(iterator, batches)
        except StopIteration:
            self._drawn = Drawn(None)
            self.warn(f"{batches} of its batches were used, but it has fewer now. {CHANGED}")
            return iter(())
        if self._keeper is not None:
            self._keeper.load_state_dict(state.own)
        return iterator

    def open_again(self, batches: int, begin: DataState) -> Iterator[Any]:
        """Return an iterator after ``batches`` batches; it fetches them again from ``begin``."""
        self._keeper.load_state_dict(begin.own)
        iterator: Iterator[Any] = iter(self.loader)
        _drop(iterator, batches)
        return iterator

    def open_proved(
        self,
        batches: int,
        proof: tuple[Any, ...],
        begins: Sequence[tuple[RandomState, DataState]],
        device: str,
    ) -> Iterator[Any] | None:
        """Return an iterator that has just fetched the last used batch, or None if that fails.

        A ``state_dict()`` may omit state: a buffer, or the generators of worker processes. So the
        restored state must yield the last batch again; if it does not, all batches of the loop are
        fetched again.

        Args:
            proof: the commit's ``Proof.values``.
            begins: random generators and data position at the loop's start.
        """
        random, generators, own, mark = proof
        ways = [(RandomState.from_values(random), DataState(generators, own), 1)]
        for start, data in begins:
            ways += [(start, data, batches), (start, replace(data, own={}), batches)]
        for start, data, count in ways:
            try:
                start.restore(device)
                self.restore_generators(data)
                self._keeper.load_state_dict(data.own)
                iterator: Iterator[Any] = iter(self.loader)
                if digest_of(_drop(iterator, count)) == mark:
                    return iterator
            except Exception as error:  # the script's own object; try the next way
                _logger.debug("state_dict of %s: %r", type(self._keeper).__name__, error)
        self.warn(
            f"the state_dict() of {type(self._keeper).__name__} did not restore the last batch, "
            "and fetching all batches again did not, either: the data differ from now on. Make it "
            "save its buffers and generators"
        )
        return None

    def warn(self, text: str) -> None:
        """Warn that the resumed script sees other data."""
        text = f"job.steps({type(self.loader).__name__}): {text}"
        warnings.warn(text, InexactResumeWarning, stacklevel=script_level())

    def warn_if_inexact(self) -> bool:
        """Warn once if the loader cannot be resumed exactly; return whether it warned."""
        loader = self.loader
        if self._keeper is loader:
            return False
        if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            is_stream = isinstance(loader.dataset, IterableDataset)
            is_lost = loader.persistent_workers and not hasattr(DataLoader.__init__, "__wrapped__")
            if loader.num_workers > 0 and (is_stream or is_lost):  # see persistent_loaders.watch
                why = "it has worker processes: a resume fetches and drops all batches used so far"
            elif is_stream and self._keeper is None:
                why = "its dataset is iterable: a resume fetches and drops all batches used so far"
            else:
                return False
        elif isinstance(loader, Iterator):
            why = "it is a one-shot iterator: a resume drops as many batches as were used"
        elif type(loader) in KNOWN_LOADERS:
            return False
        else:
            why = "its type is unknown: a resume fetches and drops all batches used so far"
        self.warn(
            f"{why}; exact only if data and order depend only on seeds. A loader or dataset with "
            "state_dict() resumes exactly and fast"
        )
        return True


def _drop(iterator: Iterator[Any], batches: int) -> Any:
    batch = None
    for _ in range(batches):
        batch = next(iterator)
    return batch


def _state_keeper(loader: Any, depth: int = 3) -> Any:
    """Return the object that can store the loader's state, or None: the loader, its dataset if this
    process reads it, or the same of a loader inside the loader."""
    in_process = getattr(loader, "num_workers", 0) == 0
    for candidate in (loader, getattr(loader, "dataset", None) if in_process else None):
        if _keeps_state(candidate):
            return candidate
    if isinstance(loader, DataLoader) or not depth:
        return None
    wrapped = [one for one in getattr(loader, "__dict__", {}).values() if hasattr(one, "__iter__")]
    keepers = (_state_keeper(one, depth - 1) for one in wrapped if type(one) not in KNOWN_LOADERS)
    return next((one for one in keepers if one is not None), None)


def _keeps_state(candidate: Any) -> bool:
    """Return True if it has ``load_state_dict()``, and ``state_dict()`` without arguments."""
    if not (hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")):
        return False
    try:
        inspect.signature(candidate.state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # no signature
        pass
    return True
