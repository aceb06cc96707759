"""The process of a stage: calls the owner's functions over requests' raw inputs (ADR 34).

It runs the owner's code outside of the sandbox, touches no device, and reads the pool: what a
function returns goes into memory of its own, from where the controller copies it.
"""

from __future__ import annotations

import functools
import importlib
import math
import mmap
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages import (
    RunStage,
    SlabTensor,
    StageDone,
    StageFailed,
    StageReady,
    StageSettings,
)
from pipeswitch.programs.layout import ITEM_BYTES, TENSOR_ALIGN_BYTES, aligned

Function = Callable[..., Any]


class Unusable(Exception):
    """What a function is, or returned, is of no use; the text says why."""


def run(settings: StageSettings, channel: Channel, results: int) -> int:
    """Serve until the controller closes the channel; the exit status."""
    torch.set_num_threads(1)  # the device's worker has the others
    memory = memoryview(mmap.mmap(results, settings.result_bytes))
    channel.send(StageReady(pid=os.getpid()))
    while (received := channel.receive()) is not None:
        call, descriptors = received
        assert isinstance(call, RunStage)
        try:
            inputs = {one.name: _read(descriptors[0], one) for one in call.inputs}
            outputs = _place(_load(call.function)(**inputs), memory)
            answer: StageDone | StageFailed = StageDone(epoch=call.epoch, outputs=outputs)
        except Unusable as problem:
            answer = StageFailed(epoch=call.epoch, reason=str(problem))
        except BaseException as error:  # SystemExit too: a function ends no request but its own
            traceback.print_exc()
            said = f"it raised {type(error).__name__}: {error}"
            answer = StageFailed(epoch=call.epoch, reason=said[:1000])
        finally:
            os.close(descriptors[0])
        channel.send(answer)
    return 0


@functools.cache
def _load(name: str) -> Function:
    """Import ``package.module:function``."""
    module, _, attribute = name.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except BaseException as error:
        raise Unusable(
            f"it cannot be imported: {type(error).__name__}: {error}; the server looks in its "
            "PYTHONPATH: PYTHONPATH=FOLDER pipeswitch serve"
        ) from error
    if not callable(found):
        raise Unusable("it is not callable")
    function: Function = found
    return function


def _read(pool: int, slab: SlabTensor) -> Any:
    """A copy of an input: the function may write to it, and the slab may become another's."""
    data = bytearray(slab.size_bytes)
    os.preadv(pool, [data], slab.offset_bytes)
    return np.frombuffer(data, dtype=np.dtype(slab.dtype)).reshape(slab.shape)


def _place(returned: Any, memory: memoryview) -> tuple[SlabTensor, ...]:
    """Write what a function returned: a dict of arrays by the model's inputs, or a lone array.

    Raises:
        Unusable: it is something else, or too large.
    """
    named = returned if isinstance(returned, Mapping) else {"": returned}
    placed, at = [], 0
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            what = f"a dict with {name!r}: {type(value).__name__}" if named is returned else (
                f"a {type(value).__name__}")  # fmt: skip
            raise Unusable(f"it returned {what}, not a numpy array or a dict of them by name")
        if value.dtype.name not in ITEM_BYTES:
            raise Unusable(f"it returned {name or 'an array'} of dtype {value.dtype}")
        size = ITEM_BYTES[value.dtype.name] * math.prod(value.shape)
        if at + size > len(memory):
            raise Unusable(f"it returned over {len(memory)} bytes: raise [server] max_message")
        flat = np.frombuffer(memory, dtype=value.dtype.name, count=value.size, offset=at)
        np.copyto(flat.reshape(value.shape), value)
        placed.append(
            SlabTensor(
                name=name, dtype=value.dtype.name, shape=value.shape, offset_bytes=at,
                size_bytes=size,
            )
        )  # fmt: skip
        at += aligned(size, TENSOR_ALIGN_BYTES)
    return tuple(placed)
