"""Interface for training scripts: ``from pipeswitch import job``.

If the server runs the script, ``job`` places the model in the device arena, suspends the script for
requests, commits and resumes it. If you run the script yourself, it is a plain loop. Importing this
module is fast: outside the server, torch is imported only when the script reads ``job.device``.

    model = Net().to(job.device)
    for epoch in job.epochs(10):
        for x, y in job.steps(loader, model=model, optimizer=optimizer, scheduler=scheduler):
            criterion(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
        scheduler.step()

When a job resumes, its script runs again from the top. Finished epochs and finished loops are
skipped, and the interrupted loop continues with the next batch. So a name that is first bound in a
loop's body may be missing after a finished loop: bind it before the loop. Count with ``job.step``,
because ``enumerate`` (also ``zip`` with a range) starts over. ``job.step`` counts
over all epochs; ``job.step_in_epoch`` begins each loop at 0, like ``enumerate``:
``if (job.step_in_epoch + 1) % accumulate == 0: optimizer.step()``.

Anything else that a loop changes starts over, too, unless you pass it to ``job.steps``: a best
loss, a hidden state that is carried along, a target network, the script's own random generator.
Keep plain values in a dict and pass it as ``extra_state``; pass every network as ``model``. A
script must not skip epochs by its own checkpoint, because ``job`` skips them. ``atexit`` hooks run
when the script has ended, not when it is evicted.
"""

from __future__ import annotations

import builtins
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, TypeVar

from .base.errors import InvalidInput
from .base.extras import JOBS
from .base.units import nearest, parse_size

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_logger = logging.getLogger(__name__)
_Batch = TypeVar("_Batch")
_Trainer = TypeVar("_Trainer")
LIBRARIES: Final = {
    "transformers": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
}

FIXED_VARIABLES: Final = ("PIPESWITCH_", "LD_", "PYTHON", "OMP_", "MKL_", "CUDA_")
"""Prefixes of variables that are read before a job has its own environment."""
OFFLOADS: Final = ("auto", "all", "conv", "none")

device: str  # device for the model: "cpu", "cuda:0"
step: int  # number of finished steps of all loops; survives preemption and restarts
step_in_epoch: int  # number of finished steps of this loop, for gradient accumulation
is_resumed: bool  # True if the script resumes from a commit, after ``job.step`` steps


class InexactResumeWarning(UserWarning):
    """The position in this kind of data cannot be restored exactly; the text says what helps."""


class NonFiniteLossWarning(UserWarning):
    """A logged value is NaN or infinite. Training continues, and the step counts like any other."""


class JobSession(Protocol):
    """Implementation behind ``job`` inside the server (``workers/training/session.py``)."""

    @property
    def device(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def step_in_epoch(self) -> int: ...
    @property
    def is_resumed(self) -> bool: ...
    def epochs(self, count: int) -> Iterator[int]: ...
    def steps(self, loader: Iterable[_Batch], *args: Any, **options: Any) -> Iterator[_Batch]: ...
    def trainer(self, trainer: Any, library: str) -> None: ...
    def shared(self, loader: Any, name: str, *, seed: int) -> Iterable[Any]: ...
    def log(self, values: Mapping[str, Any]) -> None: ...
    def open(self, file: str | os.PathLike[str]) -> TextIO: ...
    def publish(self, name: str, part: str) -> None: ...


def epochs(count: int) -> Iterator[int]:
    """Return ``range(count)`` without the epochs that were finished before a preemption."""
    return _session.epochs(count)


def steps(
    loader: Iterable[_Batch],
    *,
    model: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer],
    scheduler: Any = None,
    extra_state: Any = None,
    name: str | None = None,
    offload: str | None = None,
    activation_memory: str | int | None = None,
) -> Iterator[_Batch]:
    """Yield the batches of ``loader``; between two batches the state may be committed.

    Args:
        loader: a DataLoader, or any iterable of batches.
        model: every trained module, and averages of them. Commits contain their parameters,
            buffers and the result of ``Module.get_extra_state``. A dict names the modules; in a
            list they are named "0", "1", …, and a single one is "model".
        optimizer: every optimizer that the body steps, one or several.
        scheduler: any object with ``state_dict`` and ``load_state_dict``, one or several.
        extra_state: further objects with these two methods (an EMA, a GradScaler); a
            ``torch.Generator``, ``numpy.random.Generator``, ``RandomState``, ``random.Random``; a
            dict, list, tensor or array of plain values, which is filled in place on resume; one
            object, or a dict of them by name. ``"auto"``: the plain values, tensors, arrays and
            generators of the variables that the script uses in its loop, and of its own objects'
            attributes; the job's log says which. The loader's own generators are always captured.
        name: name of a loop outside ``job.epochs``; by default such loops are numbered.
        offload: tensors saved by forward that wait for backward in host memory: ``"auto"``: those
            for which ``activation_memory`` has no room, chosen for the shortest waits;
            ``"conv"``: inputs of convolutions; ``"all"``: those of 4 KiB or more; ``"none"``.
            Default: the value of ``pipeswitch train --offload``, or ``"auto"``.
        activation_memory: device memory for the saved tensors of a step: ``"2GiB"``, or a number
            of bytes. If a step needs more, ``OutOfDeviceMemory`` says how much. Default: the value
            of ``pipeswitch train --activation-memory``, or no limit.

    Raises:
        InvalidInput: ``offload`` is unknown, or ``activation_memory`` is not a size.
    """
    return _session.steps(
        loader,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra_state=extra_state,
        name=name,
        offload=None if offload is None else known_offload(offload),
        activation_bytes=None if activation_memory is None else size_of(activation_memory),
    )


def known_offload(offload: str, who: str = "job.steps") -> str:
    """Return ``offload`` if it is valid, else raise InvalidInput."""
    if offload in OFFLOADS:
        return offload
    raise InvalidInput(
        f"{who}: offload={offload!r} is none of {', '.join(OFFLOADS)}"
        f"{nearest(str(offload), OFFLOADS)}"
    )


def size_of(activation_memory: str | int, who: str = "job.steps") -> int:
    """Return the size in bytes, at least 1; raise InvalidInput for any other value."""
    try:
        size_bytes = parse_size(activation_memory)
        if size_bytes:
            return size_bytes
        reason = "is zero"
    except ValueError as error:
        reason = str(error).removeprefix(repr(activation_memory)).strip()
    raise InvalidInput(
        f"{who}: activation_memory={activation_memory!r} {reason}",
        hint='activation_memory="2GiB"; without it there is no limit',
    )


def trainer(trainer: _Trainer) -> _Trainer:
    """Make the loop of a ``transformers.Trainer`` or ``lightning.Trainer`` the job's loop.

    Call ``trainer = job.trainer(Trainer(...))``, then ``train()`` or ``fit()`` as usual. Return the
    same trainer. Outside the server, do nothing else.

    Raises:
        InvalidInput: ``trainer`` is another object, or (in its loop) cannot be resumed.
    """
    for kind in type(trainer).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ == "Trainer" and library in LIBRARIES:
            _session.trainer(trainer, LIBRARIES[library])
            return trainer
    type_name = trainer.__name__ if isinstance(trainer, type) else f"a {type(trainer).__name__}"
    raise InvalidInput(
        f"job.trainer: {type_name} is not a Trainer of transformers or Lightning",
        hint="pass a Trainer object: job.trainer(Trainer(...)); in your own loop wrap the loader: "
        "for batch in job.steps(loader, model=model, optimizer=optimizer)",
    )


def shared(loader: Any, name: str = "input", *, seed: int = 0) -> Iterable[Any]:
    """Return a loader that shares its batches with other jobs, through shared memory.

    Jobs with the same ``pipeswitch train --share GROUP`` share batches. Each job gets the batches
    that it would get alone or outside a server. Draws of sampler and dataset from the global
    generators are seeded for each batch, from ``seed``, the job's step at which the pass began, and
    the index of the batch. The script's own generators do not advance.

    Args:
        loader: a DataLoader without worker processes, over a map-style dataset.
        name: name of this input within the group, if a script shares several inputs.
        seed: seed of the input's random draws.

    Returns:
        An iterable like ``loader``, for ``job.steps`` or a plain loop. Its tensors are read-only:
        use ``x = x.clone()`` before an in-place operation. ``loaded`` counts the batches that this
        job loaded, ``found`` those that it found in shared memory.

    Raises:
        SharedInputRefused: it cannot be shared, another job's input of that name differs, or (in
            the loop) the body wrote to a batch.
        InvalidInput: in the loop: a batch has values other than tensors, arrays and plain values.
    """
    return _session.shared(loader, name, seed=seed)


def log(values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Report numbers or one-element tensors: ``job.log(loss=loss)``, or
    ``job.log({"train/loss": loss})``. Cheap: it does not wait for the server.

    Raises:
        InvalidInput: ``values`` is not a dict of names.
    """
    named = {} if values is None else values
    if not (isinstance(named, Mapping) and all(isinstance(name, str) for name in named)):
        raise InvalidInput(f"job.log: {values!r:.40} has no name", hint="job.log(loss=loss)")
    _session.log({**named, **more})


def open(file: str | os.PathLike[str]) -> TextIO:
    """Open a UTF-8 text file to append rows that must appear exactly once: CSV, JSON lines.

    A commit keeps the file's length. When the job resumes, the file is cut back to this length;
    text that the script writes again before it reaches the commit is dropped. Outside the server,
    only append.

    Raises:
        InvalidInput: the job has opened 64 other files.
    """
    return _session.open(file)


def publish(name: str, part: str = "") -> None:
    """Make the trained state the next version of the served model ``name``; return at once.

    In a loop's body before ``optimizer.step()``, and after a loop, this is the current state. In a
    body after ``optimizer.step()``, it is the state at the body's end. Training continues while the
    version is built, and later requests use the new version. Each call makes one version, in order.
    If eight versions of the model wait to be built, a call waits until the first is built.
    Parameters and buffers are matched with the model's by name; ``part`` selects one of several
    parts that fit, as in ``job.steps(model={"net": net, "ema": ema})``. Outside a server, only log.

    Raises:
        RegistrationRefused: names, dtypes or shapes differ; the error says which.
        ModelNotFound: no such model is registered.
        PermissionDenied: the model is another client's.
        InvalidInput: no loop has begun yet, several parts fit, or no part has that name.
    """
    _session.publish(name, part)


def as_number(value: Any, name: str = "value") -> float:
    """Return a number, or a one-element tensor or array, as a float; else raise InvalidInput."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shape = getattr(value, "shape", None)
        kind = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InvalidInput(
            f"job.log: {name} is {value!r:.40}, of type {kind}; it takes numbers and one-element "
            "tensors or arrays",
            hint=f"job.log({{{name!r}: value}}) with a mean or one element of it; print() texts",
        ) from None


def script_level() -> int:
    """Return the ``stacklevel`` with which the caller's warning names the script's own line."""
    level, frame = 1, sys._getframe(1)
    ours = __name__, f"{__package__}.workers.", f"{__package__}.inputs."
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


def warn_if_not_finite(name: str, value: float, at_step: int) -> bool:
    """Warn if ``value`` is NaN or infinite; return True if a warning was due."""
    if math.isfinite(value):
        return False
    warnings.warn(
        f"job.log({name}={value}) at step {at_step}: not a finite number; training continues",
        NonFiniteLossWarning,
        stacklevel=script_level(),
    )
    return True


class _PlainSession:
    """Session outside the server: plain loops; nothing is stored."""

    def __init__(self) -> None:
        self.step, self.step_in_epoch, self.is_resumed = 0, 0, False

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def steps(self, loader: Iterable[_Batch], **_: Any) -> Iterator[_Batch]:
        self.step_in_epoch = 0
        for batch in loader:
            yield batch
            self.step += 1
            self.step_in_epoch += 1

    def trainer(self, trainer: Any, library: str) -> None:
        pass

    def shared(self, loader: Any, name: str, *, seed: int) -> Iterable[Any]:
        make: Any = JOBS.load("shared_input")
        batches: Iterable[Any] = make(loader, name, seed=seed, step=lambda: self.step)
        return batches

    def log(self, values: Mapping[str, Any]) -> None:
        numbers = {name: as_number(value, name) for name, value in values.items()}
        for name, number in numbers.items():
            warn_if_not_finite(name, number, self.step)
        text = " ".join(f"{name}={number:.6g}" for name, number in numbers.items())
        _logger.info("step=%d %s", self.step, text)

    def open(self, file: str | os.PathLike[str]) -> TextIO:
        return builtins.open(file, "a", encoding="utf-8")

    def publish(self, name: str, part: str) -> None:
        _logger.info("step=%d would publish as %r: no server runs this script", self.step, name)


_session: JobSession = _PlainSession()


def _install(session: JobSession | None) -> None:
    """Put the worker's session behind ``job`` before the script runs; None removes it."""
    global _session
    _session = _PlainSession() if session is None else session


def __getattr__(name: str) -> Any:
    if name in ("device", "step", "step_in_epoch", "is_resumed"):
        return getattr(_session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
