"""Entry of the gateway process, which runs one loop.

If the process dies, the controller starts another one. The controller holds the listening socket,
too, so new connections wait meanwhile. If the server dies, the gateway answers 503 for ORPHAN_S, or
until the next server ends it and starts its own gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ..base.config import GatewayConfig
from ..base.errors import ConfigError
from ..base.extras import SERVERS
from ..base.machine import RETURN_S, FreedMemory
from ..base.roles import address_roles
from ..base.units import PrintableFormatter
from ..ipc.channel import Channel, channel_from, wake_when_orphaned
from ..ipc.messages.gateway import GatewaySettings
from ..wire.tokens import owner_token, read_tokens
from ..wire.tracing import open_tracer
from .doors import DoorContext, open_doors
from .http.http_parser import Limits
from .http.http_server import HttpServer, Secured, context_of
from .http.offload import Shared, started_pool
from .router import Router
from .serving.auth import Authenticator
from .serving.service import Service
from .serving.shared_memory import SharedMemoryRegions
from .serving.upstream import Upstream

TOKENS_EVERY_S: Final = 1.0
ORPHAN_S: Final = 60.0  # time after which a gateway without a server ends
DRAIN_S: Final = 1.0  # time for pending answers after SIGTERM
BACKLOG: Final = 512
ACCEPTS: Final = 16  # connections accepted in one iteration of the loop, before requests are served
COPIERS: Final = 6  # threads for long copies and digests
SPARE_FILES: Final = 256  # descriptors besides one for each connection
PR_SET_THP_DISABLE: Final = 41
GC_THRESHOLD: Final = 100_000  # with the default, collections take twice as long as decoding a body
MEMORY_BYTES: Final = 1152 << 20  # limit without bodies; includes decoding.RESERVE_BYTES
MEMORY_BODIES: Final = 4

log = logging.getLogger(__name__)


def main(descriptor: int) -> None:
    """Receive the settings from the controller, and serve until the process is stopped."""
    faulthandler.enable()  # prints the stacks if an extension crashes
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when the gateway stops
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("pipeswitch").addHandler(handler)
    channel = channel_from(descriptor)
    received = channel.receive()
    if received is None:
        return
    settings, descriptors = received
    if not isinstance(settings, GatewaySettings):
        raise TypeError(f"a gateway is not started with a {type(settings).__name__}")
    wake_when_orphaned()
    _refuse_huge_pages()
    keyed, config = settings.keyed, settings.config
    connections = config.max_connections + (2 * keyed.max_connections if keyed else 0)
    _raise_open_files_limit(connections + SPARE_FILES)
    # Above this limit a request or this process fails, but not the machine.
    max_bytes = MEMORY_BYTES + MEMORY_BODIES * config.max_body_bytes
    max_bytes += 2 * (keyed.client_bytes + keyed.max_message_bytes) if keyed else 0
    max_bytes += MEMORY_BYTES if config.cluster else 0  # threads of connections to nodes
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    asyncio.run(_serve(settings, channel, descriptors))


async def _serve(settings: GatewaySettings, channel: Channel, descriptors: Sequence[int]) -> None:
    """Serve until SIGTERM, or until ORPHAN_S after the controller's death."""
    loop, config = asyncio.get_running_loop(), settings.config
    loop.set_default_executor(started_pool(COPIERS, "pipeswitch-copy"))
    is_over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, is_over.set)

    def orphaned() -> None:
        loop.remove_reader(channel.fileno())
        if close_door is not None:
            close_door()  # there is no server, and the next one needs the port
        loop.call_later(ORPHAN_S, is_over.set)

    loop.add_reader(channel.fileno(), orphaned)  # readable only at the controller's death
    upstream = Upstream(settings.address, config.cluster)
    close_door: Callable[[], None] | None = None  # to clients with keys
    if settings.keyed is not None:
        close_door = SERVERS.load("curve")(descriptors[-1], settings).close
    # If callers need no token, all are on this machine.
    regions = None if settings.needs_token else SharedMemoryRegions(config.max_body_bytes)
    nv_metrics, tracer = config.nv_metrics, open_tracer("pipeswitch")
    service = Service(upstream, has_nv_metrics=nv_metrics, regions=regions, tracer=tracer)
    service.text_processes = config.text_processes
    service.aliases = dict(one.split("=", 1) for one in config.aliases if one)
    callers = _callers(settings)
    limits = Limits(
        body_bytes=config.max_body_bytes,
        connections=config.max_connections,
        connections_per_address=config.max_connections // 2,
    )
    shared = Shared(limits.waiting_bytes, limits.answer_bytes)
    service.queue_full_count, service.errors = lambda: shared.queue_full_count, shared.errors
    code = settings.allow_code
    context = DoorContext(service=service, upstream=upstream, aside=shared.aside, allow_code=code)
    router = Router(callers, open_doors(context))
    http = HttpServer(router, limits, shared, router.refuse)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(upstream.close)
        if close_door is not None:
            stack.callback(close_door)
        if regions is not None:
            stack.callback(regions.close)
        if config.tokens:
            stack.callback(loop.create_task(_follow(config.tokens, callers, http)).cancel)
        if settings.http:
            await _listen(http, config, descriptors[1], stack)
        if settings.grpc:
            grpc = await SERVERS.load("grpc")(service, callers, settings, shared)
            stack.push_async_callback(grpc.stop, DRAIN_S)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        stack.callback(loop.create_task(_return_memory()).cancel)
        await is_over.wait()


async def _listen(
    http: HttpServer, config: GatewayConfig, descriptor: int, stack: contextlib.AsyncExitStack
) -> None:
    """Accept HTTP, with TLS if it is configured; ``stack`` drains and closes the server."""
    loop = asyncio.get_running_loop()
    listening = socket.socket(fileno=descriptor)
    protocol: Callable[[], asyncio.BaseProtocol] = http
    if config.tls_cert:
        protocol = partial(Secured, http, context_of(config.tls_cert, config.tls_key))
    server = await loop.create_server(protocol, sock=listening, backlog=ACCEPTS)
    listening.listen(BACKLOG)
    stack.callback(loop.create_task(http.watch()).cancel)
    stack.push_async_callback(http.drain, DRAIN_S)
    stack.callback(server.close)


def _callers(settings: GatewaySettings) -> Authenticator:
    config = settings.config
    return Authenticator(
        roles=address_roles(config.roles),
        tokens=read_tokens(Path(config.tokens)) if config.tokens else {},
        needs_token=settings.needs_token,
        hosts=frozenset(settings.hosts) or None,
        origins=frozenset(config.origins),
        owner_token=owner_token(Path(settings.owner_token)) if settings.owner_token else "",
    )


async def _follow(tokens: str, callers: Authenticator, http: HttpServer) -> None:
    """Reload the tokens after each change of their file. An invalid file changes nothing."""
    last_stamp: tuple[int, ...] = ()
    while True:
        stamp: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            facts = Path(tokens).stat()
            stamp = facts.st_mtime_ns, facts.st_ino, facts.st_size
        if stamp != last_stamp:
            last_stamp = stamp
            try:
                callers.learn(read_tokens(Path(tokens)))
                http.admit_anew()
            except ConfigError as error:
                log.error("tokens=unchanged: %s", error)
        await asyncio.sleep(TOKENS_EVERY_S)


async def _return_memory() -> None:
    freed = FreedMemory()
    while True:
        await asyncio.sleep(RETURN_S)
        freed.give_back(time.monotonic())


def _refuse_huge_pages() -> None:
    """Disable huge pages: otherwise the first byte of each large body would take 2 MiB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _raise_open_files_limit(minimum: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < minimum:
        limit = minimum if hard == resource.RLIM_INFINITY else min(hard, minimum)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
