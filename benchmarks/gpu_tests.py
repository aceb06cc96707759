"""Stages: pytest on a GPU. ``gpu_tests.py conformance`` or ``gpu_tests.py tests``."""

from __future__ import annotations

import sys

from .gpu_common import ROOT, put, require_gpu

STACKS_S = 40

SUITES = {
    "conformance": ["tests/process/test_device_conformance.py", "-k", "gpu"],
    "tests": ["tests/gpu"],
}


def main(suite: str) -> int:
    require_gpu()
    import pytest

    counts: dict[str, int] = {}

    class Counter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] = counts.get(report.outcome, 0) + 1
            if report.failed:  # at once: a later test may hang, and this stage be killed
                crash = getattr(report.longrepr, "reprcrash", None)
                text = str(report.longrepr if crash is None else crash.message)
                put(failed=report.nodeid, why=text[-800:])

    # Another torch than the one of the project's own tests may warn of other things. The names as
    # they begin, and the stacks of what takes long: the last words of a stage that is killed.
    words = ["-v", "--tb=short", "-o", f"faulthandler_timeout={STACKS_S}"]
    words += ["-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main([*words, *SUITES[suite]], plugins=[Counter()])
    put(suite=suite, **counts)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
