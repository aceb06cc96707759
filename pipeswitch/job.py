"""Interface for training scripts: ``from pipeswitch import job``.

Run by the server, ``job`` places the model in the device arena, is suspended for requests, commits
and resumes. Run by hand, the same script is a plain loop. Importing this module is light: torch
is imported when ``job.device`` is asked for outside the server, not before.

    model = Net().to(job.device)
    for epoch in job.epochs(10):
        for x, y in job.steps(loader, model=model, optimizer=optimizer, scheduler=scheduler):
            criterion(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
        scheduler.step()

When a job resumes, its script runs again from the top: finished epochs and finished loops are
skipped, and the loop in which it stopped continues with the next batch. So names first bound
inside a loop body may be missing after a loop that had already finished: bind them before it;
and count with ``job.step``, since ``enumerate`` (``islice``, ``zip`` with a range) starts over.
``job.step`` goes on from epoch to epoch; ``job.step_in_epoch`` begins each loop at 0, as
``enumerate`` does: ``if (job.step_in_epoch + 1) % accumulate == 0: optimizer.step()``.

Anything else that a loop changes starts over as well, unless ``job.steps`` has it: a best loss, a
hidden state that is carried along, a target network, a random generator of the script's own. Keep
plain values in a dict and pass it as ``extra_state``; pass every network as ``model``. A script
must not skip epochs by a checkpoint of its own: ``job`` does. ``atexit`` hooks run when the script
has ended, not when it is evicted.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from .base.errors import InvalidInput
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

OFFLOADS: Final = ("auto", "all", "conv", "none")

device: str  # where the model belongs: "cpu", "cuda:0"
step: int  # bodies finished so far, over all epochs and loops; survives preemption and restarts
step_in_epoch: int  # bodies finished in this loop: what gradient accumulation counts by


class InexactResumeWarning(UserWarning):
    """Data of this kind cannot be fast-forwarded exactly; says what would make it exact."""


class NonFiniteLossWarning(UserWarning):
    """A logged value is NaN or infinite. Training goes on and the step counts as any other."""


class JobSession(Protocol):
    """Implementation behind ``job`` inside the server (``workers/training/session.py``)."""

    @property
    def device(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def step_in_epoch(self) -> int: ...
    def epochs(self, count: int) -> Iterator[int]: ...
    def steps(self, loader: Iterable[_Batch], *args: Any, **options: Any) -> Iterator[_Batch]: ...
    def trainer(self, trainer: Any, library: str) -> None: ...
    def shared(self, loader: Any, name: str, *, seed: int) -> Iterable[Any]: ...
    def log(self, values: Mapping[str, Any]) -> None: ...
    def publish(self, name: str, part: str) -> None: ...


def epochs(count: int) -> Iterator[int]:
    """``range(count)``, without the epochs that were finished before a preemption."""
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
    """Batches of ``loader``; between two of them the state is whole and may be committed.

    Args:
        loader: a DataLoader, or any iterable of batches.
        model: everything that is trained, and averages of it; parameters and buffers are
            committed, and what ``Module.get_extra_state`` gives. A dict names the parts; those of
            a list are "0", "1", a single one is "model".
        optimizer: every optimizer the body steps, one or several.
        scheduler: anything with ``state_dict`` and ``load_state_dict``, one or several.
        extra_state: further objects with these two methods (an EMA, a GradScaler); a
            ``torch.Generator``, ``numpy.random.Generator``, ``RandomState``, ``random.Random``; a
            dict, list, tensor or array of plain values, which is filled again in place; one
            object, or a dict of them by name. The loader's own generators are always captured.
        name: names a loop outside ``job.epochs``; by default they are counted.
        offload: which of the tensors that forward saves for backward go to host memory meanwhile:
            ``"auto"`` those that ``activation_memory`` has no room for, so as to wait least;
            ``"conv"`` inputs of convolutions, ``"all"`` all of them, ``"none"`` none. Default:
            what ``pipeswitch train --offload`` says, or ``"auto"``.
        activation_memory: how much of the device the saved tensors of a step may take: ``"2GiB"``
            or bytes. A step that needs more is told by how much (``OutOfDeviceMemory``). Default:
            what ``pipeswitch train --activation-memory`` says, or no limit.

    Raises:
        InvalidInput: no such ``offload``, or no such size.
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
    """Return the size in bytes; it is at least one."""
    try:
        size_bytes = parse_size(activation_memory)
        if size_bytes:
            return size_bytes
        reason = "is nothing"
    except ValueError as error:
        reason = str(error).removeprefix(repr(activation_memory)).strip()
    raise InvalidInput(
        f"{who}: activation_memory={activation_memory!r} {reason}",
        hint='activation_memory="2GiB"; without it there is no limit',
    )


def trainer(trainer: _Trainer) -> _Trainer:
    """Let the loop of a ``transformers.Trainer`` or ``lightning.Trainer`` be the job's.

    ``trainer = job.trainer(Trainer(...))``, then ``train()`` or ``fit()`` as ever. It returns the
    trainer that it was given; run by hand it does nothing else.

    Raises:
        InvalidInput: it is neither, or (from its loop) trains in a way that cannot be resumed.
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
    """``loader`` for several jobs: what one of them has loaded, the others find in shared memory.

    They share with the jobs of their ``pipeswitch train --share GROUP``. Each job sees the batches
    that it would see alone, or by hand: what sampler and dataset draw from the global generators
    is seeded for each batch, by ``seed``, the job's step at which the pass began, and the batch's
    index; the script's own generators do not move.

    Args:
        loader: a DataLoader without worker processes, over a map-style dataset.
        name: of this input within the group, if a script shares several.
        seed: of its randomness.

    Returns:
        What iterates as ``loader``, for ``job.steps`` or a plain loop. Its tensors are read-only:
        ``x = x.clone()`` before an operation in place. Count with its ``loaded`` and ``found``.

    Raises:
        SharedInputRefused: it cannot be shared, another job's of that name differs, or (from the
            loop) the body wrote to a batch.
        InvalidInput: from the loop: a batch has other than tensors, arrays and plain values in it.
    """
    return _session.shared(loader, name, seed=seed)


def log(values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Report numbers, plain ones or one-element tensors: ``job.log(loss=loss)``, or
    ``job.log({"train/loss": loss})``. Cheap.

    Raises:
        InvalidInput: ``values`` is not a dict of names.
    """
    named = {} if values is None else values
    if not (isinstance(named, Mapping) and all(isinstance(name, str) for name in named)):
        raise InvalidInput(f"job.log: {values!r:.40} has no name", hint="job.log(loss=loss)")
    _session.log({**named, **more})


def publish(name: str, part: str = "") -> None:
    """Make what is trained here the next version of the served model ``name``; returns at once.

    In a loop's body before ``optimizer.step()``, and behind a loop, that is the state as it is; in
    a body after it, the state at the body's end. The script trains on while the version is made,
    and later requests use the new version. Each call makes a version, in order. While eight
    versions of the model wait to be built, a call waits for the first of them. Parameters and
    buffers are matched by name with the model's; ``part`` selects one of several parts that fit,
    as in ``job.steps(model={"net": net, "ema": ema})``. Outside a server it only logs.

    Raises:
        RegistrationRefused: names, dtypes or shapes differ; says which.
        ModelNotFound: no such model is registered.
        PermissionDenied: it is another client's.
        InvalidInput: no loop has begun yet, several parts fit or there is none of that name.
    """
    _session.publish(name, part)


def as_number(value: Any) -> float:
    """Return a number, or a one-element tensor or array, as a float."""
    return float(value.item() if hasattr(value, "item") else value)


def script_level() -> int:
    """Return the ``stacklevel`` at which a warning of the caller names the script's own line."""
    level, frame = 1, sys._getframe(1)
    ours = __name__, f"{__package__}.workers.", f"{__package__}.inputs."
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


def warn_if_not_finite(name: str, value: float, at_step: int) -> bool:
    """Warn of a NaN or infinite ``value``; true when it is one."""
    if math.isfinite(value):
        return False
    warnings.warn(
        f"job.log({name}={value}) at step {at_step}: not a finite number; training continues",
        NonFiniteLossWarning,
        stacklevel=script_level(),
    )
    return True


class _PlainSession:
    """Outside the server: plain loops, nothing stored."""

    def __init__(self) -> None:
        self.step = self.step_in_epoch = 0

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
        from .inputs.loader import SharedLoader

        return SharedLoader(loader, name, seed=seed, step=lambda: self.step)

    def log(self, values: Mapping[str, Any]) -> None:
        numbers = {name: as_number(value) for name, value in values.items()}
        for name, number in numbers.items():
            warn_if_not_finite(name, number, self.step)
        text = " ".join(f"{name}={number:.6g}" for name, number in numbers.items())
        _logger.info("step=%d %s", self.step, text)

    def publish(self, name: str, part: str) -> None:
        _logger.info("step=%d would publish as %r: no server runs this script", self.step, name)


_session: JobSession = _PlainSession()


def _install(session: JobSession | None) -> None:
    """Put the worker's session behind ``job`` before the script runs; None removes it."""
    global _session
    _session = _PlainSession() if session is None else session


def __getattr__(name: str) -> Any:
    if name in ("device", "step", "step_in_epoch"):
        return getattr(_session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
