"""Entry of the memory daemon process: a clean forked child of the fork server."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from pipeswitch.commit_area import Failpoint, no_failpoint
from pipeswitch.devices import DeviceMemory
from pipeswitch.devices.cpu import CpuDeviceMemory
from pipeswitch.errors import ConfigError
from pipeswitch.messages import DaemonSettings
from pipeswitch.wire import Channel

from .daemon import Daemon

log = logging.getLogger(__name__)

PROCESS_NAME = "pipeswitch-mem"  # the kernel keeps 15 characters


def run(
    settings: DaemonSettings,
    control: Channel,
    descriptors: Sequence[int],
    failpoint: Failpoint = no_failpoint,
) -> None:
    """Serve until Exit, then return; leave at once, with status 1, when the controller is gone.

    ``descriptors``: the store memfd, then ``bell_count`` eventfds. They stay open for the life
    of the process.

    Raises:
        ConfigError: no such device, or not the descriptors that the settings announce.
        OSError: the memory cannot be had.
    """
    # Ctrl-C reaches the whole process group; who leaves when is the controller's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("/proc/self/comm").write_text(PROCESS_NAME)
    if settings.log_path:
        logging.basicConfig(filename=settings.log_path, level=logging.INFO)
    device = open_device(settings, descriptors)
    daemon = Daemon(
        device, control, words=settings.words, device_name=settings.device, failpoint=failpoint
    )
    if not daemon.run():
        log.error("controller=gone, leaving")
        # Threads may be deep in a copy or an fsync: nobody is left to wait for them.
        os._exit(1)


def open_device(settings: DaemonSettings, descriptors: Sequence[int]) -> DeviceMemory:
    """Take the device's memory, as the settings say.

    Raises:
        ConfigError, OSError: as ``run``.
    """
    if len(descriptors) != 1 + settings.bell_count:
        raise ConfigError(
            f"a daemon with {settings.bell_count} bells got {len(descriptors)} descriptors"
        )
    store, *bells = descriptors
    if settings.device == "cpu":
        return CpuDeviceMemory(
            store=store,
            bells=bells,
            arena_bytes=settings.arena_bytes,
            store_bytes=settings.store_bytes,
            words=settings.words,
            link_bytes_per_s=settings.link_bytes_per_s,
        )
    raise ConfigError(f"no device {settings.device!r}")
