"""Schemas of answers: a process beside the device tries each new one (``schema.check_schema``).

A worker prepares a schema in a run, so only those that this process prepared in time reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from ..base.quotas import FairQuota, TurnQueue
from .requests import Pending

MAX_WAITING: Final = 64  # requests whose schemas wait to be tried; each may take 0.2 s
MAX_RESULTS: Final = 1024  # results that are kept; a schema has at most 8 KiB

Waiting = tuple[Pending, str, Callable[[PipeSwitchError | None], None]]


class SchemaChecks:
    """Results of schemas, and the requests that wait for one. Callers take turns.

    Attributes:
        send: sends a schema to the process; the controller sets it, and calls ``done`` afterwards.
    """

    send: Callable[[str], None]

    def __init__(self) -> None:
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
        """Try a schema for a request of a caller; call its function with the error or None."""
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
                self.send(schema)
                return
            self._pass_on(None)

    def done(self, error: str | None) -> None:
        """Record a result: the error, "" if there is none, or None if the process was lost."""
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
