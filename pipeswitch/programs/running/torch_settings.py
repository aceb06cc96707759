"""Torch's process-wide settings, kept apart so that one model's code cannot change another's.

In module mode an operator's code runs in a worker that also computes other models. A lasting change
of a setting (default dtype, matmul precision, autocast) would change the other models' outputs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from .factories import factory, import_as_built
from .unregistered_tensors import without_data

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
_MIXED: Final = "mixed"
_SUBNORMAL: Final = 5e-324


def _of(owner: Any, attribute: str) -> _Setting:
    return (lambda: getattr(owner, attribute)), (lambda value: setattr(owner, attribute, value))


def _set_default_device(device: torch.device) -> None:
    # Setting "cpu" would add a handler to every call; None removes the handler.
    torch.set_default_device(None if device.type == "cpu" else device)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # backends' ``fp32_precision`` was set; ``_settings`` restores it
        return _MIXED


def _set_matmul_precision(value: str) -> None:
    if value != _MIXED:
        torch.set_float32_matmul_precision(value)


def _settings() -> tuple[_Setting, ...]:
    backends: Any = torch.backends
    are_deterministic = torch.are_deterministic_algorithms_enabled
    autocast: list[_Setting] = []
    for kind in ("cpu", "cuda"):
        autocast += [
            (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
            (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
        ]
    precisions = (
        backends,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
    )
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, _set_default_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (
            lambda: (are_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        # Torch has no function that returns whether this thread flushes subnormal numbers to zero.
        (lambda: _SUBNORMAL * 1.0 == 0.0, torch.set_flush_denormal),
        *autocast,
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        *(_of(owner, "fp32_precision") for owner in precisions),
        (_matmul_precision, _set_matmul_precision),
        (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
        (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        *(_of(backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        *(_of(backends.mkldnn, name) for name in ("enabled", "deterministic")),
        # torch.backends.nnpack has no public function that returns the setting.
        (torch._C._get_nnpack_enabled, torch.backends.nnpack.set_flags),
    )


@dataclass(frozen=True)
class TorchSettings:
    """Values of the settings at one instant, in the order of ``_settings``."""

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> TorchSettings:
        return cls(tuple(get() for get, _ in _settings()))

    def apply(self) -> None:
        for (get, set_), value in zip(_settings(), self.values, strict=True):
            if get() != value:
                set_(value)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Apply these settings inside the block, and restore the former settings after it."""
        before = TorchSettings.now()
        self.apply()
        try:
            yield
        finally:
            before.apply()


_torch_compile: Final = torch.compile


def _compile(model: Any = None, **options: Any) -> Any:
    is_branch = getattr(model, "__module__", "").startswith("torch._higher_order_ops")
    return model if is_branch else _torch_compile(model, **options)


def run_branches_eagerly() -> None:
    """Make ``torch.cond``, ``while_loop`` and their like call their functions in this process.

    Otherwise they compile them, which fails for functions with side effects, such as the hooks that
    wait for a group's weights. The bits are the same, since they compile for the backend ``eager``.
    """
    torch.compile = _compile


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python; restore them after the block."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


_of_imports: dict[str, TorchSettings] = {}  # package -> settings after its import, which runs once


def construct_without_data(
    source: str, code: Mapping[str, str], seed: int
) -> tuple[torch.nn.Module, TorchSettings]:
    """Return the module that a factory creates, without data, and the settings that it needs.

    Args:
        source: ``package.module:factory``.
        code: the result of ``code_of`` at the build.
        seed: the seed of the build, for a constructor that draws random numbers.

    Raises:
        RegistrationRefused: the code cannot be imported, or has changed since the build.
    """
    package = source.partition(":")[0]
    before = TorchSettings.now()
    try:
        _of_imports.get(package, before).apply()
        import_as_built(source, code)
        construct = factory(source)
        _of_imports.setdefault(package, TorchSettings.now())
        with seeded(seed):
            module = without_data(construct)
        return module, TorchSettings.now()
    finally:
        before.apply()
