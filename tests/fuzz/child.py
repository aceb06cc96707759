"""Process that fuzzes one target: ``python -m tests.fuzz.child NAME [libFuzzer's options]``.

atheris instruments the product's modules when they are imported, so that libFuzzer knows which
branches an input takes. The process ends with libFuzzer.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import atheris  # type: ignore[import-untyped]

from .mutate import Mutator
from .target import CORPUS, REGRESSIONS, Target
from .targets import load

INSTRUMENTED = ["pipeswitch"]


def main() -> None:
    logging.disable(logging.CRITICAL)
    name, options = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load(name)
    for seed in target.seeds():
        target.run(seed)  # makes lazy imports, so that their branches do not count for an input
    # ``atheris.Mutate`` is looked up at each call, because Setup replaces it.
    mutator = Mutator(target, lambda data, max_bytes: atheris.Mutate(data, max_bytes))
    with _folders_of(target) as (itself, seeds):
        arguments = [itself, *options, *seeds, f"-max_len={target.max_bytes}"]
        atheris.Setup(arguments, target.run, custom_mutator=mutator)
        atheris.Fuzz()


@contextlib.contextmanager
def _folders_of(target: Target) -> Iterator[tuple[str, list[str]]]:
    """Yield a script and the folders that libFuzzer only reads: seeds, corpus and regressions. The
    script starts this program again, which libFuzzer needs to merge folders."""
    with tempfile.TemporaryDirectory(prefix="pipeswitch-fuzz-") as name:
        itself, seeds = Path(name, "itself"), Path(name, "seeds")
        command = shlex.join([sys.executable, "-m", f"{__package__}.child", target.name])
        itself.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        itself.chmod(0o700)
        seeds.mkdir()
        for number, seed in enumerate(target.seeds()):
            (seeds / f"seed-{number}").write_bytes(seed)
        folders_kept = [folder / target.name for folder in (CORPUS, REGRESSIONS)]
        yield str(itself), [str(folder) for folder in (seeds, *folders_kept) if folder.is_dir()]


if __name__ == "__main__":
    main()
