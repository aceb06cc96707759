"""What a worker's termination thread does when it cannot go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers import main as worker_main


def test_a_worker_whose_termination_thread_fails_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its queue could not be drained: the context is broken. Parked, it would wait for ever."""

    class Left(BaseException):
        pass

    def leave(status: int) -> None:
        raise Left(status)

    def receive() -> None:
        raise RuntimeError("cudaDeviceSynchronize: cudaErrorIllegalAddress")

    monkeypatch.setattr(worker_main.os, "_exit", leave)
    worker: Any = worker_main.Worker.__new__(worker_main.Worker)
    worker._control = SimpleNamespace(receive=receive)
    with pytest.raises(Left) as caught:
        worker._listen_or_leave()
    assert caught.value.args == (70,)
    assert "cudaErrorIllegalAddress" in capsys.readouterr().err
