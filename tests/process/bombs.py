"""A pickle whose unpickling can be detected."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


class Bomb:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def pickled(target: Path) -> bytes:
    """Return a pickle, in an old protocol, that creates the folder when it is unpickled."""
    return pickle.dumps(Bomb(target), protocol=2)
