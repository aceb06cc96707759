"""Build hook: a wheel contains the commit of its sources, which is part of its version."""

import os
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithCommit(build_py):
    """Copy of the package, with ``commit.txt``; an image's build has no git, so it sets a variable."""

    def run(self) -> None:
        super().run()
        commit = os.environ.get("PIPESWITCH_COMMIT", "")
        if not commit:
            command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
            try:
                commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            except OSError:  # no git: the version is the release's alone
                pass
        if commit and not self.editable_mode:
            Path(self.build_lib, "pipeswitch", "commit.txt").write_text(commit)


beside = find_packages(include=["workers*", "memory_daemon*"])  # also without links (a zip)
setup(
    packages=[
        *find_packages(
            include=["pipeswitch*"], exclude=["pipeswitch.workers*", "pipeswitch.memory_daemon*"]
        ),
        *(f"pipeswitch.{name}" for name in beside),
    ],
    cmdclass={"build_py": BuildWithCommit},
)
