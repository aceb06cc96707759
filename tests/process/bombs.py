"""A pickle that shows whether anybody opened it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def pickled(target: Path) -> bytes:
    """Makes the folder ``target`` when it is unpickled, by old readers too."""
    return pickle.dumps(Bomb(target), protocol=2)
