"""The controller process: set up, announce readiness, loop, drain, leave (PipeSwitch 3).

One loop on one thread (docs/adr/0009): clients' sockets, the channels of all children, their exits
and signals become events of one queue, and the scheduler's commands are performed at once. One
blocking call: the selector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib.metadata
import logging
import logging.handlers
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .. import failpoints
from ..commits.progress import SUFFIX, read_life
from ..config import PRIORITIES, Config, ModelConfig
from ..devices.choosing import (
    ChosenDevice,
    arena_size,
    choose_devices,
    facts_of,
    only_server_on,
    private_size,
)
from ..errors import ConfigError, PipeSwitchError
from ..failpoints import reach
from ..frontend import permissions
from ..frontend.frontend import Frontend
from ..ipc.messages import JobName, ModelName
from ..machine import available_bytes, cpu_count, processor_name
from ..planning.profile import Identity
from ..policies import find_policy
from ..programs.signature import parse_input
from ..programs.spec import devices_of, stage_of
from ..sandbox.confine import missing
from ..scheduler.events import (
    DrainAsked,
    Event,
    Leave,
    Query,
    RegisterAsked,
    SweepPrograms,
    Tick,
    Token,
)
from ..scheduler.models.versions import split_name
from ..scheduler.processes.fleet import most_workers
from ..scheduler.scheduler import Scheduler, SchedulerSettings
from ..units import PrintableFormatter, format_bytes
from ..watchdog import LoopWatchdog, Notifier
from ..wire.private import check_trusted
from .device import DeviceEffects, Ground
from .effects import Effects
from .folders import Places
from .gateway import Gateway, Keyed
from .journal import FILE_NAME, JournalFile
from .processes import URGENT_LOOK_EVERY_S, Processes
from .shared_memory import DeviceShare, Memory, Sizes
from .stages import StageEffects
from .tracing import Tracer

log = logging.getLogger(__name__)

SHIPPED_PROFILES = Path(__file__).parents[2] / "profiles"  # in a checkout; else nothing is there
WORDS = 16384  # arrival words: 64 KiB of a 2 MiB region
STOP_TIMEOUT_S = 5.0
EXACT_BELOW_S = 0.01  # epoll counts whole milliseconds, upwards: too coarse for a batch's delay
MAX_BUILDS = 2  # of two clients: one that never ends leaves the other its turn
MAX_OPEN_FILES = 65536  # what the soft limit is raised to
SWITCH_INTERVAL_S = 0.0005  # the copier and the upload writer must not keep the loop for 5 ms


def serve(config: Config, *, announce: Callable[[str], None] | None = None) -> int:
    """Run a server until it is told to leave; the exit status.

    Args:
        config: with absolute directories.
        announce: told one line when the server is ready; prints it by default.

    Raises:
        ConfigError, PipeSwitchError: it cannot start: a port or the state directory is in use,
            the device does not exist, the machine has no room.
    """
    failpoints.enable(os.environ)
    devices = choose_devices(config.device, workers=config.workers.standby + 1)
    places = Places(root=Path(config.server.state_dir))
    if config.profiles_dir:
        check_trusted(Path(config.profiles_dir), "profiles_dir")
    try:
        places.create()
    except OSError as error:
        raise ConfigError(f"state directory {places.root}: {error.strerror}") from None
    _raise_open_files_limit()
    with _locked(places.root), contextlib.ExitStack() as held:
        for device in devices:
            held.enter_context(only_server_on(device))
        places.sweep()
        _log_to(places.logs / "server.log", config.log.max_bytes)
        for device in devices:
            log.info("device=%s: %s %s", device.name, device.why, "; ".join(device.ladder.reasons))
        server = Server(config, devices, places, announce or _print_line)
        try:
            return server.run()
        finally:
            server.close()


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
                hint="pipeswitch stop, or a second one: --state-dir DIR --listen tcp://127.0.0.1:6555",
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
    """The server's own log; bounded, traces of errors go here and not to clients."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=max_bytes, backupCount=2)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
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


def _sizes(config: Config, devices: Sequence[ChosenDevice]) -> list[Sizes]:
    """Turn ``auto`` and fractions into bytes: each device's, which differ by its arena alone.

    Raises:
        ConfigError: the machine has no room, or a wish cannot be had on one of them.
    """
    available = available_bytes()
    store = config.host.store.resolve(available, available // 4)
    cores, sharers = cpu_count(), sum(one.options is None for one in devices) or len(devices)
    is_sandboxed = _is_sandboxed(config, devices)
    common = Sizes(
        arena_bytes=0,
        store_bytes=max(store, 1 << 20) & -4096,
        pool_bytes=config.server.pool_bytes & -4096,
        input_bytes=config.jobs.shared_input_bytes & -4096,
        words=WORDS,
        bell_count=most_workers(config.workers.standby),
        threads=config.workers.threads or max(1, (cores - 1) // sharers),
        build_threads=config.workers.threads or max(1, cores - 1),
        build_timeout_s=config.workers.build_timeout_ms / 1000.0,
        stage_timeout_s=config.preprocess.max_time_ms / 1000.0,
        build_memory_bytes=config.workers.build_memory.resolve(available, available * 3 // 4),
        task_memory_bytes=config.workers.task_memory.resolve(available, available // 2),
        is_sandboxed=is_sandboxed,
        separates_tenants=_separates_tenants(config, devices, is_sandboxed=is_sandboxed),
        link_bytes_per_s=config.device.link_gbps * 1e9,
        log_bytes=config.log.max_bytes,
    )
    sizes = [_of_device(common, config, device, available) for device in devices]
    _check_room(sizes, available)
    return sizes


def _of_device(common: Sizes, config: Config, device: ChosenDevice, available_bytes: int) -> Sizes:
    """With its own arena: of the machine's memory on cpu, of the GPU's on cuda."""
    arena = config.device.arena.resolve(available_bytes, available_bytes // 10)
    cuda = device.options
    if cuda is not None:
        arena = arena_size(config.device.arena, device.free_bytes)
        private_bytes = private_size(device.free_bytes, arena)
        cuda = msgspec.structs.replace(cuda, private_bytes=private_bytes)
    return dataclasses.replace(common, arena_bytes=max(arena, 4 << 20) & -(2 << 20), cuda=cuda)


def _check_room(sizes: Sequence[Sizes], available_bytes: int) -> None:
    """Before a page is touched: the kernel would end processes, ours or other people's.

    Raises:
        ConfigError: the machine, or this process's cgroup, has less than the server would take.
    """
    wanted = {"host store": sizes[0].store_bytes, "request pool": sizes[0].pool_bytes}
    arenas = [one.arena_bytes for one in sizes if one.cuda is None]
    if arenas:
        wanted["arena" if len(arenas) == 1 else "arenas"] = sum(arenas)
    if sum(wanted.values()) > available_bytes:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in wanted.items())
        raise ConfigError(
            f"the server would take {format_bytes(sum(wanted.values()))} of memory ({parts}), "
            f"{format_bytes(available_bytes)} are available here",
            hint="smaller --arena or --host-store, or a larger limit of the container",
        )


def _is_sandboxed(config: Config, devices: Sequence[ChosenDevice]) -> bool:
    """Whether clients' programs run in the sandbox, on all devices; what it lacks is said.

    Raises:
        ConfigError: it is required, and this machine does not have all of it.
    """
    wanted = config.security.sandbox
    is_cpu = all(device.options is None for device in devices)
    lacks = missing() if is_cpu else ("a sandbox on the cuda device",)
    if wanted == "off":
        log.warning("sandbox=off: clients' programs run without one")
    elif lacks:
        text = f"this machine lacks {' and '.join(lacks)}"
        if wanted == "require":
            raise ConfigError(f"[security] sandbox is required, and {text}")
        log.warning("sandbox=incomplete: %s", text)
    elif failpoints.are_enabled():
        log.warning("sandbox=off: failpoints are on, whose files no confined process could open")
    return wanted != "off" and is_cpu and "seccomp" not in lacks


def _separates_tenants(
    config: Config, devices: Sequence[ChosenDevice], *, is_sandboxed: bool
) -> bool:
    """Whether a process serves one tenant alone.

    Raises:
        ConfigError: it is wanted, and cannot be had on this device or machine.
    """
    if config.security.tenants == "shared":
        return False
    lacks = ""
    if not is_sandboxed or missing():  # a builder that Landlock does not stop reads all programs
        lacks = "all of the sandbox: processes could open each other's memory and files"
    if any(device.options is not None for device in devices):
        lacks = "the cpu device: on cuda a process that maps the arena can read all of it"
    if lacks:
        raise ConfigError(
            f'[security] tenants = "separate" needs {lacks}',
            hint='tenants = "shared", or a server for each tenant',
        )
    return True


def _identity(device: ChosenDevice, sizes: Sizes) -> Identity:
    """What profiles measured by this server hold for."""
    has_peer = device.ladder.peers == "on"  # two links: copies of one take about twice as long
    return Identity(
        device=device.opened,
        name=f"{device.title or processor_name()}{' and a peer' if has_peer else ''}",
        cores=cpu_count(),
        threads=sizes.threads,
        link_bytes_per_s=sizes.link_bytes_per_s,
        pipeswitch=importlib.metadata.version("pipeswitch"),
        torch=importlib.metadata.version("torch"),  # it is never imported here
    )


class Server:
    """Everything one running server consists of."""

    def __init__(
        self, config: Config, devices: Sequence[ChosenDevice], places: Places,
        announce: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._config = config
        self._devices = devices
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
        policy = find_policy(config.scheduler.policy, max_wait_ms=config.scheduler.max_wait_ms)
        self._sizes = _sizes(config, devices)
        sizes = self._sizes[0]
        self._memory = Memory(sizes)
        self._shares = [DeviceShare(one) for one in self._sizes]
        facts = {
            **facts_of(devices),
            "arena_bytes": sizes.arena_bytes,
            "store_bytes": sizes.store_bytes,
            "standby": config.workers.standby,
            "threads": sizes.threads,
            "pid": os.getpid(),
        }
        self._frontend = Frontend(
            config,
            self._memory.pool,
            self._inbox.append,
            facts=facts,
            is_ready=lambda: self._scheduler.is_ready,
            pool_of=self._memory.pool_of if sizes.separates_tenants else None,
        )
        self._journal = _open_journal(places.root / FILE_NAME)
        child_log = places.logs / "processes.log"
        self._processes = Processes(
            self._selector, child_log, self._give_up, log_bytes=sizes.log_bytes
        )
        self._gateway = Gateway(
            config.gateway,
            self._selector,
            places.root,
            child_log,
            config.server.allow_code,
            config.workers.restart_backoff_ms / 1000.0,
        )
        settings = SchedulerSettings(
            store_bytes=sizes.store_bytes,
            words=sizes.words,
            standby=config.workers.standby,
            max_builds=MAX_BUILDS,
            max_models_per_client=config.server.max_models_per_client,
            admission=config.scheduler.admission,
            look_ahead=config.scheduler.look_ahead,
            training=config.scheduler.training,
            placement=config.scheduler.placement,
            move_after_ms=config.scheduler.move_after_ms,
            max_queue=config.scheduler.max_queue,
            max_queue_per_model=config.scheduler.max_queue_per_model,
            max_queue_time_ms=config.scheduler.max_queue_time_ms,
            commit_every_ms=config.scheduler.commit_every_ms,
            weights=config.tenants,
            max_compute_ms=config.scheduler.max_compute_ms,
            deadline_grace_ms=config.scheduler.deadline_grace_ms,
            stop_grace_ms=config.scheduler.stop_grace_ms,
            evict_grace_ms=config.scheduler.evict_grace_ms,
            restart_backoff_ms=config.workers.restart_backoff_ms,
            stages=config.preprocess.processes,
            max_stage_ms=config.preprocess.max_time_ms,
            keep_versions=config.jobs.keep_versions,
            keep_jobs=config.jobs.keep.count,
            keep_jobs_ms=config.jobs.keep.time_ms,
            unix_offset_ms=time.time() * 1000.0 - _now_ms(),
            is_sandboxed=sizes.is_sandboxed,
            separates_tenants=sizes.separates_tenants,
            models_dir=str(places.models),
            logs_dir=str(places.logs),
            job_log_bytes=config.log.max_bytes,
            commits_dir=str(places.commits),
            published_dir=str(places.published),
        )
        self._scheduler = Scheduler(
            settings, policy, config.scheduler.max_wait_ms,
            [
                dataclasses.replace(
                    settings, device=device.name, arena_bytes=one.arena_bytes,
                    prefix_bytes=config.device.prefix.resolve(one.arena_bytes, 0),
                    identity=_identity(device, one),
                )
                for device, one in zip(devices, self._sizes, strict=True)
            ],
        )  # fmt: skip
        ground = Ground(
            sizes=sizes,
            places=places,
            memory=self._memory,
            shares=self._shares,
            processes=self._processes,
            frontend=self._frontend,
            take=self._inbox.append,
        )
        self._stages = StageEffects(ground, config.server.max_message_bytes)
        self._effects = Effects(
            ground,
            [
                DeviceEffects(ground, index, self._sizes[index], device.opened)
                for index, device in enumerate(devices)
            ],
            self._stages,
            journal=self._journal,
            profiles_dir=Path(config.profiles_dir or SHIPPED_PROFILES),
        )
        self._tracer = Tracer(self._effects.timeline, self._frontend.answer_soon)
        self._notifier = Notifier(os.environ)

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until Leave. This thread alone owns the scheduler's state."""
        self._gateway.open()  # a former one gives its ports back
        self._listeners = self._frontend.open()  # a port in use is known before anything is forked
        # Children inherit it: a Client() in a training script is one of its own server.
        os.environ["PIPESWITCH_HOST"] = self._listeners.ipc.address
        settings = self._listeners.keyed(self._config.server)
        if settings is not None:
            self._gateway.serve_keyed(Keyed(self._listeners.tcp.sock, settings))
        self._frontend.owner_facts = self._gateway.facts
        for warning in [*self._listeners.warnings, *self._gateway.warnings]:
            log.warning("%s", warning)
            sys.stderr.write(f"Warning: {warning}\n")
        with contextlib.ExitStack() as cleanup:
            dump = cleanup.enter_context(open(self._log_path, "a"))
            watchdog = LoopWatchdog(self._config.server.watchdog_ms / 1000.0, (dump.fileno(), 2))
            cleanup.callback(watchdog.stop)  # the last to run: an end that hangs is an end too
            cleanup.callback(self._processes.stop, STOP_TIMEOUT_S)
            cleanup.callback(self._gateway.stop)
            cleanup.callback(self._frontend.close)  # answers go out
            cleanup.callback(self._tracer.stop)
            cleanup.callback(self._frontend.unwatch, self._selector)
            cleanup.callback(signal.set_wakeup_fd, -1)
            self._frontend.watch(self._selector)
            self._catch_signals()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._processes.start_server()
            self._memory.keep_environment()
            self._gateway.start(self._listeners.ipc.address)
            for command in self._scheduler.start(_now_ms()):
                self._effects.perform(command)
            self._restore()
            self._handle_inbox()  # before the first client is heard: it may ask for what was there
            watchdog.start()
            try:
                return self._loop(watchdog)
            except Exception:  # a bug of ours: no silent half-life (invariant I6)
                log.critical("scheduler=dead", exc_info=True)
                sys.stderr.write(f"Error: internal error, leaving; see {self._log_path}\n")
                return os.EX_SOFTWARE

    def _loop(self, watchdog: LoopWatchdog) -> int:
        """One blocking call: children, clients' events and signals all wake it."""
        look_at_s = 0.0
        while self._effects.left is None:
            timeout_s = self._timeout_s(look_at_s)
            if 0.0 < timeout_s < EXACT_BELOW_S:
                select.select([self._selector], (), (), timeout_s)
                timeout_s = 0.0
            found = self._selector.select(timeout_s)
            for key, _ in found:
                key.data()
            self._frontend.step()
            self._handle_inbox()
            watchdog.turned()
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + self._look(now_s)
            elif found:  # what was found may want a look sooner
                look_at_s = min(look_at_s, now_s + URGENT_LOOK_EVERY_S)
        self._notifier.tell(STOPPING=1, STATUS=self._effects.left.reason)
        log.info("leaving status=%d: %s", self._effects.left.status, self._effects.left.reason)
        return self._effects.left.status

    def close(self) -> None:
        """Give back what was taken when this was made."""
        self._journal.close()
        self._memory.close()
        self._stages.close()
        for share in self._shares:
            share.close()
        self._notifier.close()
        self._wake_read.close()
        self._wake_write.close()
        self._selector.close()

    def _timeout_s(self, look_at_s: float) -> float:
        """Until the first of: input that is there already, the scheduler's clock, a look."""
        clients_s = self._frontend.wait_s()
        if self._inbox or clients_s == 0.0:
            return 0.0
        wakeup_ms = self._scheduler.next_wakeup_ms()
        at_s = look_at_s if wakeup_ms is None else min(look_at_s, wakeup_ms / 1000.0)
        wait_s = max(0.0, at_s - time.monotonic())
        return wait_s if clients_s is None else min(wait_s, clients_s)

    def _look(self, now_s: float) -> float:
        """At what no descriptor tells of; for how many seconds that will do."""
        since_ms = self._scheduler.waited_since_ms
        since_s = since_ms / 1000.0 if since_ms is not None else None
        self._processes.look(since_s)
        self._gateway.look()
        self._notifier.beat(now_s)
        look_s, gateway_s = self._processes.seconds_to_look(since_s), self._gateway.wait_s()
        return look_s if gateway_s is None else min(look_s, gateway_s)

    def _handle_inbox(self) -> None:
        """All events that wait, in order, then a Tick when one is due."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        while self._signals_seen < self._signals:
            self._signals_seen += 1
            self._notifier.tell(STOPPING=1, STATUS="draining")
            self._handle(DrainAsked(token=None, grace_ms=self._config.server.drain_grace_ms))
        wakeup_ms = self._scheduler.next_wakeup_ms()
        if wakeup_ms is not None and wakeup_ms <= _now_ms():
            self._handle(Tick())

    def _handle(self, event: Event) -> None:
        if isinstance(event, Query) and event.what == "trace":
            self._tracer.ask(event.token, _now_ms() - event.seconds * 1000.0)
            return
        reach("controller.event")
        for command in self._scheduler.decide(event, _now_ms()):
            self._effects.perform(command)
        for command in self._scheduler.settle():
            self._effects.perform(command)
        if not self._is_announced and self._scheduler.is_whole:
            self._is_announced = True
            gc.collect()
            gc.freeze()  # what is there now stays: no full collection walks it during a request
            self._notifier.tell(READY=1, STATUS=self._ready_line())
            self._announce(self._ready_line())

    def _ready_line(self) -> str:
        standby = self._config.workers.standby
        is_one = len(self._devices) == 1
        is_second_best = self._config.device.name == "auto" and self._devices[0].options is None
        why = f" (not cuda: {self._devices[0].why})" if is_second_best else ""
        gpus = [device for device in self._devices if device.options is not None]
        if gpus:
            why = "; ".join(one.why if is_one else f"{one.name}: {one.why}" for one in gpus)
            why = f" ({why})"
        names, each = ",".join(one.name for one in self._devices), "" if is_one else " each"
        arenas = [format_bytes(one.arena_bytes) for one in self._sizes]
        is_same = len(set(arenas)) == 1
        arena = f"arena {arenas[0]}{each}" if is_same else f"arenas {', '.join(arenas)}"
        addresses = [self._listeners.tcp.address, self._listeners.ipc.address]
        return (
            f"pipeswitch is ready: {' '.join([*addresses, *self._gateway.addresses])} "
            f"device {names}, {arena}, "
            f"store {format_bytes(self._sizes[0].store_bytes)}, "
            f"1 active + {standby} standby workers{each}{why}"
        )

    # -- signals -------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._effects.left = Leave(status=os.EX_SOFTWARE, reason=reason)
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
        known = [split_name(name) for name in self._journal.models]
        for name, entry in self._journal.serving.items():
            numbers = entry["version"], entry["last"], entry["spec_digest"]
            there = [version for base, version in known if base == name]
            self._scheduler.versions.restore(ModelName(name), *numbers, there, entry["shares"])
        for name, entry in self._journal.models.items():
            self._effects.builds.built_before[entry["spec"]] = entry["digest"]
            self._inbox.append(
                RegisterAsked(
                    token=self._token(),
                    model=ModelName(name),
                    spec=entry["spec"],
                    spec_digest=entry["spec_digest"],
                    priority=entry["priority"],
                    is_pinned=entry["pin"],
                    tenant=entry["tenant"],
                    devices=devices_of(entry["spec"]),
                    stage=stage_of(entry["spec"]),
                    is_known=True,
                    restored=self._effects.builds.manifest_of(entry["digest"]),
                )
            )
        # Nothing is registered yet; the journal's models stay.
        self._effects.builds.sweep(SweepPrograms(digests=frozenset()))
        self._effects.sweep_commits({*self._journal.jobs, *self._journal.ended})
        for name, entry in self._journal.jobs.items():
            self._restore_job(JobName(name), entry)
        for name, entry in self._journal.ended.items():
            self._restore_ended(JobName(name), entry["record"])
        for model in self._config.models:
            if model.name not in {name for name, _ in known}:
                self._inbox.append(self._configured(model))

    def _restore_job(self, name: JobName, entry: dict[str, object]) -> None:
        slot_bytes, step = 0, -1
        try:
            slot_bytes, step = self._effects.restore_commits(name) or (0, -1)
        except (PipeSwitchError, OSError) as error:
            log.error("job=%s commit on disk is unusable, starting over: %s", name, error)
        life = read_life(self._log_path.parent / f"job-{name}{SUFFIX}")
        restarts, steps_recomputed = life.resumed_at(max(step, 0))
        self._scheduler.machine.jobs.restore(
            name,
            str(entry["entry"]),
            tuple(entry["args"]),  # type: ignore[arg-type]
            int(entry["priority"]),  # type: ignore[call-overload]
            slot_bytes,
            step,
            is_paused=name in self._journal.holds,
            tenant=str(entry["tenant"]),
            share=str(entry["share"]),
            devices=tuple(entry["devices"]),  # type: ignore[arg-type]
            placed=self._journal.placed.get(name),
            restarts=restarts,
            steps_recomputed=steps_recomputed,
        )

    def _restore_ended(self, name: JobName, record: dict[str, Any]) -> None:
        jobs = self._scheduler.machine.jobs
        try:
            jobs.restore_ended(name, record, self._effects.step_on_disk(name))
        except (ValueError, TypeError, KeyError) as error:
            log.warning("job=%s record of an ended job ignored: %r", name, error)

    def _configured(self, model: ModelConfig) -> RegisterAsked:
        source = permissions.check_source(
            model.source, model.weights, is_owner=True, allow_code=("*",), uploads_dir=""
        )
        inputs, raw = (
            dict(map(parse_input, texts, range(len(texts)))) for texts in (model.inputs, model.raw)
        )
        if model.preprocess or raw:
            permissions.check_function(model.preprocess, raw, is_owner=True, allow_code=())
        spec, digest = permissions.encode_spec(
            model.name, source, inputs, None, model.max_batch, model.batch, model.batch_delay_ms,
            model.devices, model.preprocess, raw,
        )  # fmt: skip
        return RegisterAsked(
            token=self._token(),
            model=ModelName(model.name),
            spec=spec,
            spec_digest=digest,
            priority=PRIORITIES[model.priority],
            is_pinned=model.pin,
            devices=model.devices,
            stage=stage_of(spec),
        )


def _now_ms() -> float:
    return time.monotonic() * 1000.0
