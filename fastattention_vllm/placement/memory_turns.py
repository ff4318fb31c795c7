"""Turns of this user's processes: only one of them is between a check of the available memory and its allocation.

All ranks allocate at once, and without turns two of them would count the same free memory. That is all that turns are
for, so a process that cannot get one says so and goes on without: a wait without end would be worse.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from fastattention_vllm.private_folder import open_private, private_folder

NAME = "memory.lock"
WAITING = "memory.waiting"
"""Those who wait share a lock of this file, so that who ends a turn knows of them."""
PATIENCE = 30.0
"""Seconds to wait while nobody's turn begins or ends. A turn takes a second or less, unless its process is stopped."""
SAY_AFTER = 3.0
"""Seconds after which the log says what is waited for."""
LOOK_EVERY = 0.02

Say = Callable[[str], object]


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        self._are_possible = True

    @contextlib.contextmanager
    def one(self, say: Say) -> Iterator[None]:
        """Wait for a turn, which lasts as long as the context. ``say`` is called with a line if that takes long."""
        lock = self._take(say) if self._are_possible else None
        try:
            yield
        finally:
            if lock is not None:
                _release(lock)
                _let_others()

    def _take(self, say: Say) -> int | None:
        """The lock, or None where this process goes on without turns from now on."""
        try:
            folder = private_folder()
            lock = open_private(NAME, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            self._go_on(say, str(error))
            return None
        try:
            if _locked(lock, fcntl.LOCK_EX):
                _begin(lock)
                return lock
            with _noted():
                gone_on = _wait(lock, say)
            if gone_on:
                return lock
            why = (
                f"{_holder(lock)} holds its turn and has made no progress for {PATIENCE:.0f} s; if it is stopped, "
                "continue it or end it"
            )
        except OSError as error:
            why = f"files in {folder} cannot be locked ({error.strerror})"
        os.close(lock)
        self._go_on(say, why)
        return None

    def _go_on(self, say: Say, why: str) -> None:
        self._are_possible = False
        say(f"memory is allocated without waiting for other processes of this user, because {why}")


def _wait(lock: int, say: Say) -> bool:
    """Lock, and leave this process's id in the file. False if that is not possible in time.

    Raises:
        OSError: the file system has no locks.
    """
    began = since = time.monotonic()
    last, said = 0, False
    while not _locked(lock, fcntl.LOCK_EX):
        now = time.monotonic()
        if (changed := os.fstat(lock).st_mtime_ns) != last:
            last, since = changed, now
        if now - since > PATIENCE:
            return False
        if now - began > SAY_AFTER and not said:
            said = True
            say(f"waiting while {_holder(lock)} allocates memory")
        time.sleep(LOOK_EVERY)
    _begin(lock)
    return True


def _begin(lock: int) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    os.utime(lock)


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
    os.close(file)


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Who ends a turn meanwhile lets others be next. Without the file, turns are less fair."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = open_private(WAITING, os.O_RDWR | os.O_CREAT)
            stack.callback(_release, file)
            _locked(file, fcntl.LOCK_SH)
        yield


def _let_others() -> None:
    """Pause if others wait. They look every 20 ms, and who took the next turn at once would always be first."""
    with contextlib.suppress(OSError):
        file = open_private(WAITING, os.O_RDWR | os.O_CREAT)
        try:
            someone_waits = not _locked(file, fcntl.LOCK_EX)
        finally:
            _release(file)
        if someone_waits:
            time.sleep(2 * LOOK_EVERY)


def _holder(lock: int) -> str:
    found = os.pread(lock, 20, 0).split(b"\n")[0]
    return f"process {found.decode()}" if found.isdigit() else "another process"
