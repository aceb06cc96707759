"""Child processes by address; their messages and exits become events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from ..ipc.messages.base import Message
from ..scheduler.state.events import Address, Event, Exited, Received
from .processes import Child, Processes


class Children:
    """Child processes, by the addresses that commands use.

    Attributes:
        by_address: Processes that are forked and not yet reaped.
    """

    def __init__(self, processes: Processes, take: Callable[[Event], None]) -> None:
        """``take``: called with each event, which is handled after the current one."""
        self.processes = processes
        self.by_address: dict[Address, Child] = {}
        self._take, self._numbers = take, count(1)

    def fork(
        self,
        address: Address,
        name: str,
        settings: Message,
        descriptors: Sequence[int],
        on_message: Callable[[Message, list[int]], None] | None = None,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        """Fork a process; its messages and its exit become events. A worker has two channels.

        Args:
            on_message: Called with each message and its descriptors, instead of a ``Received``.
            on_exit: Called with the exit status, instead of an ``Exited``.
        """

        def heard(message: Message, _: list[int]) -> None:
            self._take(Received(address, message))

        def exited(status: int) -> None:
            self.by_address.pop(address, None)
            if on_exit is None:
                self._take(Exited(address, status))
            else:
                on_exit(status)

        child = self.processes.fork(
            address.kind,
            name,
            settings,
            2 if address.kind == "worker" else 1,
            descriptors,
            on_message or heard,
            exited,
        )
        if child.exit_status is None:  # otherwise the fork failed, which was reported
            self.by_address[address] = child

    def kill(self, target: Address) -> None:
        """Kill a process; do nothing if it has been reaped or was never forked."""
        if target in self.by_address:
            self.processes.kill(self.by_address[target])

    def fork_alone(
        self, name: str, settings: Message, on_end: Callable[[Message | None, int], None]
    ) -> None:
        """Fork a process that sends a message and exits; call ``on_end`` with both, at its end."""
        messages: list[Message] = []

        def on_message(message: Message, _: list[int]) -> None:
            messages.append(message)

        def on_exit(status: int) -> None:
            on_end(messages[0] if messages else None, status)

        address = Address(name, incarnation=next(self._numbers))
        self.fork(address, f"pipeswitch-{name}", settings, [], on_message, on_exit)
