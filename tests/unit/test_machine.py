"""A machine's free memory, within all cgroups around the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeswitch.base.machine import RETURN_BYTES, RETURN_MAX_S, FreedMemory, available_bytes

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")


@pytest.mark.parametrize(
    ("names", "line", "root"),
    [(V2, "0::/a/b", ""), (V1, "4:memory:/a/b", "memory"), (V1, "3:cpu,memory:/a/b", "memory")],
)
def test_memory_is_bounded_by_every_cgroup_around(
    names: tuple[str, str, str], line: str, root: str, tmp_path: Path
) -> None:
    membership, inner = tmp_path / "self", tmp_path / "groups" / root / "a" / "b"
    membership.write_text(f"1:cpu:/elsewhere\n{line}\n")

    def free_bytes() -> int:
        return available_bytes(tmp_path / "groups", membership)

    free = free_bytes()
    assert free > 100 * MIB
    group(inner, names, str(100 * MIB), 30 * MIB, 10 * MIB)
    assert free_bytes() == 80 * MIB  # pages that cache files count as free
    group(inner.parent, names, str(50 * MIB), 20 * MIB, 0)
    assert free_bytes() == 30 * MIB
    group(inner.parents[1], names, "max", 20 * MIB, 0)
    assert free_bytes() == 30 * MIB
    group(inner, names, str(100 * MIB), 300 * MIB, 0)
    assert free_bytes() == 0


def test_freed_memory_is_given_back_and_looked_for_more_rarely_when_it_is_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, private, attempts = FreedMemory(), [200 * MIB], []
    monkeypatch.setattr(memory, "_own_bytes", 100 * MIB)
    monkeypatch.setattr(memory, "_private_bytes", lambda: private[-1])
    monkeypatch.setattr(memory, "_trim", attempts.append)
    for half_s in range(600):
        memory.give_back(half_s / 2)
    assert 300 / RETURN_MAX_S <= len(attempts) <= 300 / RETURN_MAX_S + 5, "it is in use"
    monkeypatch.setattr(memory, "_trim", lambda _: private.append(100 * MIB + RETURN_BYTES - 1))
    memory.give_back(300.0 + RETURN_MAX_S)
    memory.give_back(400.0)
    assert len(private) == 2, "it was found, and what is left is left to the next request"
    memory.close()
