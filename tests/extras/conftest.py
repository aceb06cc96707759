"""What the tests of an extra share with the engine's, in NAME/unit and NAME/process."""

from tests.process.conftest import _warm
from tests.unit import conftest as _unit

__all__ = ["_unit", "_warm"]
