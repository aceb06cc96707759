"""PipeSwitch: one GPU, many PyTorch models, and a training job that uses it between requests.

    import pipeswitch as ps
    with ps.Client() as client:
        client.register("resnet152", "torchvision:resnet152", weights="random:0")
        result = client.infer("resnet152", x)

Importing this package is fast: names are loaded on first use. torch is imported only to export a
module or for torch tensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base.errors import (
    AlreadyExists,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DeviceBusy,
    HostStoreFull,
    InvalidInput,
    InvalidTransition,
    LocalProtocolError,
    ModelNotFound,
    ModelQuarantined,
    OutOfDeviceMemory,
    PermissionDenied,
    PipeSwitchError,
    QueueFull,
    RegistrationRefused,
    RemoteProtocolError,
    SequenceNotFound,
    ServerUnavailable,
    TaskFailed,
    TaskPreempted,
    WorkerLost,
)

if TYPE_CHECKING:
    from . import job
    from .client.aio import AsyncClient
    from .client.client import Client, Task
    from .client.tensors import Result
    from .wire.request_timing import RequestTiming as Timing

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "Cancelled",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceBusy",
    "HostStoreFull",
    "InvalidInput",
    "InvalidTransition",
    "LocalProtocolError",
    "ModelNotFound",
    "ModelQuarantined",
    "OutOfDeviceMemory",
    "PermissionDenied",
    "PipeSwitchError",
    "QueueFull",
    "RegistrationRefused",
    "RemoteProtocolError",
    "Result",
    "SequenceNotFound",
    "ServerUnavailable",
    "Task",
    "TaskFailed",
    "TaskPreempted",
    "Timing",
    "WorkerLost",
    "__version__",
    "job",
]

_LAZY = {
    "Client": ("client.client", "Client"),
    "Task": ("client.client", "Task"),
    "AsyncClient": ("client.aio", "AsyncClient"),
    "Result": ("client.tensors", "Result"),
    "Timing": ("wire.request_timing", "RequestTiming"),
    "job": ("job", None),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name == "__version__":
        from .base.version import own_version

        return own_version()
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(f".{module_name}", __name__)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value
