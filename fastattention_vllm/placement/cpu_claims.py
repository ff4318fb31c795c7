"""The CPUs that servers of this machine have bound threads to, so that no two servers bind to the same ones.

A server announces each of its CPUs by the name of a socket in Linux's abstract namespace, on which nothing listens.
Linux lists these names to every user, and removes them with the last process that holds them. Containers whose network
is their own do not see each other's names.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

from fastattention_vllm.placement.cgroups import read_text

SERVER = "FASTATTENTION_SERVER"
"""The environment variable with the server's random name, which its processes inherit."""
PREFIX = "fastattention-cpu"
NAMES = Path("/proc/net/unix")

_held: dict[int, socket.socket] = {}


def claim(cpus: Iterable[int], *, shared: bool = False) -> list[int]:
    """Announce ``cpus`` until this process ends, unless other servers have announced some of them.

    Two servers that do this at the same moment may both find the other one, but they never both claim a CPU.

    Args:
        shared: announce them in any case, because the user has chosen them.

    Returns:
        The CPUs that others have announced, ascending. Empty if there are none.
    """
    own = os.environ.setdefault(SERVER, f"{os.getpid()}-{secrets.token_hex(4)}")
    wanted = sorted(set(cpus))
    for cpu in _held.keys() - set(wanted):
        _held.pop(cpu).close()
    for cpu in wanted:
        if cpu not in _held:
            _announce(cpu, own)
    taken = sorted(_announced_by_others(own).intersection(wanted))
    if taken and not shared:
        release()
    return taken


def release() -> None:
    """Take back what this process has announced."""
    while _held:
        _held.popitem()[1].close()


def _announce(cpu: int, server: str) -> None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0{PREFIX}/{cpu}/{server}")
    except OSError:  # another process of this server holds it
        name.close()
    else:
        _held[cpu] = name


def _announced_by_others(own: str) -> set[int]:
    found = set()
    for line in read_text(NAMES, "").splitlines():
        parts = line.rpartition("@")[2].split("/")
        if parts[0] == PREFIX and len(parts) == 3 and parts[1].isdigit() and parts[2] != own:
            found.add(int(parts[1]))
    return found
