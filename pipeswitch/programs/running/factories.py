"""Import of the operator's own models (``package.module:factory``) in builders and workers.
It also splits the arguments of a call of any model into positional and keyword arguments."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...base.errors import RegistrationRefused


def factory(source: str) -> Callable[[], nn.Module]:
    """Import ``package.module:factory``. This runs the operator's code.

    Raises:
        RegistrationRefused: the factory cannot be imported, or is not callable.
    """
    module_name, _, attribute = source.partition(":")
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise RegistrationRefused(
            f"source {source!r}",
            f"cannot be imported: {type(error).__name__}: {error}",
            hint="the server looks in its PYTHONPATH: PYTHONPATH=FOLDER pipeswitch serve",
        ) from error
    if not callable(make):
        raise RegistrationRefused(f"source {source!r}", "it is not callable")

    def construct() -> nn.Module:
        module = make()
        if not isinstance(module, nn.Module):
            raise RegistrationRefused(
                f"source {source!r}", f"it returned a {type(module).__name__}, not an nn.Module"
            )
        return module

    return construct


_STANDARD: Final = sysconfig.get_path("stdlib") + "/"
_imported: dict[str, str] = {}  # name of a module that this process has imported -> file's digest


def code_of(source: str, before: Container[str]) -> dict[str, str]:
    """Return the digests of the files of a factory's code, by module name.

    These are its package's files, and other files that are not installed and were not imported
    ``before``. An operator may edit this code while the server runs.
    """
    package = source.partition(":")[0].partition(".")[0]
    digests = {}
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        top = name.partition(".")[0]
        is_known = name in before or file.startswith(_STANDARD) or "-packages/" in file
        if file.endswith(".py") and (top == package or not is_known):
            digests[name] = _digest(file)
    return digests


def import_as_built(source: str, code: Mapping[str, str]) -> None:
    """Import a factory's package; import it again if this process has code from another build.

    Raises:
        RegistrationRefused: the code has changed since the build.
    """
    if any(_imported.get(name, digest) != digest for name, digest in code.items()):
        _forget({**code, **_imported})
    try:
        factory(source)
    except BaseException:  # a module that others use, too, may be another one then
        _forget(code if _imported.keys().isdisjoint(code) else {**code, **_imported})
        raise
    try:
        for name, digest in code.items():
            if _imported.get(name) != digest:
                _import_file(source, name, digest)
    except BaseException:
        _forget({**code, **_imported})  # a file may have changed between import and check
        raise


def _import_file(source: str, name: str, digest: str) -> None:
    """Import a module, unless it is imported, and check its file's digest."""
    try:
        importlib.import_module(name)
        spec = importlib.util.find_spec(name)
    except Exception:  # the file no longer exists, or its code raises
        spec = None
    _imported[name] = _digest(spec.origin) if spec and spec.origin else ""
    if _imported[name] != digest:
        raise RegistrationRefused(
            f"source {source!r}",
            f"the code of {name} has changed since it was registered",
            hint="register the model again to check and serve the new code",
        )


def _forget(code: Mapping[str, str]) -> None:
    for name in code:
        sys.modules.pop(name, None)
        _imported.pop(name, None)
    importlib.invalidate_caches()


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # the file no longer exists
        return ""


def without_cache(module: nn.Module) -> dict[str, bool]:
    """Return ``use_cache=False`` for a decoder of transformers: requests do not share a cache."""
    is_asked = getattr(getattr(module, "config", None), "use_cache", False)
    return {"use_cache": False} if is_asked and "use_cache" in parameters_of(module) else {}


def keywords_of(module: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """Return the names of those arguments of a call that are passed by keyword.

    With ``forward(*args, **kwargs)``, an argument whose name is a number is positional. If there is
    such an argument, all others are passed by keyword.
    """
    kinds = {name: one.kind for name, one in parameters_of(module).items()}
    keywords = {name for name in names if kinds.get(name) is inspect.Parameter.KEYWORD_ONLY}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        places = [n for n, kind in kinds.items() if kind in _POSITIONAL]
        if inspect.Parameter.VAR_POSITIONAL in kinds.values():
            places = [name for name in names if name.isdigit()]
            is_mixed = bool(places)
        else:
            is_mixed = len(names) > len(places)
        keywords |= {name for name in names if is_mixed and name not in places}
    return frozenset(keywords)


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def split_arguments(
    values: Mapping[str, Any], keywords: Container[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments in order, and the keyword arguments by name."""
    places = [value for name, value in values.items() if name not in keywords]
    return places, {name: value for name, value in values.items() if name in keywords}


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``forward``, or none if it has no signature."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
