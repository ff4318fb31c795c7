"""Processes allocate memory in turns, and none of them can keep the others waiting for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastattention_vllm.placement import host_memory, memory_turns
from fastattention_vllm.placement.memory_turns import NAME, Turns
from fastattention_vllm.private_folder import open_private
from tests.other_user import NOBODY, as_another_user, needs_another_user

MIB = 1 << 20


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of all users, as /tmp is, and no turn taken in this process."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(host_memory, "TURNS", Turns())
        monkeypatch.setattr(memory_turns, "PATIENCE", 0.5)
        monkeypatch.setattr(memory_turns, "SAY_AFTER", 0.1)
        yield Path(name)


def allocated() -> list[str]:
    """What is said while two pieces of memory are allocated."""
    said: list[str] = []
    for _ in range(2):
        memory, _ = host_memory.commit(MIB, say=said.append)
        assert len(memory) == MIB
    return said


def test_a_turn_ends() -> None:
    assert allocated() == []
    assert Turns()._take(pytest.fail) is not None


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that was stopped, as by Ctrl-Z, in its turn."""
    child = os.fork()
    if child == 0:
        with Turns().one(print):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    go_on = threading.Timer(10, os.kill, (child, signal.SIGCONT))  # a wait without end is a failure, too
    go_on.start()
    yield child
    go_on.cancel()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_stopped_process_is_not_waited_for_without_end(stopped: int) -> None:
    """And only once: a model's host layers allocate many pieces."""
    began = time.monotonic()
    said = allocated()
    assert time.monotonic() - began < 2 * memory_turns.PATIENCE + 1
    assert said == [
        f"waiting while process {stopped} allocates memory",
        "memory is allocated without waiting for other processes of this user, because "
        f"process {stopped} holds its turn and has made no progress for 0 s; if it is stopped, continue it or end it",
    ]


def test_processes_that_go_on_are_waited_for() -> None:
    """Many turns take longer together than one may."""
    lock = open_private(NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def go_on() -> None:
        for _ in range(15):
            time.sleep(0.1)
            os.utime(lock)
        os.close(lock)

    other = threading.Thread(target=go_on)
    other.start()
    said = allocated()
    assert not other.is_alive()
    other.join()
    assert said == ["waiting while another process allocates memory"]


def test_who_takes_turn_after_turn_does_not_keep_others_waiting() -> None:
    """A process that locks again at once would beat one that looks every 20 ms, for seconds."""
    began = time.monotonic()
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            turns = Turns()
            while time.monotonic() < began + 6:
                with turns.one(str):
                    time.sleep(0.05)
            os._exit(0)
        children.append(child)
    time.sleep(0.3)
    turns = Turns()
    for _ in range(6):
        with turns.one(str):
            pass
    took = time.monotonic() - began
    for child in children:
        os.waitpid(child, 0)
    assert took < 5


def test_nobody_pauses_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_turns.time, "sleep", lambda seconds: pytest.fail("a pause"))
    for _ in range(3):
        with Turns().one(pytest.fail):
            pass


def test_who_waits_for_memory_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PATIENCE", 10.0)
    looked = threading.Event()
    there = [0]

    def look() -> int:
        looked.set()
        return there[0]

    monkeypatch.setattr(host_memory, "available_bytes", look)
    waiting = threading.Thread(target=allocated)
    waiting.start()
    assert looked.wait(10)
    with Turns().one(pytest.fail):
        there[0] = 100 << 30
    waiting.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(number: int, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without -o flock, and NFS without its lock server."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (said,) = allocated()
    assert said.endswith(
        f"because files in {shared}/fastattention-{os.geteuid()} cannot be locked ({os.strerror(number)})"
    )


@needs_another_user
def test_another_user_who_was_first_is_not_waited_for(shared: Path) -> None:
    def be_first() -> None:
        (shared / "fastattention-0").mkdir(0o777)
        os.mkfifo(shared / "fastattention-0" / NAME, 0o666)

    as_another_user(be_first)
    (said,) = allocated()
    assert f"{shared}/fastattention-0 belongs to user {NOBODY}, not to user 0; remove it" in said
