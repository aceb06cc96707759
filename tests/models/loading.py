"""A built program, loaded as a worker does it, with its weights in ordinary memory."""

from __future__ import annotations

import weakref
from pathlib import Path

from pipeswitch.programs.compiler.verify import load_image
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running.executor import BoundProgram, PackedKernels, Program
from pipeswitch.programs.running.tensor_views import tensor_over
from pipeswitch.programs.spec import weights_file
from pipeswitch.workers.inference.task import make_program, read_program


def loaded(folder: Path, manifest: Manifest, kernels: PackedKernels | None = None) -> Program:
    bundle = read_program(manifest, folder / weights_file(manifest))
    return make_program(manifest, None if bundle is None else bundle.graph, "cpu", kernels)


def bound(folder: Path, manifest: Manifest, kernels: PackedKernels | None = None) -> BoundProgram:
    image = load_image(folder / weights_file(manifest), manifest).untyped_storage()
    result = loaded(folder, manifest, kernels).bind(lambda spec: tensor_over(image, spec, 0))
    weakref.finalize(result, lambda _: None, image)  # packed weights do not keep their bytes
    return result
