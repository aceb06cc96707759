"""Checks that a caller may use a source, a file, a function or a training script."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from ..base.errors import InvalidInput, PermissionDenied
from ..base.roles import Principal
from ..job import FIXED_VARIABLES
from ..wire.frames import UPLOAD_LOST

MAX_FILES: Final = 4096  # number of a source's files whose size and time are compared
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HUB_NAME: Final = re.compile(r"hf:[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(#\w{1,95})?")
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Code that clients of this server may name, and the folder of their uploads."""

    allow_code: Sequence[str] = ()
    uploads_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckedSource:
    """Source of a model, with uploads resolved to files of the server."""

    source: str
    weights: str
    example: str = ""
    is_code: bool
    owner_files: tuple[str, ...] = ()  # named by path, so the content of these files may change


def check_source(
    source: str, weights: str, example: str, caller: Principal, rules: Rules
) -> CheckedSource:
    """Check that this client may register this source, and resolve its files.

    1. ``torchvision:`` and ``hf:`` names are for all clients. A folder behind ``hf:`` is a path.
    2. ``put:DIGEST`` is an uploaded file, for all clients.
    3. A path on the server's machine is for the owner's ipc socket; others upload the file.
    4. ``package.module:factory`` is code, for the owner, or if an ``allow_code`` pattern matches.
       (The role ``code`` is checked elsewhere.)

    Raises:
        PermissionDenied, InvalidInput.
    """
    is_code, owner_files = False, list[str]()
    if not source:
        pass  # a new version of a registered model
    elif source.startswith("put:"):
        source = _uploaded(source, rules.uploads_dir, "bundle")
    elif source.startswith(("torchvision:", "hf:")):
        if source.startswith("hf:") and not caller.is_owner and not _HUB_NAME.fullmatch(source):
            raise owners_only(source)
        owner_files = (
            _files_of(source.removeprefix("hf:").partition("#")[0]) if caller.is_owner else []
        )
    elif _MODULE.fullmatch(source):
        is_code, module = True, source.partition(":")[0]
        _require_code_right(source, module, caller, rules)
        owner_files = _code_of(module)
    else:
        source = _owners_file(source, caller)
        owner_files.append(source)
        if not source.endswith(".bundle"):
            raise InvalidInput(
                f"{source}: the server reads only .bundle files, because others may contain code",
                hint="the client converts .pt2: pipeswitch register NAME FILE.pt2",
            )
    if weights.startswith("put:"):
        weights = _uploaded(weights, rules.uploads_dir, "safetensors")
    elif weights and weights != "pretrained" and not re.fullmatch(r"random:[0-9]{1,18}", weights):
        if not weights.endswith(".safetensors"):
            raise InvalidInput(
                f"weights {weights!r} are not FILE.safetensors, pretrained or random:SEED",
                hint="a state dict's .pt file: the SDK and the command line convert it",
            )
        weights = _owners_file(weights, caller)
        owner_files.append(weights)
    if example:
        example = _uploaded(example, rules.uploads_dir, "safetensors")
    return CheckedSource(
        source=source,
        weights=weights,
        example=example,
        is_code=is_code,
        owner_files=tuple(owner_files),
    )


# Files of a model's folder that a build reads; logs and checkpoints beside them do not count.
_READ: Final = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.gguf", "*/config.json")


def _files_of(folder: str) -> list[str]:
    """Return the files of a model's folder that a build reads; none if it is a hub's name."""
    if not os.path.isdir(folder):
        return _regular([folder]) if folder.endswith(".gguf") else []
    patterns = [os.path.join(glob.escape(os.path.abspath(folder)), one) for one in _READ]
    return _regular(chain.from_iterable(map(glob.iglob, patterns)))


def _code_of(module: str) -> list[str]:
    """Return the files of a module's package, or of the module, without importing it."""
    top = module.partition(".")[0]
    for folder in map(os.path.abspath, sys.path):
        package = os.path.join(folder, top)
        if os.path.isfile(os.path.join(package, "__init__.py")):
            return _regular(
                glob.iglob(os.path.join(glob.escape(package), "**", "*.py"), recursive=True)
            )
        if os.path.isfile(path := f"{package}.py"):
            return [path]
    return []


def _regular(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in islice(paths, MAX_FILES) if os.path.isfile(path))


def _uploaded(reference: str, uploads_dir: str, kind: str) -> str:
    digest = reference.removeprefix("put:")
    if not DIGEST.fullmatch(digest):
        hint = "upload the file with the verb put, then give put:DIGEST"
        raise InvalidInput("put: must be followed by a sha256 in hexadecimal", hint=hint)
    path = os.path.join(uploads_dir, f"{digest}.{kind}")
    if not os.path.isfile(path):
        words = f"no {kind} with digest {digest[:12]}… was uploaded"
        raise InvalidInput(words, hint="put it first", reason=UPLOAD_LOST)
    return path


def _owners_file(path: str, caller: Principal) -> str:
    if not caller.is_owner:
        raise owners_only(path)
    real = os.path.realpath(path)
    if not os.path.isabs(path) or not os.path.isfile(real):
        raise InvalidInput(
            f"no file {path!r} on the server's machine",
            hint="sources: torchvision:NAME, hf:NAME, FILE.bundle, package.module:factory",
        )
    return real


def owners_only(path: str) -> PermissionDenied:
    """Return the refusal of a path that only the server's owner may name."""
    return PermissionDenied(
        f"{path!r} names a file of the server's machine",
        hint="upload it (the CLI and the SDK do) or use the owner's ipc socket",
    )


def _require_code_right(shown: str, runs: str, caller: Principal, rules: Rules) -> None:
    """Require that code comes from the owner's socket, or matches ``allow_code``.

    Args:
        shown: the name as the caller wrote it, for the error.
        runs: the module's name, or the script's whole real path.
    """
    if caller.is_owner or any(_matches(runs, pattern) for pattern in rules.allow_code):
        return
    raise PermissionDenied(
        f"{shown!r} is code, which is not accepted at this address",
        hint=f"use the owner's ipc socket, or start the server with --allow-code {runs!r}",
    )


FUNCTION_HINTS: Final = {
    "preprocess": "--preprocess package.module:function --raw text=1..64:bytes",
    "postprocess": "--postprocess package.module:function --returns label=1..64:bytes",
}


def check_function(
    what: str, function: str, declared: Mapping[str, Any], caller: Principal, rules: Rules
) -> None:
    """Check a pre- or postprocessing function and its declared values: both, or neither.

    Args:
        what: ``preprocess`` or ``postprocess``.

    Raises:
        PermissionDenied, InvalidInput.
    """
    hint, option = FUNCTION_HINTS[what], "--raw" if what == "preprocess" else "--returns"
    if not function and not declared:
        return
    if not declared or not function:
        raise InvalidInput(f"--{what} and {option} need each other", hint=hint)
    if not _MODULE.fullmatch(function):
        raise InvalidInput(
            f"{what} {function!r} is not of the form package.module:function", hint=hint
        )
    if any(dtype == "bfloat16" for _, dtype in declared.values()):
        raise InvalidInput(f"{option}: numpy arrays cannot be bfloat16", hint=hint)
    module = function.partition(":")[0]
    _require_code_right(function, module, caller, rules)


def _matches(runs: str, pattern: str) -> bool:
    """Return True if the pattern matches, as in a shell; ``*`` alone matches everything."""
    parts, pattern_parts = runs.split("/"), pattern.split("/")
    return pattern == "*" or (
        len(parts) == len(pattern_parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))
    )


def check_place(
    folder: str, env: tuple[str, ...], caller: Principal
) -> tuple[str, tuple[str, ...]]:
    """Return a script's folder and variables, which decide what code it runs: the owner's alone."""
    if (folder or env) and not caller.is_owner:
        raise PermissionDenied("only the server's owner chooses a job's folder and variables")
    if folder and not (os.path.isabs(folder) and os.path.isdir(folder)):
        raise InvalidInput(f"no folder {folder!r} on the server's machine", hint="folder=PATH")
    for one in env:
        name, sign, _ = one.partition("=")
        if not name or not sign or "\0" in one:
            raise InvalidInput(f"env: {name[:64]!r} is not of the form NAME=VALUE")
        if name.startswith(FIXED_VARIABLES):
            raise InvalidInput(
                f"env: {name[:64]!r} is read when the server starts its processes",
                hint="set it for pipeswitch serve",
            )
    return folder, env


def check_entry(entry: str, caller: Principal, rules: Rules) -> str:
    """Return a training script's real path, or a permitted ``package.module:function``."""
    if _MODULE.fullmatch(entry):
        module = entry.partition(":")[0]
        _require_code_right(entry, module, caller, rules)
        return entry
    real = os.path.realpath(entry)
    _require_code_right(real, real, caller, rules)
    if not os.path.isabs(entry) or not os.path.isfile(real) or not real.endswith(".py"):
        what = "a folder, not a script:" if os.path.isdir(real) else "no script"
        raise InvalidInput(
            f"{what} {entry!r} on the server's machine",
            hint="give the absolute path of a .py file, or package.module:function",
        )
    return real
