"""Stage process: calls the owner's functions with requests' tensors (ADR 34).

It runs the owner's code outside of the sandbox, uses no device, and only reads the pool. It writes
return values to its own result memory, and the controller copies them from there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ...base.bytes_tensors import BYTES, packed, unpacked
from ...base.errors import InvalidInput
from ...base.failpoints import reach
from ...base.units import nearest
from ...ipc.channel import Channel
from ...ipc.messages.base import OpId, SlabTensor
from ...ipc.messages.helper import HelperCall, HelperDone, HelperFailed, HelperReady
from ...programs.interface.layout import ITEM_BYTES, TENSOR_ALIGN_BYTES, aligned
from ...sandbox.confine import WORST
from ...sandbox.environment import take_environment
from .wrapper import CheckSettings

Function = Callable[..., Any]
MAX_ARRAYS, MAX_NAME = 64, 128  # limits for the inputs of a model


class Unusable(Exception):
    """Function or return value that cannot be used; the text says why."""


def run(_: bytes, channel: Channel, descriptors: Sequence[int]) -> int:
    """Serve calls until the controller closes the channel; return the exit status."""
    environment, results = descriptors
    take_environment(environment)
    torch.set_num_threads(1)  # the device's worker uses the other cores
    Path("/proc/self/oom_score_adj").write_text(WORST)  # if memory leaks, Linux kills only this
    memory = memoryview(mmap.mmap(results, 0))
    channel.send(HelperReady(pid=os.getpid()))
    while (received := channel.receive()) is not None:
        call, descriptors = received
        assert isinstance(call, HelperCall)
        try:
            reach("stage.call")
            inputs = {one.name: _read(descriptors[0], one) for one in call.inputs}
            outputs = _place(_load(call.function)(**inputs), memory)
            answer: HelperDone | HelperFailed = HelperDone(op_id=call.op_id, outputs=outputs)
        except Unusable as problem:
            answer = HelperFailed(op_id=call.op_id, reason=str(problem))
        except BaseException as error:  # also SystemExit: a function may fail its own request only
            traceback.print_exc()
            answer = HelperFailed(op_id=call.op_id, reason=f"it raised {_said(error)}")
        finally:
            os.close(descriptors[0])
        reach("stage.done")
        channel.send(answer)
    return 0


def check(values: bytes, channel: Channel, descriptors: Sequence[int]) -> int:
    """Report whether all functions import and the first accepts the inputs; return the status."""
    take_environment(*descriptors)
    settings = msgspec.msgpack.decode(values, type=CheckSettings)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout_s)  # SIGALRM ends this process
    answer: HelperReady | HelperFailed = HelperReady(pid=os.getpid())
    name = ""
    try:
        loaded = [_load(name := function) for function in settings.functions]
        name = settings.functions[0]
        with contextlib.suppress(ValueError):  # a function in C may have no signature
            if settings.inputs:
                inspect.signature(loaded[0]).bind(**dict.fromkeys(settings.inputs))
    except Unusable as problem:
        answer = HelperFailed(op_id=OpId(0), reason=f"{name}: {problem}")
    except TypeError as error:
        arguments = ", ".join(settings.inputs)
        reason = f"{name}: it cannot be called with {arguments}, which --raw names: {error}"
        answer = HelperFailed(op_id=OpId(0), reason=reason)
    channel.send(answer)
    return 0


@functools.cache
def _load(name: str) -> Function:
    """Import and return ``package.module:function``; raise ``Unusable`` if that fails."""
    module, _, attribute = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except BaseException as error:
        raise Unusable(
            f"it cannot be imported: {_said(error)}; the server looks in its "
            "PYTHONPATH: PYTHONPATH=FOLDER pipeswitch serve"
        ) from error
    try:
        function: Function = functools.reduce(getattr, attribute.split("."), owner)
    except AttributeError:
        functions = (name for name, value in vars(owner).items() if inspect.isfunction(value))
        public = [name for name in functions if name[0] != "_"]
        has = ", ".join(public[:4]) or "no function"
        advice = nearest(attribute, public) or f"; it has {has}"
        raise Unusable(f"{module} has no {attribute}{advice}"[:1000]) from None
    if not callable(function):
        raise Unusable("it is not callable")
    return function


def _said(error: BaseException) -> str:
    """Return the error's type and text, even if the text cannot be read or encoded."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.encode(errors="replace").decode()[:1000]


def _read(pool: int, slab: SlabTensor) -> Any:
    """Return a copy of an input: the function may write to it, and the slab may be reused."""
    data = bytearray(slab.size_bytes)
    os.preadv(pool, [data], slab.offset_bytes)
    if slab.dtype == BYTES:
        try:
            return unpacked(data, slab.shape)
        except InvalidInput as error:
            raise Unusable(f"its {slab.name} is not what was said: {error.message}") from None
    return np.frombuffer(data, dtype=np.dtype(slab.dtype)).reshape(slab.shape)


def _place(returned: Any, memory: memoryview) -> tuple[SlabTensor, ...]:
    """Write a function's return value, an array or a dict of arrays by name, to ``memory``.
    Raises Unusable: the value has another type or is too large."""
    named = returned if isinstance(returned, Mapping) else {"": returned}
    if len(named) > MAX_ARRAYS:
        raise Unusable(f"it returned {len(named)} arrays, a model takes {MAX_ARRAYS} at most")
    placed, at = list[SlabTensor](), 0
    for name, value in named.items():
        is_name = isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable()
        texts = packed(value) if is_name else None
        if texts is not None:
            dtype, (shape, data) = BYTES, texts
            size = len(data)
        elif is_name and isinstance(value, np.ndarray):
            dtype, shape = value.dtype.name, value.shape
            if dtype not in ITEM_BYTES:
                raise Unusable(f"it returned {name or 'an array'} of dtype {value.dtype}")
            size = ITEM_BYTES[dtype] * math.prod(shape)
        else:
            what = f"a {type(value).__name__}"
            if named is returned:
                what = f"a dict with {repr(name)[:80]}: {type(value).__name__}"
            raise Unusable(f"it returned {what}, not a numpy array or a dict of them by name")
        if at + size > len(memory):
            raise Unusable(f"it returned over {len(memory)} bytes: raise [server] max_message")
        if texts is not None:
            memory[at : at + size] = data
        else:
            flat = np.frombuffer(memory, dtype=dtype, count=value.size, offset=at)
            np.copyto(flat.reshape(shape), value)
        placed.append(
            SlabTensor(name=name, dtype=dtype, shape=shape, offset_bytes=at, size_bytes=size)
        )
        at += aligned(size, TENSOR_ALIGN_BYTES)
    return tuple(placed)
