"""The bare ZeroMQ server that ``bench request-path`` compares with: copy once, answer.

``python -m benchmarks.bare_server REPLY_BYTES POOL_BYTES`` prints its addresses, TCP and
ipc. It does what any server of this kind cannot avoid: receive, copy the payload into memory shared
with the process that computes, send a header and a result back.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np
import zmq


def main() -> None:
    """Serve until the standard input is closed."""
    reply_bytes, pool_bytes = int(sys.argv[1]), int(sys.argv[2])
    descriptor = os.memfd_create("bare", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, pool_bytes)
    pool = np.frombuffer(mmap.mmap(descriptor, pool_bytes), dtype=np.uint8)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    local = f"ipc://@pipeswitch-bare-{os.getpid()}"  # abstract: no file to leave behind
    router.bind(local)
    sys.stdout.write(f"tcp://127.0.0.1:{port} {local}\n")
    sys.stdout.flush()
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    reply = b"\0" * reply_bytes
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            break
        identity, _header, payload = router.recv_multipart(copy=False)
        source = np.frombuffer(payload.buffer, dtype=np.uint8)
        np.copyto(pool[: len(source)], source)
        router.send_multipart([bytes(identity.buffer), b"PSW1", reply, b"\0\0\0\0"])
    context.destroy(0)


if __name__ == "__main__":
    main()
