"""The CPUs that servers of this machine compute on, so that no two servers bind threads to the same ones.

Bound threads of two servers on the same CPUs wait for each other. So a server that finds another one on its CPUs binds
nothing, and the other one, which watches for this, unbinds its threads. Linux then shares the CPUs among both.

A server announces each of its CPUs by the name of a socket in Linux's abstract namespace, on which nothing listens.
Linux lists these names to every user, and removes them with the last process that holds them. Containers whose network
is their own do not see each other's names.

Any user can announce any CPU, so only announcements of this user and of root count. Where Linux does not tell whose a
name is (before 5.3, or where netlink is forbidden, as in some containers and systemd units), all count: another user
can then make a server bind nothing, which costs speed. Without that, two servers would bind the same CPUs, which costs
more.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable

from fastattention_vllm.placement import socket_names

SERVER = "FASTATTENTION_SERVER"
"""The environment variable with the server's random name, which its processes inherit."""
PREFIX = "fastattention-cpu"
ANNOUNCED = re.compile(rf"\0{PREFIX}/([0-9]{{1,7}})/([^/]+)".encode(), re.DOTALL)
LOOK_EVERY = 2.0
"""Seconds."""

_held: dict[int, socket.socket] = {}
_watcher: threading.Thread | None = None


def claim(cpus: Iterable[int]) -> list[int]:
    """Announce ``cpus`` until this process ends. Returns those that other servers have announced too, ascending.

    Two servers that do this at the same moment may both find the other one, but one of them does in any case.
    """
    own = os.environ.setdefault(SERVER, f"{os.getpid()}-{secrets.token_hex(4)}")
    wanted = sorted(set(cpus))
    for cpu in _held.keys() - set(wanted):
        _held.pop(cpu).close()
    for cpu in wanted:
        if cpu not in _held:
            _announce(cpu, own)
    return others_on(wanted)


def others_on(cpus: Iterable[int]) -> list[int]:
    """Those of ``cpus`` that other servers of this user or of root have announced, ascending."""
    return sorted({cpu for cpu, owner in _announced_by_others() if owner in _believed()}.intersection(cpus))


def announced_by_other_users(cpus: Iterable[int]) -> list[int]:
    """Those of ``cpus`` that only other users have announced, ascending. They may not compute there at all."""
    announced = {cpu for cpu, owner in _announced_by_others() if owner not in _believed()}
    return sorted(announced.intersection(cpus).difference(others_on(cpus)))


def unbind_beside_others(bound: Iterable[int], everywhere: Iterable[int], say: Callable[[list[int]], object]) -> None:
    """Let this process's threads run ``everywhere`` as soon as another server announces one of the ``bound`` CPUs.

    ``say`` is called with the CPUs in common, once. A process has one watcher; further calls change nothing.
    """
    global _watcher
    if _watcher is not None and _watcher.is_alive():
        return
    watched, allowed = list(bound), set(everywhere)

    def watch() -> None:
        # Seen twice: a server that is refused at its start, or ends, must not unbind this one.
        common: list[int] = []
        before: list[int] = []
        while not (common and before):
            time.sleep(LOOK_EVERY)
            common, before = others_on(watched), common
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), allowed)
        say(common)

    _watcher = threading.Thread(target=watch, name="fastattention-watch", daemon=True)
    _watcher.start()


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


def _believed() -> set[int | None]:
    """Owners whose announcements count. None: Linux does not tell."""
    return {os.geteuid(), 0, None}


def _announced_by_others() -> set[tuple[int, int | None]]:
    """CPUs with the user ids of those who announced them."""
    own = os.fsencode(os.environ.get(SERVER, ""))
    found = ((ANNOUNCED.fullmatch(name), owner) for name, owner in socket_names.names())
    return {(int(match[1]), owner) for match, owner in found if match and match[2] != own}
