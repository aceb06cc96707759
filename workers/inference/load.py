"""Loading a registered program into a worker: structure only, no weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pipeswitch.programs.bundle import read_bundle
from pipeswitch.programs.executor import (
    BoundProgram,
    GraphProgram,
    ModuleProgram,
    Program,
)
from pipeswitch.programs.layout import Manifest
from pipeswitch.programs.spec import BUNDLE_FILE
from pipeswitch.programs.torch_settings import construct_on_meta

__all__ = ["BoundProgram", "Program", "load_program"]


def load_program(
    directory: str | os.PathLike[str], manifest: Manifest, device: torch.device | str = "cpu"
) -> Program:
    """Load the program that ``build`` wrote into ``directory``.

    Reads the graph (graph mode) or imports the operator's factory and constructs it on meta
    (module mode). Tensor bytes are the memory daemon's business.

    Raises:
        RegistrationRefused: the files are damaged, or do not belong to ``manifest``.
    """
    if manifest.mode == "graph":
        return GraphProgram(manifest, read_bundle(Path(directory) / BUNDLE_FILE).graph, device)
    module, settings = construct_on_meta(manifest.source)
    return ModuleProgram(manifest, module, device, settings)
