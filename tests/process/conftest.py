"""Fixtures of the tests that start processes.

pytest's importlib mode does not let a test file import a file of the same folder. So helper files
are loaded here once, as the modules ``process_tools``, ``frontend_rig`` and ``keeper``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeswitch import testing

for _name, _file in (
    ("process_tools", "tools.py"),
    ("frontend_rig", "frontend_rig.py"),
    ("keeper", "keeper.py"),
):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(_file))
        assert _spec is not None
        assert _spec.loader is not None
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[_name] = _module
        _spec.loader.exec_module(_module)


LONGEST = (
    "test_server_api_stateful",
    "test_programs_bitexact",
    "test_training_exact",
    "test_server_training",
    "test_server_kills",
    "test_faults_more",
    "test_health",
    "test_versions",
    "test_tenants",
    "test_device_conformance",
    "test_guide",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no core idles while the last file runs."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Start servers from one process (``keeper``) that has imported torch. A server with another
    environment starts as usual."""
    keeper, start = sys.modules["keeper"].Keeper(), testing._start

    def start_warm(command: list[str], folder: str, environment: Any) -> Any:
        begins = keeper.start if keeper.serves(environment) else start
        return begins(command, folder, environment)

    testing._start = start_warm
    yield
    testing._start = start
    keeper.close()
