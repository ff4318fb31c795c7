"""A control group with a memory limit, for processes that a test starts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastattention_vllm.placement import cgroups


@dataclass(frozen=True)
class Limited:
    folder: Path

    def enter(self) -> None:
        """Move the calling process into the group. For ``preexec_fn``."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def times_full(self) -> int:
        """How often Linux ended a process of the group for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            for line in cgroups.read_text(self.folder / name, "").splitlines():
                word, number = line.split()
                if word == "oom_kill":
                    return int(number)
        raise AssertionError(f"{self.folder} does not count ended processes")


def parent() -> Path | None:
    """A group in which this process may create groups with a memory limit; None if there is none."""
    for controller, mounts, limit in (
        ("memory", ("memory",), "memory.limit_in_bytes"),
        ("", ("", "unified"), "memory.max"),
    ):
        for group in cgroups._groups(cgroups.ROOT, controller, mounts):
            with contextlib.suppress(OSError), one_below(group) as folder:
                if (folder / limit).exists():
                    return group
    return None


@contextlib.contextmanager
def one_below(group: Path) -> Iterator[Path]:
    folder = group / f"fastattention-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 30
        # A group with processes, even ended ones that nobody has waited for, cannot be removed.
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        folder.rmdir()


@contextlib.contextmanager
def limited_to(size: int) -> Iterator[Limited]:
    """A group that may use ``size`` bytes. All of its processes must have ended at the end."""
    group = parent()
    assert group is not None
    with one_below(group) as folder:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (folder / name).exists():
                (folder / name).write_text(str(size))
        yield Limited(folder)
