"""Stages: pytest on a GPU, a process for each file or rung. Usage: ``gpu_tests.py SUITE``."""

from __future__ import annotations

import sys

from .gpu_common import ROOT, put, require_gpu

TEST_S = 40  # for each test; by a thread, since no signal interrupts a call of the driver

SUITES = {
    "raw": ["tests/gpu/test_cuda_torch.py"],
    "conformance": ["tests/process/test_device_conformance.py", "-k", "gpu"],
    **{
        f"server-{rung}": ["tests/gpu/test_cuda_server.py", "-k", rung]
        for rung in ("lowest", "graphs", "slice", "waits", "highest")
    },
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
    # they begin, and the stacks of what takes too long: the last words of a stage that is ended.
    words = ["-v", "--tb=short", f"--timeout={TEST_S}", "--timeout-method=thread"]
    words += ["-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main([*words, *SUITES[suite]], plugins=[Counter()])
    put(suite=suite, **counts)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
