"""Two machines on one: Linux namespaces with separate networks, processes, host names and shared memory.

A cable (a veth pair) connects the two, and nothing else reaches them: what listens in there cannot be reached from this
machine or from others. Files are shared. So a test talks to a server in there through a Unix socket.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.environment import USER_ENVIRONMENT

LIFETIME_S = 3000
"""A machine ends itself if the tests were killed."""
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
"""As Debian writes it: the machine's own name resolves to an address that no other machine reaches."""
BOOT = """
set -eu
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
echo booted
exec sleep {lifetime}
"""
NEW = ("--net", "--uts", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child=SIGKILL")


@dataclass
class Machine:
    name: str
    address: str
    cpu: int
    """Its only CPU, among those of this machine."""
    init: psutil.Process
    """Process 1 of this machine. When it ends, so do all others in there."""
    home: Path

    def command(self, words: Sequence[str]) -> list[str]:
        enter = ["nsenter", f"--target={self.init.pid}", "--user", "--net", "--uts", "--pid", "--mount"]
        return [*enter, "--", "taskset", "--cpu-list", str(self.cpu), *words]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return USER_ENVIRONMENT | {"HOME": str(self.home), "RAY_USAGE_STATS_ENABLED": "0"} | (more or {})

    def start(self, words: Sequence[str], log: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(words), env=self.environment(more), stdout=output, stderr=subprocess.STDOUT
            )

    def run(self, words: Sequence[str], more: Mapping[str, str] | None = None, timeout: float = 120) -> str:
        done = subprocess.run(
            self.command(words),
            env=self.environment(more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """Those of this machine that are not zombies, without process 1."""
        space = os.readlink(f"/proc/{self.init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == space and process != self.init
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def shared_memory(self) -> set[str]:
        """Names in this machine's /dev/shm."""
        return {path.name for path in Path("/proc", str(self.init.pid), "root", "dev", "shm").iterdir()}


def missing() -> str:
    """Why this machine cannot hold two others; empty if it can."""
    for program in ("unshare", "nsenter", "ip", "taskset"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    tried = subprocess.run(["unshare", "--user", "--map-root-user", *NEW, "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this system does not let a user create namespaces"


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    with contextlib.ExitStack() as stack:
        first = boot("node1", "10.77.0.1", folder, ["unshare", "--user", "--map-root-user", *NEW], stack)
        inside = ["nsenter", f"--target={first.init.pid}", "--user", "--", "unshare", *NEW]
        second = boot("node2", "10.77.0.2", folder, inside, stack)
        first.run(["ip", "link", "add", "cable", "type", "veth", "peer", "name", "end"])
        # Process ids are those of this machine, so the cable is laid from outside.
        enter = ["nsenter", f"--target={first.init.pid}", "--user", "--net", "--"]
        subprocess.run([*enter, "ip", "link", "set", "end", "netns", str(second.init.pid)], check=True)
        for machine, end in ((first, "cable"), (second, "end")):
            machine.run(["ip", "addr", "add", f"{machine.address}/24", "dev", end])
            machine.run(["ip", "link", "set", end, "up"])
            machine.run(["ip", "route", "add", "default", "dev", end])
        yield first, second


def boot(name: str, address: str, folder: Path, prefix: list[str], stack: contextlib.ExitStack) -> Machine:
    home = folder / name
    home.mkdir()
    hosts = home / "hosts"
    hosts.write_text(HOSTS.format(name=name))
    script = BOOT.format(name=name, hosts=hosts, lifetime=LIFETIME_S)
    process: Any = stack.enter_context(subprocess.Popen([*prefix, "bash", "-c", script], stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout.readline() == b"booted\n"
    (init,) = [child for child in descendants(process.pid) if child.name() == "sleep"]
    cpus = sorted(os.sched_getaffinity(0))
    return Machine(name, address, cpus[int(name[-1]) % len(cpus)], init, home)


def descendants(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        if any(child.name() == "sleep" for child in found):
            return found
        time.sleep(0.05)
    raise AssertionError("process 1 did not start")
