"""Fixtures of the tests that start processes.

Tests run in importlib mode, where a test file cannot import its neighbour: the helpers are
loaded here once, as ``process_tools``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "process_tools"

if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("tools.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_NAME] = _module
    _spec.loader.exec_module(_module)
