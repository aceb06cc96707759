"""Process that tries a JSON schema of an answer, which may take too long or too much memory."""

from __future__ import annotations

import os
import signal

from ...base.errors import InvalidInput
from ...ipc.channel import Channel
from ...ipc.messages.base import OpId
from ...ipc.messages.helper import HelperFailed, HelperReady
from ...programs.decoding.grammar import try_schema
from ...sandbox.confine import confine_worker, missing

SCHEMA_S = 0.2  # processor time to prepare a schema and the first tokens of an answer
SCHEMA_BYTES = 256 << 20
NICENESS = 10  # lower priority than workers, like text processes


def check_schema(values: bytes, channel: Channel, _: object) -> int:
    """Report whether an answer can follow a schema; return the status. SIGPROF ends this process
    after ``SCHEMA_S`` of processor time."""
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, SCHEMA_S)
    if "seccomp" not in missing():
        confine_worker(SCHEMA_BYTES)
    answer: HelperReady | HelperFailed = HelperReady(pid=os.getpid())
    try:
        try_schema(values.decode())
    except InvalidInput as problem:
        answer = HelperFailed(op_id=OpId(0), reason=problem.message)
    channel.send(answer)
    return 0
