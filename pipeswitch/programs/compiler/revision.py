"""Versions of a program: its graph with other weights. No torch.

An exact program was compared with its module when it was registered, and both compute the same
calls with any weights. So only names, dtypes and shapes are checked again (ADR 68).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ...base.errors import RegistrationRefused
from ...commits.area import CommitArea
from ...commits.weights import Weight, weights_of
from ..graphs.bundle import FileTensor
from ..interface.layout import BUNDLE_FILE, Manifest, TensorSpec
from ..interface.matching import match
from ..spec import BuildSpec, content_digest, load_manifest, save_manifest

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Dtypes whose values no check reads; others may be indices."""


def write_weights(
    path: Path,
    tensors: Sequence[TensorSpec | FileTensor],
    weights: Mapping[str, Weight],
    part: str,
    unsaved: Collection[str],
) -> tuple[Collection[str], dict[str, str]]:
    """Overwrite a bundle's weights in the file; names, dtypes, shapes and offsets stay the same.
    Return the names of ``weights`` that it has, and the digests of the tensors that differ."""
    specs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    own = {name: (one.dtype, one.shape) for name, one in weights.items()}
    names = match(specs, own, part, unsaved)
    before, changed = np.memmap(path, np.uint8, "r"), dict[str, str]()
    with path.open("r+b") as file:
        for tensor in tensors:
            if tensor.name in names:
                new, start = weights[names[tensor.name]].values, tensor.file_offset_bytes
                old = before[start : start + tensor.size_bytes].view(new.dtype)
                if not np.array_equal(old.reshape(new.shape), new):
                    file.seek(start)
                    file.write(data := new.tobytes())
                    changed[tensor.name] = hashlib.sha256(data).hexdigest()
    return {*names.values()}, changed


def revise(spec: BuildSpec, area: CommitArea | None, folder: Path) -> Manifest:
    """Write the program of a spec with the newest commit's weights to a new folder.

    Raises:
        PipeSwitchError: the weights do not fit or must be checked, or a later commit came.
        OSError: a file cannot be read or written.
    """
    base = load_manifest(Path(spec.source).parent)
    if area is None or (commit := area.newest()) is None:
        raise RegistrationRefused("weights", "nothing has been committed")
    folder.mkdir()
    shutil.copyfile(spec.source, path := folder / BUNDLE_FILE)
    weights = weights_of(area.image(commit))
    _, changed = write_weights(path, base.tensors, weights, spec.part, base.unsaved)
    if any(one.name in changed and one.dtype not in FLOATS for one in base.tensors):
        raise RegistrationRefused("weights", "integers have changed, which must be checked")
    if not area.is_current(commit):
        raise RegistrationRefused("weights", "a later commit has overwritten them")
    replace = msgspec.structs.replace
    tensors = tuple([replace(t, digest=changed.get(t.name, t.digest)) for t in base.tensors])
    origin = f"job:{spec.commit_of}@{commit.step}" + f":{spec.part}" * bool(spec.part)
    own = {"source": "bundle", "tensors": tensors, "extra": base.extra | {"origin": origin}}
    version = replace(base, weights_sha256="", **own)
    version = replace(version, digest=content_digest(version))
    save_manifest(folder, version)
    return version
