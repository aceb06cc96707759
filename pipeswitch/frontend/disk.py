"""Disk use of the state directory, in total and by tenant, and its limits.

Programs, uploads and commits count (docs/adr/0021-roles.md). A job has no tenant, so its files
count only in total. Sizes are not recorded but read before each new file, so a removed file no
longer counts, whoever removed it. An unfinished upload's file has its whole size from the start.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Final

from ..base.errors import HostStoreFull
from ..base.units import SizeSpec, format_bytes

FOLDERS: Final = ("models", "uploads", "commits", "published", "jobs", "orphans", "trash")
GIVEN_BACK: Final = ".build-gone-"  # prefix of files and folders that are being removed
PARTIAL: Final = ".part-"  # prefix of unfinished uploads
DIGEST_CHARS: Final = 64  # length of the name of a program's folder
AUTO_SHARE: Final = 0.9  # part of the disk for all clients; the rest is for logs and the journal
AUTO_TENANT_SHARE: Final = 0.5  # part of AUTO_SHARE for one client


class Disk:
    """Budgets of the disk. The loop and the upload writer call it; it never blocks for long."""

    def __init__(self, root: Path, all_of_it: SizeSpec, of_a_tenant: SizeSpec) -> None:
        self._root = root
        self._amounts = (all_of_it, of_a_tenant)
        self._lock = threading.Lock()
        self._programs: dict[str, tuple[str, str]] = {}  # model -> digest, tenant
        self._uploads: dict[str, str] = {}  # file name -> tenant
        self._sizes: dict[str, tuple[int, int]] = {}  # folder of a program -> mtime_ns, bytes

    # ---- owners of files ----------------------------------------------------------------------

    def keep_program(self, model: str, digest: str, tenant: str) -> None:
        """Charge the tenant for a model's program; several tenants may pay for the same one."""
        with self._lock:
            self._programs[model] = (digest, tenant)

    def drop_program(self, model: str) -> None:
        with self._lock:
            self._programs.pop(model, None)

    def digest_of(self, model: str) -> str:
        """Return the digest of a model's program; empty if there is none."""
        with self._lock:
            return self._programs.get(model, ("", ""))[0]

    def digests(self) -> set[str]:
        """Return the digests of the programs that models need."""
        with self._lock:
            return {digest for digest, _ in self._programs.values()}

    def keep_upload(self, file_name: str, tenant: str) -> None:
        """Charge the tenant for an upload from its first byte; other files count only in total."""
        with self._lock:
            self._uploads[file_name] = tenant

    # ---- budgets -----------------------------------------------------------------------------

    def left_bytes(self, tenant: str, program: str = "") -> int:
        """Return the bytes that this tenant may write, below 0 if it is over its limit.

        The owner has only the total limit. Also count the program with the digest ``program``.
        """
        return min(limit - used for _, used, limit in self._budgets(tenant, program))

    def refusal(self, tenant: str, size_bytes: int, what: str) -> HostStoreFull | None:
        """Return the error if ``size_bytes`` more may not be written, else None."""
        for whose, used_bytes, limit_bytes in self._budgets(tenant):
            left_bytes = max(0, limit_bytes - used_bytes)
            if size_bytes > left_bytes:
                of_whom = f'client "{whose}"' if whose else "the server"
                setting = "max_disk_per_client" if whose else "max_disk"
                return HostStoreFull(
                    f"{what} of {format_bytes(size_bytes)} does not fit: programs, uploads and "
                    f"commits of {of_whom} use {format_bytes(used_bytes)} of "
                    f"{format_bytes(limit_bytes)} on its disk",
                    hint="pipeswitch unregister models that are not used (or cancel jobs), or "
                    f"raise [server] {setting}",
                    requested_bytes=size_bytes,
                    largest_free_bytes=left_bytes,
                    tenant=whose,
                )
        return None

    def _budgets(self, tenant: str, program: str = "") -> list[tuple[str, int, int]]:
        """Return (tenant, used bytes, limit in bytes): the total budget, then the tenant's own."""
        all_of_it, of_a_tenant = self._amounts
        total_bytes = shutil.disk_usage(self._root).total
        all_bytes = all_of_it.resolve(total_bytes, int(AUTO_SHARE * total_bytes))
        with self._lock:
            known = dict(self._uploads)
            programs = {digest for digest, owner in self._programs.values() if owner == tenant}
        uploads = {name for name, owner in known.items() if owner == tenant}
        programs.add(program)
        used_bytes = own_bytes = 0
        sizes: dict[str, tuple[int, int]] = {}
        for folder in FOLDERS:
            for path in _entries(self._root / folder):
                size_bytes = self._size_of(path, sizes)
                used_bytes += size_bytes
                is_own = path.name in uploads or path.name in programs
                own_bytes += size_bytes * is_own
                known.pop(path.name, None)
        self._sizes = sizes
        with self._lock:
            for gone in known:
                self._uploads.pop(gone, None)
        budgets = [("", used_bytes, all_bytes)]
        if tenant:
            limit_bytes = of_a_tenant.resolve(all_bytes, int(AUTO_TENANT_SHARE * all_bytes))
            budgets.append((tenant, own_bytes, limit_bytes))
        return budgets

    def _size_of(self, entry: os.DirEntry[str], sizes: dict[str, tuple[int, int]]) -> int:
        """Return the bytes of a file or folder; note a program's folder in ``sizes``. It is read
        again only if it has changed, because reading a thousand takes 40 ms."""
        if len(entry.name) != DIGEST_CHARS:
            return _size(entry)
        try:
            stamp = entry.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0
        before, size_bytes = self._sizes.get(entry.path, (-1, 0))
        sizes[entry.path] = stamp, size_bytes if before == stamp else _size(entry)
        return sizes[entry.path][1]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(GIVEN_BACK)]
    except FileNotFoundError:
        return []


def _size(entry: os.DirEntry[str]) -> int:
    """Return the bytes of a file, or of a folder's files; a file that vanishes counts 0."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return sum(map(_size, _entries(Path(entry.path))))
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
