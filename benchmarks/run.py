"""``pipeswitch bench`` from a checkout: ``python benchmarks/run.py switch --quick``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeswitch.cli.main import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
