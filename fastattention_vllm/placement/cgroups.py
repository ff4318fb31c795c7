"""The limits that control groups (version 1 and 2) set for this process: memory and CPU time.

Version 2 has two limits of memory. Linux ends processes above ``memory.max``, and slows down those above
``memory.high`` until they are of no use. So both count.

A limit applies to all groups below it, so this reads the process's own group and all groups above it, and uses the
tightest limit. In a container, the paths in /proc/self/cgroup may be those of the host, while only the container's own
root is visible. Groups that are not visible are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 reports the largest multiple of a page if there is no limit."""


def memory_left(root: Path | None = None) -> int | None:
    """Bytes until a group of this process is full; None without a limit. Reclaimable page cache counts as free."""
    root = root or ROOT
    left = [
        _left(group, limit, "memory.current", "inactive_file")
        for group in _groups(root, "", ("", "unified"))
        for limit in ("memory.max", "memory.high")
    ] + [
        _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for group in _groups(root, "memory", ("memory",))
    ]
    return min((bytes_left for bytes_left in left if bytes_left is not None), default=None)


def cpus(root: Path | None = None) -> int | None:
    """Number of CPUs that the quotas of this process's groups allow, rounded up; None without a quota."""
    root = root or ROOT
    quotas = [_quota(*read_text(group / "cpu.max", "max").split()) for group in _groups(root, "", ("", "unified"))]
    quotas += [
        _quota(read_text(group / "cpu.cfs_quota_us", "-1"), read_text(group / "cpu.cfs_period_us", "100000"))
        for group in _groups(root, "cpu", ("cpu", "cpu,cpuacct"))
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def read_text(path: Path, absent: str) -> str:
    """The stripped text of a file in /sys or /proc; ``absent`` if it cannot be read.

    Names in it may be anyone's. Bytes that are not UTF-8 become what :func:`os.fsencode` turns back.
    """
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return absent


def _groups(root: Path, controller: str, mounts: tuple[str, ...]) -> Iterator[Path]:
    """The visible folders of this process's group for ``controller`` ("" for version 2) and of all groups above it.

    ``mounts``: possible places of the hierarchy below ``root``.
    """
    path = _path(controller)
    inner = Path(path.lstrip("/"))
    for mount in mounts:
        if ".." not in inner.parts:
            yield from (root / mount / part for part in (inner, *inner.parents))
        else:  # the group is outside this container's view
            yield root / mount


def _path(controller: str) -> str:
    # Not splitlines, which also breaks a group's name at characters that Linux allows there.
    for line in read_text(OWN, "").split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return path
    return "/"


def _left(group: Path, limit_file: str, used_file: str, cache: str) -> int | None:
    limit = _number(read_text(group / limit_file, "max"))
    if limit is None or limit >= NO_LIMIT:
        return None
    used = _number(read_text(group / used_file, "0")) or 0
    # Linux counts reclaimable page cache as used. Without this, memory looks full after a download.
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
    """None for "max", -1 and any other text that is not a number."""
    return int(text) if text.isascii() and text.isdigit() else None
