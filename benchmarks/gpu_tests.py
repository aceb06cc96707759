"""Stages that run pytest on a GPU, one process per file or rung. Usage: ``gpu_tests.py SUITE``."""

from __future__ import annotations

import sys

from .gpu_common import ROOT, put, require_gpu

TEST_S = 80  # limit of a test; a thread ends it, because no signal interrupts a driver call

SERVER = "tests/gpu/test_cuda_server.py"
SUITES = {
    "raw": ["tests/gpu/test_cuda_torch.py"],
    "conformance": ["tests/process/test_device_conformance.py", "-k", "gpu"],
    **{
        f"server-{rung}": [SERVER, SERVER.replace("server", "streaming"), "-k", rung]
        for rung in ("lowest", "highest")
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
            if report.failed:  # print it now: a later test may hang until the stage is killed
                crash = getattr(report.longrepr, "reprcrash", None)
                text = str(report.longrepr if crash is None else crash.message)
                put(failed=report.nodeid, why=text[-800:])

    # Warnings do not fail a test, because versions of torch differ in them. If the stage is killed,
    # its last output has the names of tests (-v) and the stacks of a slow test.
    words = ["-v", "--tb=short", f"--timeout={TEST_S}", "--timeout-method=thread"]
    words += ["-W", "default", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main([*words, *SUITES[suite]], plugins=[Counter()])
    put(suite=suite, **counts)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
