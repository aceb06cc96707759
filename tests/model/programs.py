"""Programs on paper: the manifest that the random model (``tests/unit/fleet_model.py``) uses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = "pipeswitch_test_fleet_model"


def _load() -> Any:
    if _NAME not in sys.modules:
        path = Path(__file__).parents[1] / "unit" / "fleet_model.py"
        spec = importlib.util.spec_from_file_location(_NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[_NAME]


manifest_of: Callable[[str, int, int], Any] = _load().manifest_of
