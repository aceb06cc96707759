"""Schemas of answers: a process beside the device tries each new one (``grammar.schema_process``).

A worker prepares a schema in a run, so only those that this process prepared in time reach it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Final

from ...base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ...base.quotas import FairQuota, TurnQueue
from ...frontend.kinds import KindContext
from ...frontend.requests import Pending
from ...ipc.messages.base import Message
from ...ipc.messages.helper import HelperFailed, HelperSettings
from .decoding.grammar import costly_refusal

MAX_WAITING: Final = 64  # requests whose schemas wait to be tried; each may take 0.2 s
MAX_RESULTS: Final = 1024  # results that are kept; a schema has at most 8 KiB
_BY_LIMITS: Final = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)  # exits of llguidance

Waiting = tuple[Pending, str, Callable[[PipeSwitchError | None], None]]


class SchemaChecks:
    """Results of schemas, and the requests that wait for one. Callers take turns."""

    def __init__(self, context: KindContext) -> None:
        self._context = context
        self._errors: dict[str, str] = {}  # schema -> error; empty: the schema can be used
        self._turns: TurnQueue[str] = TurnQueue()
        self._waiting: dict[str, list[Waiting]] = {}
        self._shares = FairQuota(MAX_WAITING, "requests whose schemas wait to be tried", "schemas")
        self._current = ""  # the schema that is being tried

    def admit(self, schema: str, caller: str) -> bool:
        """Return whether the schema is known to be usable; if not, use ``ask`` next.

        Raises:
            InvalidInput: it is known to be unusable.
            QueueFull: the caller waits for too many schemas.
        """
        error = self._errors.get(schema)
        if refusal := _refusal(error) if error else self._shares.refusal(caller, 1):
            raise refusal
        return error is not None

    def ask(self, schema: str, waiting: Waiting) -> None:
        pending, caller, _ = waiting
        pending.is_copying = True  # a cancellation waits for the result
        self._shares.add(caller, 1)
        if schema not in self._waiting:
            self._turns.put(caller, schema)
        self._waiting.setdefault(schema, []).append(waiting)
        self._next()

    def _next(self) -> None:
        while not self._current and (schema := self._turns.take()):
            self._current = schema
            if not all(pending.is_cancelled for pending, _, _ in self._waiting[schema]):
                settings = HelperSettings(kind="schema", values=schema.encode())
                self._context.fork("sch", settings, partial(self._tried, schema))
                return
            self._pass_on(None)

    def _tried(self, schema: str, message: Message | None, status: int) -> None:
        """Record the result of a process; if it ended by its limits of time and memory, refuse the
        schema. If it was lost, its requests fail, and the next one tries again."""
        error: str | None = None
        if message is not None:
            error = message.reason if isinstance(message, HelperFailed) else ""
        elif status in _BY_LIMITS:
            error = costly_refusal(schema).message
        if error is not None:
            self._errors[self._current] = error
            if len(self._errors) > MAX_RESULTS:
                del self._errors[next(iter(self._errors))]
        self._pass_on(error)
        self._next()

    def _pass_on(self, error: str | None) -> None:
        schema, self._current = self._current, ""
        for _, caller, then in self._waiting.pop(schema):
            self._shares.give(caller, 1)
            then(_refusal(error) if error != "" else None)


def _refusal(error: str | None) -> PipeSwitchError:
    if error is None:
        return ServerUnavailable("the process that tries JSON schemas died", hint="send it again")
    return InvalidInput(error, param="response_format")
