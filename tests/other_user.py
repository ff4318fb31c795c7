"""Plays another, unprivileged user of the machine. Only root can."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest

NOBODY = 65534

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="not run: playing another user needs root")


def as_another_user(action: Callable[[], object]) -> None:
    """Calls ``action`` as ``nobody`` in a child process and waits for it. Its failure fails the test."""
    assert os.waitstatus_to_exitcode(os.waitpid(_forked(action), 0)[1]) == 0


def _forked(action: Callable[[], object]) -> int:
    """The process in which ``nobody`` calls ``action``."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


@contextlib.contextmanager
def another_user_holds(action: Callable[[], object]) -> Iterator[None]:
    """What ``action`` returns to ``nobody``, such as a socket, is kept until the end of the context."""
    done, tell = os.pipe()

    def hold() -> None:
        held = action()
        os.write(tell, b"1")
        signal.pause()
        del held

    child = _forked(hold)
    os.close(tell)
    try:
        assert os.read(done, 1), "the other user's process failed"
        yield
    finally:
        os.close(done)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
