"""The operator's own models: ``package.module:factory``, imported by builders and by workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable

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
