"""Channel between two of our processes: one packet for each message, with descriptors.

Each packet begins with the number of the controller's event that caused it (``cause``), so that
you can match logs and the timeline across processes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import functools
import logging
import operator
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..base import failpoints
from ..base.errors import LocalProtocolError, RemoteProtocolError
from ..base.failpoints import garbled
from ..wire.frames import MAX_HEADER_BYTES, decode_with, encoder, refuse_deep
from .messages import base, builder, daemon, fork_server, gateway, helper, worker
from .messages.base import Message
from .messages.builder import BuildFailed
from .messages.worker import InferenceFailed, JobReport, LeaseRefused

_MESSAGES: Final = [
    one
    for module in (base, builder, daemon, fork_server, gateway, helper, worker)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Message) and one is not Message
]
AnyMessage: Final[Any] = functools.reduce(operator.or_, _MESSAGES)  # what a channel decodes
MAX_DESCRIPTORS: Final = 64
PR_SET_PDEATHSIG: Final = 1
# Plain integers: combining flags of an enumeration takes longer than decoding a message.
_CONTROL_BYTES: Final = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)

EVENT_BYTES: Final = 8  # start of a packet: number of the event that caused the message


class Cause:
    """Event for which this process works now.

    Attributes:
        event: number of the event that the controller handles now. Between two events, and in child
            processes, it is the event that caused the last received packet; 0: none yet.
    """

    event = 0


cause: Final = Cause()


def name_event(record: logging.LogRecord) -> bool:
    """Add the number of the causing event to a log record; a filter for ``logging`` handlers."""
    record.event = cause.event
    return True


_message_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    """Encode an internal message as msgpack."""
    encoder.encode_into(message, data := bytearray())  # saves a call, compared with ``encoded``
    return bytes(data)


def decode_message(data: bytes | memoryview) -> Message:
    """Decode the output of ``encode_message``; raise RemoteProtocolError for other bytes."""
    message: Message = decode_with(_message_decoder, data, "internal message")
    if isinstance(message, JobReport):
        refuse_deep(message.values, "a report")
    elif isinstance(message, InferenceFailed | LeaseRefused | BuildFailed):
        refuse_deep(message.data, "an error's data")
    return message


PACKET_BYTES: Final = MAX_HEADER_BYTES


class Channel:
    """One end of a socketpair that carries internal messages and descriptors.

    Any thread may call ``send``, because a packet is one system call; one thread calls ``receive``.
    A non-blocking channel raises BlockingIOError where a blocking one would block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.point = ""  # the failpoint that each message passes
        self._packet = bytearray(PACKET_BYTES)  # its pages are allocated when they are first used
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)  # the kernel may use a smaller size

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message; ``descriptors`` are duplicated into the peer.

        Raises:
            BrokenPipeError: the peer is gone.
            BlockingIOError: the channel is non-blocking and full, because the peer does not read.
            LocalProtocolError: the message is larger than a packet can be.
        """
        data, number = encode_message(message), cause.event.to_bytes(EVENT_BYTES, "little")
        if failpoints.is_on and self.point:
            data = garbled(self.point, data)
        control = []
        if descriptors:
            packed = array.array("i", descriptors).tobytes()
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
        try:
            self._socket.sendmsg([number, data], control, _NO_SIGNAL)
        except ConnectionError as error:
            raise BrokenPipeError(error.errno, "peer is gone") from None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise LocalProtocolError(
                    f"{type(message).__name__} of {len(data)} bytes does not fit in a packet"
                ) from None
            raise

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message with its descriptors (the caller owns them); None at end of file.

        Raises:
            BlockingIOError: the limit has passed, or a non-blocking channel has nothing to read.
            RemoteProtocolError: the packet is invalid; its descriptors are closed.
        """
        try:
            # The buffer is reused: a new one of this size costs 13 us of page faults each time.
            size, control, flags, _ = self._socket.recvmsg_into(
                [self._packet], _CONTROL_BYTES, _CLOSE_ON_EXEC
            )
        except ConnectionError:
            return None
        descriptors = array.array("i")
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % 4])
        if not size:
            return None
        try:
            if flags & _CUT:
                raise RemoteProtocolError("a packet was truncated")
            packet = memoryview(self._packet)
            message = decode_message(packet[EVENT_BYTES:size])
            cause.event = int.from_bytes(packet[:EVENT_BYTES], "little")
            return message, list(descriptors)
        except RemoteProtocolError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def setblocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def set_limit(self, seconds: float) -> None:
        """Make a blocking ``receive`` raise BlockingIOError after ``seconds``.

        The kernel measures the time, so a message costs no further system call.
        """
        limit = struct.pack("@ll", *divmod(int(seconds * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> int:
        """Return the descriptor, which the caller then owns; this object is unusable afterwards."""
        return self._socket.detach()


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; both are blocking and close-on-exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def channel_from(descriptor: int) -> Channel:
    """Return a channel over an inherited descriptor, which it then owns."""
    return Channel(socket.socket(fileno=descriptor))


def wake_when_orphaned() -> None:
    """Have the kernel send SIGCONT when the parent dies, so that a stopped process can exit.

    The process then finds its channel closed and exits, or continues if the controller is alive.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
