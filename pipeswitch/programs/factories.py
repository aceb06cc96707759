"""The operator's own models: ``package.module:factory``, imported by builders and by workers; and
what is set in a call of any model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

from torch import nn

from ..errors import RegistrationRefused


def factory(source: str) -> Callable[[], nn.Module]:
    """Import ``package.module:factory``. This runs the operator's code.

    Raises:
        RegistrationRefused: it cannot be imported, or is not callable.
    """
    module_name, _, attribute = source.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise RegistrationRefused(
            f"source {source!r}", f"cannot be imported: {type(error).__name__}: {error}",
            hint="the server looks in its PYTHONPATH: PYTHONPATH=FOLDER pipeswitch serve",
        ) from error  # fmt: skip
    if not callable(found):
        raise RegistrationRefused(f"source {source!r}", "it is not callable")

    def construct() -> nn.Module:
        made = found()
        if not isinstance(made, nn.Module):
            raise RegistrationRefused(
                f"source {source!r}", f"it returned a {type(made).__name__}, not an nn.Module"
            )
        return made

    return construct


def without_cache(module: nn.Module) -> dict[str, bool]:
    """``use_cache=False`` for a decoder of transformers: a request stands alone."""
    is_asked = getattr(getattr(module, "config", None), "use_cache", False)
    return {"use_cache": False} if is_asked and "use_cache" in parameters_of(module) else {}


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Those of ``forward``; none where it is silent."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
