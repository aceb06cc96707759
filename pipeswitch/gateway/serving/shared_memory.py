"""Triton's ``system_shared_memory``: tensors in POSIX shared memory of the caller.

A region is a range of a file in ``/dev/shm`` that a caller has registered. The file's owner may
truncate or rewrite it at any time, so it is never mapped: an input is read once with ``pread``, and
an output is written with ``pwrite``. A caller can thus access each file there that the server's
user can. So it needs the role ``code``, and a gateway that only this machine can reach.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from ...base.errors import AlreadyExists, InvalidInput, QueueFull
from ...base.roles import Principal, Role
from ...base.units import escape_control_chars
from ..http.http_errors import NotFound, TooLarge
from .oip import InferRequest, Output, RegionPlace

# Where shm_open(3) keeps its files.
FOLDER: Final = "/dev/shm"
MAX_REGIONS: Final = 256  # regions of all callers together
MAX_NAME: Final = 256
WHAT: Final = "to name shared memory"
# Like shm_open(3): an optional slash is the first character.
_KEY: Final = re.compile(r"/?(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}")
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, kw_only=True)
class _Region:
    key: str
    offset_bytes: int
    size_bytes: int
    descriptor: int  # open for reading while this is used: a thread may still read

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    def row(self, name: str) -> dict[str, Any]:
        """Return the region as a row of the protocol's status."""
        return {
            "name": name,
            "key": self.key,
            "offset": self.offset_bytes,
            "byte_size": self.size_bytes,
        }


class SharedMemoryRegions:
    """Regions by caller and name; a caller sees only its own."""

    def __init__(self, max_bytes: int) -> None:
        """Start without regions; ``max_bytes`` limits one request's inputs in regions together."""
        self._max_bytes = max_bytes
        self._regions: dict[tuple[str, str], _Region] = {}

    def close(self) -> None:
        self._regions.clear()

    def register(self, caller: Principal, name: str, fields: Mapping[str, Any]) -> None:
        """Register a region; ``fields`` has ``key``, ``offset`` (default 0) and ``byte_size``.

        Raises:
            PermissionDenied, InvalidInput, AlreadyExists, QueueFull.
        """
        caller.require(Role.CODE, WHAT)
        key, offset, size = fields.get("key"), fields.get("offset", 0), fields.get("byte_size")
        if not name or len(name) > MAX_NAME or escape_control_chars(name, keep="") != name:
            raise InvalidInput(f"a region's name has 1 to {MAX_NAME} characters: {name[:80]!r}")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InvalidInput(
                f"{key!r:.80} is not a key of shared memory",
                hint="give a name as for shm_open: /some-name",
            )
        if (caller.tenant, name) in self._regions:
            raise AlreadyExists(f'region "{name}" exists already', hint="unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise QueueFull(
                f"{MAX_REGIONS} regions are registered", hint="unregister some", limit="regions"
            )
        descriptor = _open(key)
        try:
            total = os.fstat(descriptor).st_size
            if type(offset) is not int or type(size) is not int or offset < 0 or size < 1:
                raise InvalidInput("offset and byte_size must be whole numbers, from 0 and from 1")
            if offset + size > total:
                raise InvalidInput(f"{key} has {total} bytes: {size} from {offset} are beyond it")
        except InvalidInput:
            os.close(descriptor)
            raise
        self._regions[caller.tenant, name] = _Region(
            key=key, offset_bytes=offset, size_bytes=size, descriptor=descriptor
        )

    def unregister(self, caller: Principal, name: str = "") -> None:
        """Remove one region, or all of the caller's; a missing one is not an error."""
        caller.require(Role.CODE, WHAT)
        for tenant, known in list(self._regions):
            if tenant == caller.tenant and name in ("", known):
                del self._regions[tenant, known]

    def rows(self, caller: Principal, name: str = "") -> list[dict[str, Any]]:
        """Return one region, or all of the caller's.

        Raises:
            NotFound: there is no such name.
        """
        caller.require(Role.CODE, WHAT)
        rows = [
            region.row(known)
            for (tenant, known), region in self._regions.items()
            if tenant == caller.tenant and name in ("", known)
        ]
        if name and not rows:
            raise _unknown(name)
        return rows

    def filled(self, caller: Principal, request: InferRequest) -> InferRequest:
        """Return the request with the bytes of the inputs that lie in regions. Block while reading.

        Raises:
            PermissionDenied, NotFound, InvalidInput, TooLarge: for inputs, and for the outputs'
                places, before the request is computed.
        """
        for one in request.outputs or ():
            if one.place is not None:
                self._find(caller, one.place)
        places = [frame for frame in request.frames if isinstance(frame, RegionPlace)]
        if not places:
            return request
        total = sum(place.size_bytes for place in places)
        if total > self._max_bytes:
            raise TooLarge(f"{total} bytes of shared memory are more than {self._max_bytes}")
        frames = [
            self._read(caller, frame) if isinstance(frame, RegionPlace) else frame
            for frame in request.frames
        ]
        return replace(request, frames=frames)

    def _read(self, caller: Principal, place: RegionPlace) -> memoryview:
        region = self._find(caller, place)
        data = bytearray(place.size_bytes)
        view = memoryview(data)
        at, done = region.offset_bytes + place.offset_bytes, 0
        while done < len(data):
            size = os.preadv(region.descriptor, [view[done:]], at + done)
            if not size:
                raise InvalidInput(f'region "{place.region}" has shrunk: {region.key} ends early')
            done += size
        return view

    def placed(
        self, caller: Principal, request: InferRequest, outputs: Sequence[Output]
    ) -> list[Output]:
        """Write the outputs that were requested in regions, and return them without their data.

        Raises:
            InvalidInput: an output does not fit, or its region cannot be written.
        """
        places = {one.name: one.place for one in request.outputs or () if one.place is not None}
        return [
            self._written(caller, places[output.name], output) if output.name in places else output
            for output in outputs
        ]

    def _written(self, caller: Principal, place: RegionPlace, output: Output) -> Output:
        region, size = self._find(caller, place), len(output.data)
        if size > place.size_bytes:
            raise InvalidInput(
                f'output "{output.name}" has {size} bytes, its shared memory {place.size_bytes}'
            )
        at = region.offset_bytes + place.offset_bytes
        try:
            # Open the same file, even if its name now means another one.
            descriptor = os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size < at + size:
                    raise InvalidInput(f'region "{place.region}" has shrunk')
                done = 0
                while done < size:
                    done += os.pwrite(descriptor, output.data[done:], at + done)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InvalidInput(
                f'region "{place.region}" cannot be written: {error.strerror}'
            ) from None
        return replace(output, data=b"", place=replace(place, size_bytes=size))

    def _find(self, caller: Principal, place: RegionPlace) -> _Region:
        caller.require(Role.CODE, WHAT)
        region = self._regions.get((caller.tenant, place.region))
        if region is None:
            raise _unknown(place.region)
        if place.offset_bytes + place.size_bytes > region.size_bytes:
            raise InvalidInput(
                f"{place.size_bytes} bytes from {place.offset_bytes} are beyond region "
                f'"{place.region}", which has {region.size_bytes}'
            )
        return region


def _open(key: str) -> int:
    """Open a plain file for reading: no link, no device."""
    try:
        descriptor = os.open(f"{FOLDER}/{key.removeprefix('/')}", os.O_RDONLY | _OPEN)
    except OSError as error:
        raise InvalidInput(f"shared memory {key} cannot be read: {error.strerror}") from None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidInput(f"{key} is not shared memory")
        undo.pop_all()
    return descriptor


def _unknown(name: str) -> NotFound:
    return NotFound(
        f'no region "{name[:80]}" of this caller', hint="POST /v2/systemsharedmemory/…/register"
    )
