"""The controller process: set up, announce readiness, loop, drain, exit (PipeSwitch, section 3)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..base import failpoints
from ..base.config import Config
from ..base.errors import ConfigError, InvalidInput, PipeSwitchError
from ..base.machine import available_bytes
from ..base.model_options import ModelConfig
from ..base.plain_files import open_plain
from ..base.units import LogFile, PrintableFormatter, nearest
from ..devices.registry import choose_devices
from ..frontend.transport.listeners import Listeners, check_access
from ..ipc.channel import name_event
from ..sandbox.environment import environment_file
from ..scheduler.state.events import Token
from ..watchdog import LoopWatchdog
from ..wire.addresses import parse_listen
from ..wire.private import check_trusted
from .folders import StateDir
from .gateway_process import Keyed, check_doors
from .loop import Loop
from .restore import configured, restore
from .server import LOG_NAME, Server

log = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
MAX_OPEN_FILES: Final = 65536  # the soft limit is raised to this
SWITCH_INTERVAL_S: Final = 0.0005  # with the default, other threads delay the loop for 5 ms


def serve(config: Config) -> int:
    """Run a server until it is told to exit; return the exit status. Blocks.

    Args:
        config: settings; all directories are absolute.

    Raises:
        ConfigError, PipeSwitchError: the server cannot start: a port or the state directory is in
            use, the device does not exist, or the machine has too little memory.
    """
    failpoints.enable(os.environ)
    devices = choose_devices(
        config.device, workers=config.workers.standby + 1, available_bytes=available_bytes()
    )
    places = StateDir(root=Path(config.server.state_dir))
    if config.profiles_dir:
        check_trusted(Path(config.profiles_dir), "profiles_dir")
    try:
        places.create()
    except OSError as error:
        raise _unusable(places.root, error) from None
    _raise_open_files_limit()
    with _locked(places.root), contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(device.kind.reserve(device))
        try:
            places.sweep(f"{time.time():.0f}")
            _log_to(places.logs / LOG_NAME, config.log.max_bytes)
        except OSError as error:
            raise _unusable(places.root, error) from None
        for device in devices:
            log.info("device=%s: %s", device.name, "; ".join([device.why, *device.reasons]))
        try:
            server = Server(config, devices, places)
            try:
                return _run(server)
            finally:
                server.close()
        except OSError as error:  # no descriptors, memory or disk; the loop handles its own errors
            raise ConfigError(
                f"the server cannot start: {error}", hint="ulimit -a, free -h, df -h show limits"
            ) from error


def _unusable(root: Path, error: OSError) -> ConfigError:
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    why = "it is a file, not a folder" if is_file else error.strerror
    where = f"state directory {error.filename or root}"
    return ConfigError(f"{where}: {why}", hint="--state-dir FOLDER")


def check(config: Config) -> None:
    """Check the settings that ``serve`` would refuse.

    Raises:
        ConfigError: there are problems; its text has a line for each.
    """
    problems = []
    host, _ = parse_listen(config.server.listen)
    looks: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: check_access(config.server, host)),
        ("", lambda: check_doors(config.gateway)),
    ]
    free, choose = available_bytes(), partial(choose_devices, config.device, workers=1)
    looks.append(("[device] ", partial(choose, available_bytes=free)))
    for model in config.models:
        own = partial(configured, Token(-1), model), partial(_check_source, model)
        looks += [(f"[[model]] {model.name}: ", look) for look in own]
    for name, look in looks:
        try:
            look()
        except PipeSwitchError as error:
            problems.append(f"{name}{error}")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_source(model: ModelConfig) -> None:
    """Refuse a source that does not exist, as far as that is known without a build."""
    kind, _, name = model.source.partition(":")
    path = os.path.expanduser(name.partition("#")[0])
    if kind == "hf" and name.startswith((".", "/", "~")) and not os.path.exists(path):
        hint = "a folder with config.json, a .gguf file, or a hub's name"
        raise InvalidInput(f"nothing at {name!r}", hint=hint)
    elif kind not in ("hf", "torchvision") and name and find_spec(kind.partition(".")[0]) is None:
        raise InvalidInput(f"no module {kind!r}", hint="PYTHONPATH=FOLDER pipeswitch serve")
    if kind == "torchvision":
        from torchvision.models import list_models

        if name not in (known := list_models()):
            raise InvalidInput(f"torchvision has no model {name!r}{nearest(name, known)}")
        if model.generate:
            raise InvalidInput("generate needs a language model", hint="hf:NAME")


def _run(server: Server) -> int:
    """Open the sockets, restore, run the loop and end all children; return the exit status."""
    listeners = _open_doors(server)
    addresses = [listeners.tcp.address, listeners.ipc.address, *server.gateway.addresses]
    with contextlib.ExitStack() as cleanup:
        loop = Loop(server, lambda: server.ready_line(addresses))
        cleanup.callback(loop.close)
        log_path = server.places.logs / LOG_NAME
        dump = cleanup.enter_context(open(log_path, "a", opener=open_plain))
        watchdog = LoopWatchdog(server.config.server.watchdog_ms / 1000.0, (dump.fileno(), 2))
        cleanup.callback(watchdog.stop)  # runs after the cleanup below, and so watches it
        cleanup.callback(server.processes.stop, STOP_TIMEOUT_S)
        cleanup.callback(server.gateway.stop)
        cleanup.callback(server.frontend.close)  # sends pending answers
        cleanup.callback(server.tracer.stop)
        cleanup.callback(server.frontend.unwatch, server.selector)
        cleanup.callback(signal.set_wakeup_fd, -1)
        server.frontend.watch(server.selector)
        loop.catch_signals()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        server.processes.start_server()
        server.memory.environment = environment_file()
        server.gateway.start(listeners.ipc.address)
        for command in server.scheduler.start(time.monotonic() * 1000.0):
            server.effects.perform(command)
        restore(server, time.time())
        server.tell_losses()
        loop.handle_inbox()  # before a client's message, which may name a restored model or job
        watchdog.start()
        try:
            return loop.run(watchdog)
        except Exception:  # a bug: the process exits, because its engine is dead (invariant I6)
            log.critical("scheduler=dead", exc_info=True)
            sys.stderr.write(f"Error: internal error, exiting; see {log_path}\n")
            return os.EX_SOFTWARE


def _open_doors(server: Server) -> Listeners:
    """Open all sockets. Call this before any fork, so that a port in use ends the start early."""
    server.gateway.open()  # first, because it ends a former gateway that may hold our ports
    listeners = server.frontend.open()
    # Children inherit this address, so a Client() in a training script connects to this server.
    os.environ["PIPESWITCH_HOST"] = listeners.ipc.address
    settings = listeners.keyed(server.config.server)
    if settings is not None:
        server.gateway.serve_keyed(Keyed(listeners.tcp.sock, settings))
    server.frontend.owner_facts = {**server.gateway.facts, "state_dir": str(server.places.root)}
    for warning in [*listeners.warnings, *server.gateway.warnings]:
        log.warning("%s", warning)
        sys.stderr.write(f"Warning: {warning}\n")
    return listeners


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock a state directory for one server; the lock ends with the process."""
    try:
        descriptor = open_plain(root / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"{root / 'lock'}: {error.strerror}", hint="remove it") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise PipeSwitchError(
                f"a server (pid {owner or 'unknown'}) already owns {root} and its device",
                hint="pipeswitch stop, or a second one: --state-dir DIR --listen "
                "tcp://127.0.0.1:6555",
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise ConfigError(f"state directory {root}: {error.strerror}") from None
        yield
    finally:
        os.close(descriptor)


def _log_to(path: Path, max_bytes: int) -> None:
    """Log to a file of limited size. It also has tracebacks, which clients do not get."""
    handler = LogFile(path, maxBytes=max_bytes, backupCount=2)
    form = "%(asctime)s %(levelname)s event=%(event)d %(name)s %(message)s"
    handler.setFormatter(PrintableFormatter(form))
    handler.addFilter(name_event)
    root = logging.getLogger("pipeswitch")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _raise_open_files_limit() -> None:
    """Raise the soft limit of open files: each connection needs one, and 1024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
