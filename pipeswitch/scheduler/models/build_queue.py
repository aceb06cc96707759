"""Order of builds: each client has one build at a time, and clients take turns."""

from __future__ import annotations

from ...base.errors import QueueFull
from ...base.quotas import left
from ...ipc.messages.base import OpId
from ..server.server_state import ServerState
from ..state.core import Core
from ..state.events import Address, Kill, StartBuild
from ..state.records import Registration


class BuildQueue:
    """Registrations that wait for their build, and the running builds.

    Builds of one client run one after the other, since each uses all cores. The client whose last
    turn is longest ago is next, so a client waits for at most one build of each other client.
    """

    def __init__(self, core: Core, machine: ServerState) -> None:
        self._core = core
        self._machine = machine
        self.waiting: list[Registration] = []  # in order of arrival
        self._running: dict[OpId, Registration] = {}  # started builds, until the builder exits
        self._last_turns: dict[str, OpId] = {}  # client with builds -> its last build

    @property
    def is_idle(self) -> bool:
        """True if no build waits or runs."""
        return not (self._running or self.waiting)

    def check_room(self, client: str) -> None:
        """Raise QueueFull if no further registration of this client may wait."""
        size, waiting = self._core.settings.max_waiting_builds, len(self.waiting)
        own = sum(one.client == client for one in self.waiting)
        if client and not left(size, waiting, own):
            raise QueueFull(
                f"{own} of {waiting} waiting registrations are this client's",
                hint="wait for them, then register again",
                limit="registrations",
            )

    def pump(self) -> None:
        """Start the next builds."""
        if not self.waiting and not self._last_turns:
            return
        core = self._core
        while len(self._running) < core.settings.max_builds and (one := self._next()):
            self.waiting.remove(one)
            self._running[one.build_id] = one
            self._last_turns[one.client] = one.build_id
            model = self._machine.models[one.model]
            core.emit(
                StartBuild(
                    model=one.model,
                    op_id=one.build_id,
                    spec=one.spec,
                    tenant=model.tenant,
                    wrapper=model.wrapper,
                    rebuilds=one.rebuilds,
                )
            )
        if self._last_turns:
            waiting = {one.client for one in (*self.waiting, *self._running.values())}
            self._last_turns = {c: at for c, at in self._last_turns.items() if c in waiting}

    def _next(self) -> Registration | None:
        """Return the first registration of the idle client whose last turn is longest ago."""
        busy = {one.client for one in self._running.values()}
        free = [one for one in self.waiting if one.client not in busy and one.like is None]
        return min(free, key=lambda one: self._last_turns.get(one.client, -1), default=None)

    def give_up(self, one: Registration) -> None:
        """End a registration's build, or remove it from the queue."""
        if one.build_id in self._running:
            self._core.emit(Kill(Address("builder", incarnation=one.build_id)))
        else:
            self.waiting.remove(one)

    def exited(self, op_id: OpId) -> Registration | None:
        """Return the registration of a builder that has exited; None if it is unknown."""
        return self._running.pop(op_id, None)
