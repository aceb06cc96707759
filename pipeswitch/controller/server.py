"""The parts of a running server, and their construction in order of dependence."""

from __future__ import annotations

import logging
import os
import selectors
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..base.config import Config
from ..base.errors import DRAINING, ConfigError
from ..base.extras import EFFECTS, GROUPS
from ..base.units import format_bytes
from ..devices import ASKED_FOR, ChosenDevice
from ..devices.registry import facts_of
from ..frontend.frontend import Frontend
from ..scheduler.state.events import Event, Shutdown
from .children import Children
from .device_effects import DeviceEffects, ServerContext
from .effects import Effects, Tracer
from .folders import StateDir
from .gateway_process import Gateway
from .journal import FILE_NAME, JournalFile
from .processes import Processes
from .server_memory import DeviceShare, ServerMemory
from .setup import make_scheduler, sizes_of

log = logging.getLogger(__name__)

LOG_NAME: Final = "server.log"
MAX_SHOWN_LOSSES, MAX_LOSS_CHARS = 20, 300  # in the ready line
SHIPPED_PROFILES: Final = Path(__file__).parents[2] / "profiles"  # exists only in a checkout


class Server:
    """Owner of a server's parts; ``main`` starts them, ``loop`` runs them."""

    def __init__(self, config: Config, devices: Sequence[ChosenDevice], places: StateDir) -> None:
        """Allocate memory and open files; start no process.

        Raises:
            ConfigError: the machine has too little memory, a device does not support a setting, or
                the journal cannot be opened.
        """
        self.config, self.devices, self.places = config, devices, places
        self.selector = selectors.DefaultSelector()
        self.inbox: deque[Event] = deque()
        self.sizes = sizes_of(config, devices)
        self.scheduler = make_scheduler(config, devices, self.sizes, places)
        sizes = self.sizes[0]
        self.memory = ServerMemory(sizes, reserves_pool=any(one.options for one in self.sizes))
        self.memory.groups = [GROUPS.load(name)(config) for name in GROUPS.names()]
        self.shares = [DeviceShare(one) for one in self.sizes]
        self.frontend = self._make_frontend()
        self.scheduler.core.kind = self.frontend.kinds
        self.journal = _open_journal(places)
        child_log = places.logs / "processes.log"
        self.processes = Processes(
            self.selector, child_log, self._give_up, log_bytes=sizes.log_bytes
        )
        self.gateway = Gateway(
            config.gateway,
            self.selector,
            places.root,
            child_log,
            config.server.allow_code,
            config.workers.restart_backoff_ms / 1000.0,
        )
        context = ServerContext(
            sizes=sizes,
            places=places,
            memory=self.memory,
            shares=self.shares,
            children=Children(self.processes, self.inbox.append),
            frontend=self.frontend,
            take=self.inbox.append,
        )
        kinds = dict.fromkeys([*EFFECTS.names(), *(["folder"] if config.server.models else [])])
        self.helpers = {kind: EFFECTS.load(kind)(context, config) for kind in kinds}
        self.frontend.kinds.context.fork = context.children.fork_alone
        self.effects = Effects(
            context,
            [
                DeviceEffects(context, index, self.sizes[index], device.kind.opened)
                for index, device in enumerate(devices)
            ],
            self.helpers,
            journal=self.journal,
            profiles_dir=Path(config.profiles_dir or SHIPPED_PROFILES),
        )
        self._prepares = 0  # number of models that the start prepares
        self.tracer = Tracer(self.effects.timeline, self.frontend.answer_soon)

    def _make_frontend(self) -> Frontend:
        sizes = self.sizes[0]
        facts = {
            **facts_of(self.devices),
            "arena_bytes": sizes.arena_bytes,
            "store_bytes": sizes.store_bytes,
            "standby": self.config.workers.standby,
            "threads": sizes.threads,
            "pid": os.getpid(),
        }
        return Frontend(
            self.config,
            self.memory.pool,
            self.inbox.append,
            facts=facts,
            why_not_ready=lambda: self.why_not_ready,
            pool_of=self.memory.pool_of if sizes.separates_tenants else None,
        )

    @property
    def why_not_ready(self) -> str:
        """Return why no request would be served now; empty if it would.

        A server is ready if it does not drain, a device is ready, and each model of the journal
        and of the configuration is stored or has failed.
        """
        if self.scheduler.core.is_draining:
            return DRAINING
        if not self.scheduler.is_ready:
            return "starting its processes"
        effects = self.effects
        names = [*dict.fromkeys([*effects.restored.values(), *effects.first_attempts.values()])]
        self._prepares = max(self._prepares, len(names))
        return effects.builds.preparation(names, self._prepares) if names else ""

    def _give_up(self, reason: str) -> None:
        self.effects.left = Shutdown(status=os.EX_SOFTWARE, reason=reason)
        log.critical("%s", reason)
        sys.stderr.write(f"Error: {reason}\n")

    def ready_line(self, addresses: Sequence[str]) -> str:
        """Return the line that shows the addresses, the devices and the sizes of their memory."""
        standby, names = self.config.workers.standby, ",".join(one.name for one in self.devices)
        is_one = len(self.devices) == 1
        each = "" if is_one else " each"
        whys = [
            one.why if is_one else f"{one.name}: {one.why}"
            for one in self.devices
            if one.why != ASKED_FOR
        ]
        arenas = [format_bytes(one.arena_bytes) for one in self.sizes]
        is_same = len(set(arenas)) == 1
        return (
            f"pipeswitch is ready: {' '.join(addresses)} device {names}, "
            + (f"arena {arenas[0]}{each}, " if is_same else f"arenas {', '.join(arenas)}, ")
            + f"store {format_bytes(self.sizes[0].store_bytes)}, "
            f"1 active + {standby} standby workers{each}"
            + (f" ({'; '.join(whys)})" if whys else "")
            + (f"; damage was found: {self._shown_losses()}" if self._is_damaged else "")
        )

    @property
    def _is_damaged(self) -> bool:
        return bool(self.journal.losses or self.scheduler.registry.names.failed)

    def _shown_losses(self) -> str:
        """Return all failed models, and the first losses, in one line."""
        failed = ", ".join(self.scheduler.registry.names.failed)
        shown = [f"failed models: {failed}"] * bool(failed) + [
            one if len(one) <= MAX_LOSS_CHARS else f"{one[:MAX_LOSS_CHARS]}…"
            for one in self.journal.losses[:MAX_SHOWN_LOSSES]
        ]
        more = len(self.journal.losses) - MAX_SHOWN_LOSSES
        text = "; ".join(shown + [f"{more} more"] * (more > 0)).replace("\n", " ")
        return f"{text}; see {LOG_NAME}"

    def tell_losses(self) -> None:
        """Print the journal's damage to stderr; the log has it already."""
        for text in self.journal.losses:
            sys.stderr.write(f"Warning: {text}\n")

    def close(self) -> None:
        """Release the memory and files that ``__init__`` took."""
        self.journal.close()
        self.memory.close()
        for one in (*self.helpers.values(), *self.memory.groups, *self.shares):
            one.close()
        self.selector.close()


def _open_journal(places: StateDir) -> JournalFile:
    path = places.root / FILE_NAME
    try:
        return JournalFile(path, losses=places.losses)
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from None
