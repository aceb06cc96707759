"""Log of finished requests, all or a sample, in its own file (``[log] requests``).
The server's log gets a few lines about failures, refusals, models and jobs."""

from __future__ import annotations

import json
import logging
import logging.handlers
import random
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ...base.config import LogConfig
from ...base.errors import Cancelled, RemoteProtocolError
from ...base.units import escape_control_chars
from ...scheduler.state.events import Publish, Reply

_logger = logging.getLogger(__name__)

FILE_NAME: Final = "requests.jsonl"
LINES_PER_MINUTE: Final = 10  # maximum number of warnings of each kind
NEWS: Final = frozenset(
    (
        "model.registered",
        "model.unregistered",
        "model.version",
        "job.submitted",
        "job.placed",
        "job.done",
        "job.cancelled",
    )
)
BAD_NEWS: Final = frozenset(
    (
        "model.refused",
        "model.quarantined",
        "model.publish_failed",
        "model.prepare_failed",
        "job.failed",
        "job.persist_failed",
        "worker.died",
        "worker.daemon_died",
        "queue.policy_failed",
    )
)


class RateLimitedLog:
    """Warnings in the server's log: at most LINES_PER_MINUTE of each kind."""

    count = 0  # messages that violated the protocol

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._written: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LINES_PER_MINUTE))
        self._unsaid: Counter[str] = Counter()

    def warn(self, kind: str, text: str, *args: Any) -> None:
        """Log a warning, or count it for the next line of its ``kind``. There must be few kinds."""
        written, now_ms = self._written[kind], self._now_ms()
        if len(written) == LINES_PER_MINUTE and now_ms - written[0] <= 60_000:
            self._unsaid[kind] += 1
            return
        written.append(now_ms)
        safe = [escape_control_chars(one, keep="") if isinstance(one, str) else one for one in args]
        _logger.warning(f"{text} unsaid=%d", *safe, self._unsaid.pop(kind, 0))

    def add(self, who: str, error: RemoteProtocolError) -> None:
        """Log a message that violates the protocol. ``who`` names its sender in the log."""
        self.count += 1
        text = "refused from=%s malformed=%d cause=%.200r"
        self.warn("malformed", text, who, self.count, error.message)


class RequestLog:
    """Log of finished inferences, of all failures, and of refusals."""

    def __init__(self, folder: Path, settings: LogConfig, complaints: RateLimitedLog) -> None:
        self._share, self._complaints = settings.requests, complaints
        self.is_on = settings.requests > 0
        self._file = logging.handlers.RotatingFileHandler(
            folder / FILE_NAME, maxBytes=settings.max_bytes, backupCount=2, delay=True
        )
        self._file.handleError = self._lost  # type: ignore[method-assign]
        self.close = self._file.close

    def note(self, answer: Reply, *, is_sent: bool = True, **known: Any) -> None:
        """Log the end of a request; ``known`` has the first fields of its line."""
        error, outcome = answer.error, "ok" if is_sent else "undeliverable"
        if error is not None:
            outcome = type(error).__name__
            if "limit" in error.data:
                known["limit"] = error.data["limit"]
            if not isinstance(error, Cancelled):
                pairs = " ".join(
                    [f"{name}={value!s:.80}" for name, value in known.items() if value]
                )
                kind = f"{known['op']} {outcome}"
                self._complaints.warn(kind, "%s cause=%s: %.200s", pairs, outcome, error.message)
        if random.random() >= self._share:
            return
        out = sum(one.size_bytes for one in answer.outputs)
        line = {"time": round(time.time(), 3), **known, "outcome": outcome, "bytes_out": out}
        for name, value in answer.timing.as_dict().items() if answer.timing is not None else ():
            line[name] = round(value, 3) if isinstance(value, float) else value
        text = json.dumps(line)  # in ASCII: a request's id may be anything
        self._file.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def _lost(self, record: logging.LogRecord) -> None:
        self._complaints.warn("lost", "%s: a line is lost cause=%r", FILE_NAME, sys.exception())


def log_published(published: Publish) -> None:
    """Write an event to the server's log, if its topic is in NEWS or BAD_NEWS."""
    topic, body = published.topic, published.body
    if topic in NEWS or topic in BAD_NEWS:
        text = " ".join([f"{key}={value!s:.200}" for key, value in body.items() if key != "at_ms"])
        _logger.log(logging.INFO if topic in NEWS else logging.WARNING, "%s %s", topic, text)
