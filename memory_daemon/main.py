"""Entry of the memory daemon process: a clean forked child of the fork server."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from pipeswitch.base.units import LogFile, PrintableFormatter, escape_control_chars
from pipeswitch.devices.registry import kind_of
from pipeswitch.ipc.channel import Channel, name_event
from pipeswitch.ipc.messages.daemon import DaemonSettings

from .daemon import MemoryDaemon

log = logging.getLogger(__name__)


def run(settings: DaemonSettings, control: Channel, descriptors: Sequence[int]) -> None:
    """Serve until Exit, then return; exit with status 1 if the controller is gone or sends
    invalid messages.

    ``descriptors``: the store memfd, the control page, the workers' doorbells and our own. They
    stay open until the process exits.

    Raises:
        CudaError, OSError: the device's memory cannot be allocated.
    """
    # Ctrl-C reaches the whole process group, but the controller decides when a process exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("/proc/self/comm").write_text("pipeswitch-mem")  # the kernel keeps 15 characters
    if settings.log_path:
        log_to(settings.log_path, settings.limits.log_bytes)
    threading.excepthook = _leave
    store, control_page, *doorbells = descriptors
    device = kind_of(settings.device).open_memory(settings, store, control_page, doorbells)
    daemon = MemoryDaemon(device, control, fence_count=settings.limits.fence_count)
    if not daemon.run():
        # Other threads may still copy or sync; exit without waiting for them.
        os._exit(1)


def log_to(path: str, max_bytes: int) -> None:
    """Log to a file; if it cannot be written, log to the parent's stderr."""
    handler: logging.Handler = logging.StreamHandler()
    refusal = ""
    try:
        handler = LogFile(path, maxBytes=max_bytes, backupCount=2)
    except OSError as error:
        refusal = error.strerror or ""
    handler.setFormatter(PrintableFormatter("%(levelname)s:%(name)s:event=%(event)d %(message)s"))
    handler.addFilter(name_event)
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    if refusal:
        log.warning("%s cannot be written: %s", path, refusal)


def _leave(args: threading.ExceptHookArgs) -> None:
    """End the process, because a thread has died and its requests would have no answer."""
    name = args.thread.name if args.thread is not None else "unknown"
    log.critical("thread=%s died: %r", name, args.exc_value)
    sys.stderr.write(escape_control_chars("".join(traceback.format_exception(args.exc_value))))
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)
