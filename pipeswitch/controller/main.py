"""The controller process: set up, announce readiness, loop, drain, leave (PipeSwitch 3).

Two threads: the TCP thread (tcp.py) and this one, which alone owns the scheduler's state, all
channels to children and their exits. One blocking call: the selector.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.handlers
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config import PRIORITIES, Config, ModelConfig, format_bytes
from ..errors import ConfigError, PipeSwitchError
from ..messages import JobName, ModelName
from . import admission
from .effects import Effects, Memory, Places, Sizes
from .events import Answer, DrainAsked, Event, Leave, Query, RegisterAsked, Tick, Token
from .journal import JournalFile
from .machine import available_bytes, cpu_count
from .processes import Processes
from .scheduler import Scheduler, SchedulerSettings
from .tcp import TcpThread

log = logging.getLogger(__name__)

WORDS = 16384  # arrival words: 64 KiB of a 2 MiB region
DRAIN_GRACE_MS = 30_000.0
STOP_TIMEOUT_S = 5.0
MAX_OPEN_FILES = 65536  # what the soft limit is raised to
SWITCH_INTERVAL_S = 0.0005  # two threads, and neither may keep the other waiting for 5 ms


def serve(config: Config, *, announce: Callable[[str], None] | None = None) -> int:
    """Run a server until it is told to leave; the exit status.

    Args:
        config: with absolute directories.
        announce: told one line when the server is ready; prints it by default.

    Raises:
        ConfigError, PipeSwitchError: it cannot start: a port or the state directory is in use,
            the device does not exist, the machine has no room.
    """
    device = _choose_device(config.device.name)
    places = Places(root=Path(config.server.state_dir))
    try:
        places.create()
    except OSError as error:
        raise ConfigError(f"state directory {places.root}: {error.strerror}") from None
    _raise_open_files_limit()
    with _locked(places.root):
        _log_to(places.logs / "server.log")
        server = Server(config, device, places, announce or _print_line)
        try:
            return server.run()
        finally:
            server.close()


def _choose_device(name: str) -> str:
    if name.startswith("cuda"):
        raise ConfigError(
            f"device {name} is not available: this release has the cpu device only",
            hint="pipeswitch serve --device cpu",
        )
    return "cpu"


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Two servers must not share a state directory; the lock dies with the process."""
    try:
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state directory {root}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise PipeSwitchError(
                f"a server (pid {owner or 'unknown'}) already owns {root} and its device",
                hint="pipeswitch stop, or choose another --state-dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _log_to(path: Path) -> None:
    """The server's own log; bounded, traces of errors go here and not to clients."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=16 << 20, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("pipeswitch")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _raise_open_files_limit() -> None:
    """Every connection is a descriptor; the usual soft limit of 1024 is a flood of idle ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open_journal(path: Path) -> JournalFile:
    try:
        return JournalFile(path)
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from None


def _sizes(config: Config) -> Sizes:
    """Turn ``auto`` and fractions into bytes (DESIGN 6)."""
    available = available_bytes()
    arena = config.device.arena.resolve(available, available // 10)
    store = config.host.store.resolve(available, available // 4)
    cores = cpu_count()
    return Sizes(
        arena_bytes=max(arena, 4 << 20) & -(2 << 20),
        store_bytes=max(store, 1 << 20) & -4096,
        pool_bytes=config.server.pool_bytes & -4096,
        words=WORDS,
        bell_count=config.workers.standby + 2,
        threads=config.workers.threads or max(1, cores - 1),
        build_threads=config.workers.threads or max(1, cores - 1),
        link_bytes_per_s=config.device.link_gbps * 1e9,
    )


class Server:
    """Everything one running server consists of."""

    def __init__(
        self, config: Config, device: str, places: Places, announce: Callable[[str], None]
    ) -> None:
        self._config = config
        self._device = device
        self._announce = announce
        self._inbox: deque[Event] = deque()
        self._log_path = places.logs / "server.log"
        self._signals = 0
        self._signals_seen = 0
        self._is_announced = False
        self._internal_token = 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)
        sizes = _sizes(config)
        self._sizes = sizes
        self._memory = Memory(sizes)
        facts = {
            "device": device,
            "arena_bytes": sizes.arena_bytes,
            "store_bytes": sizes.store_bytes,
            "standby": config.workers.standby,
            "threads": sizes.threads,
            "pid": os.getpid(),
        }
        self._tcp = TcpThread(config, self._memory.pool, self._post, facts=facts)
        self._journal = _open_journal(places.root / "journal.jsonl")
        self._processes = Processes(self._selector, places.logs / "processes.log", self._give_up)
        self._scheduler = Scheduler(
            SchedulerSettings(
                device=device,
                arena_bytes=sizes.arena_bytes,
                store_bytes=sizes.store_bytes,
                words=sizes.words,
                standby=config.workers.standby,
                max_queue=config.scheduler.max_queue,
                commit_every_ms=config.scheduler.commit_every_ms,
                restart_backoff_ms=config.workers.restart_backoff_ms,
            ),
            config.scheduler.policy,
            config.scheduler.max_wait_ms,
        )
        self._effects = Effects(
            device=device,
            sizes=sizes,
            places=places,
            memory=self._memory,
            processes=self._processes,
            tcp=self._tcp,
            journal=self._journal,
            take=self._inbox.append,
        )

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until Leave. This thread alone owns the scheduler's state."""
        self._doors = self._tcp.start()  # a port in use is known before anything is forked
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._processes.stop, STOP_TIMEOUT_S)
            cleanup.callback(self._tcp.stop)  # the first to run: answers go out
            cleanup.callback(signal.set_wakeup_fd, -1)
            self._catch_signals()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._processes.start_server()
            for command in self._scheduler.start(_now_ms()):
                self._effects.perform(command)
            self._restore()
            try:
                return self._loop()
            except Exception:  # a bug of ours: no silent half-life (invariant I6)
                log.critical("scheduler=dead", exc_info=True)
                sys.stderr.write(f"Error: internal error, leaving; see {self._log_path}\n")
                return 70

    def _loop(self) -> int:
        """One blocking call: children, clients' events and signals all wake it."""
        while self._effects.left is None:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._handle_inbox()
            self._processes.kill_stopped()
            if not self._tcp.is_alive:
                log.critical("tcp=dead, leaving")
                return 70
        log.info("leaving status=%d: %s", self._effects.left.status, self._effects.left.reason)
        return self._effects.left.status

    def close(self) -> None:
        """Give back what was taken when this was made."""
        self._journal.close()
        self._memory.close()
        self._wake_read.close()
        self._wake_write.close()
        self._selector.close()

    def _timeout_s(self) -> float:
        wakeup_ms = self._scheduler.next_wakeup_ms()
        if self._inbox:
            return 0.0
        look_s = self._processes.seconds_to_look()
        return look_s if wakeup_ms is None else min(look_s, self._until_s(wakeup_ms))

    @staticmethod
    def _until_s(at_ms: float) -> float:
        return max(0.0, (at_ms - _now_ms()) / 1000.0)

    def _handle_inbox(self) -> None:
        """All events that wait, in order, then a Tick when one is due."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        while self._signals_seen < self._signals:
            self._signals_seen += 1
            self._handle(DrainAsked(token=None, grace_ms=DRAIN_GRACE_MS))
        wakeup_ms = self._scheduler.next_wakeup_ms()
        if wakeup_ms is not None and wakeup_ms <= _now_ms():
            self._handle(Tick())

    def _handle(self, event: Event) -> None:
        if isinstance(event, Query) and event.what == "trace":
            trace = self._effects.timeline.chrome_trace(_now_ms() - event.seconds * 1000.0)
            self._tcp.post(Answer(token=event.token, body={"trace": trace}))
            return
        for command in self._scheduler.handle(event, _now_ms()):
            self._effects.perform(command)
        if not self._is_announced and self._scheduler.is_ready:
            self._is_announced = True
            self._announce(self._ready_line())

    def _ready_line(self) -> str:
        standby = self._config.workers.standby
        return (
            f"pipeswitch is ready: {self._doors.tcp.address} {self._doors.ipc.address} "
            f"device {self._device}, arena {format_bytes(self._sizes.arena_bytes)}, "
            f"store {format_bytes(self._sizes.store_bytes)}, 1 active + {standby} standby workers"
        )

    # -- other threads and signals -------------------------------------------------------------

    def _post(self, event: Event) -> None:
        """Called by the TCP thread."""
        self._inbox.append(event)
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            self._wake_write.send(b"\0")

    def _give_up(self, reason: str) -> None:
        self._effects.left = Leave(status=70, reason=reason)
        log.critical("%s", reason)
        sys.stderr.write(f"Error: {reason}\n")

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signals += 1  # the first drains, the second leaves at once

    # -- what was there before -----------------------------------------------------------------

    def _token(self) -> Token:
        self._internal_token -= 1
        return Token(self._internal_token)

    def _restore(self) -> None:
        """Models and jobs of the journal, then the models of the configuration."""
        for name, entry in self._journal.models.items():
            self._effects.built_before[entry["spec"]] = entry["digest"]
            self._inbox.append(
                RegisterAsked(
                    token=self._token(),
                    model=ModelName(name),
                    spec=entry["spec"],
                    spec_digest=entry["spec_digest"],
                    priority=entry["priority"],
                    is_pinned=entry["pin"],
                )
            )
        for name, entry in self._journal.jobs.items():
            self._restore_job(JobName(name), entry)
        for model in self._config.models:
            if model.name not in self._journal.models:
                self._inbox.append(self._configured(model))

    def _restore_job(self, name: JobName, entry: dict[str, object]) -> None:
        slot_bytes, step = 0, -1
        try:
            slot_bytes, step = self._effects.restore_commits(name) or (0, -1)
        except (PipeSwitchError, OSError) as error:
            log.error("job=%s commit on disk is unusable, starting over: %s", name, error)
        self._scheduler.jobs.restore(
            name,
            str(entry["entry"]),
            tuple(entry["args"]),  # type: ignore[arg-type]
            int(entry["priority"]),  # type: ignore[call-overload]
            slot_bytes,
            step,
        )

    def _configured(self, model: ModelConfig) -> RegisterAsked:
        source = admission.check_source(
            model.source, model.weights, is_owner=True, allow_code=("*",), uploads_dir=""
        )
        inputs = dict(admission.parse_input(text) for text in model.inputs)
        spec, digest = admission.encode_spec(model.name, source, inputs, model.max_batch)
        return RegisterAsked(
            token=self._token(),
            model=ModelName(model.name),
            spec=spec,
            spec_digest=digest,
            priority=PRIORITIES[model.priority],
            is_pinned=model.pin,
        )


def _now_ms() -> float:
    return time.monotonic() * 1000.0
