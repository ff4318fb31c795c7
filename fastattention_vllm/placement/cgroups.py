"""What the control groups of this process let it have: memory and CPU time, of version 2 and version 1.

A limit holds for all groups below it, so this process's own group and every one above it are read, and the tightest
counts. In a container the paths of /proc/self/cgroup may be the host's, of which only the container's own root can be
seen; what cannot be seen is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes the largest multiple of a page for no limit."""


def memory_left(root: Path | None = None) -> int | None:
    """Bytes until a group of this process is full; None without a limit. Page cache that can be dropped is free."""
    root = root or ROOT
    left = [
        _left(group, "memory.max", "memory.current", "inactive_file") for group in _groups(root, "", ("", "unified"))
    ] + [
        _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for group in _groups(root, "memory", ("memory",))
    ]
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def cpus(root: Path | None = None) -> int | None:
    """CPUs whose time this process's groups may spend, rounded up; None without a quota."""
    root = root or ROOT
    quotas = [_quota(*read_text(group / "cpu.max", "max").split()) for group in _groups(root, "", ("", "unified"))]
    quotas += [
        _quota(read_text(group / "cpu.cfs_quota_us", "-1"), read_text(group / "cpu.cfs_period_us", "100000"))
        for group in _groups(root, "cpu", ("cpu", "cpu,cpuacct"))
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def read_text(path: Path, absent: str) -> str:
    """A file of /sys or /proc, stripped, or ``absent``."""
    try:
        return path.read_text().strip()
    except OSError:
        return absent


def _groups(root: Path, controller: str, mounts: tuple[str, ...]) -> Iterator[Path]:
    """Folders of this process's group of ``controller`` ("" for version 2) and of all above it that can be seen.

    ``mounts``: below ``root``, where the hierarchy may be.
    """
    path = _path(controller)
    inner = Path(path.lstrip("/"))
    for mount in mounts:
        if ".." not in inner.parts:
            yield from (root / mount / part for part in (inner, *inner.parents))
        else:  # the group is outside of what this container sees
            yield root / mount


def _path(controller: str) -> str:
    for line in read_text(OWN, "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _left(group: Path, limit_file: str, used_file: str, cache: str) -> int | None:
    limit = _number(read_text(group / limit_file, "max"))
    if limit is None or limit >= NO_LIMIT:
        return None
    used = _number(read_text(group / used_file, "0")) or 0
    # Page cache that the kernel gives back on demand counts as used; without this, a fresh download looks full.
    reclaimable = sum(
        int(line.split()[1])
        for line in read_text(group / "memory.stat", "").splitlines()
        if line.startswith(f"{cache} ")
    )
    return max(0, limit - used + reclaimable)


def _quota(quota: str, period: str = "100000") -> int | None:
    spent, per = _number(quota), _number(period)
    return max(1, -(-spent // per)) if spent is not None and per else None


def _number(text: str) -> int | None:
    """None for "max", -1 and whatever else is no amount."""
    return int(text) if text.isdigit() else None
