"""Environment variables of processes that run clients' programs.

Malicious code can read all memory that its process was forked with, even variables that were
removed since. So the fork server gets only the variables below. The owner's code gets the other
variables in a file, whose descriptor comes with its order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

NAMES: Final = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "GLIBC_TUNABLES",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_TF32_OVERRIDE",
        # folders where a build looks for configurations that were downloaded before
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_CACHE",
        "TRANSFORMERS_OFFLINE",
    }
)
PREFIXES: Final = (
    "PIPESWITCH_",
    "LC_",
    "PYTHON",
    "MALLOC_",
    "TORCH",
    "PYTORCH_",
    "ATEN_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "OPENBLAS_",
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
)
"""Prefixes of our own settings, which may name files of secrets but contain none, and of variables
that Python, torch and their libraries read when they are imported."""


def harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all of our processes may have."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES)
    }


def environment_file() -> int:
    """Return a descriptor of a file with this process's environment, for ``take_environment``.

    Raises:
        OSError: this process has no descriptor left, or the machine has no memory.
    """
    descriptor = os.memfd_create("pipeswitch-environment", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(b"%s=%s\0" % pair for pair in os.environb.items())
    return descriptor


def take_environment(descriptor: int) -> None:
    """Add the file's variables to this process's environment, unless they are set; close it."""
    # Processes share the file's position, so it is read from the start.
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    for pair in text.split(b"\0")[:-1]:
        name, _, value = pair.partition(b"=")
        os.environb.setdefault(name, value)
