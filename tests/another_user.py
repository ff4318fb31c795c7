"""An unprivileged user beside the one who runs the tests, for what any user of a machine can do."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can run a process as another user")


@contextlib.contextmanager
def another_user(act: Callable[[], object], user: int = NOBODY) -> Iterator[None]:
    """Call ``act`` in a process of ``user``, which keeps what it returned until the end of the context.

    ``act`` should only make system calls: the process is forked from this one, which may have threads.
    """
    done, tell = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            held = act()
            os.write(tell, b"1")
            signal.pause()
            del held
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(tell)
    try:
        assert os.read(done, 1), "the other user's process failed"
        yield
    finally:
        os.close(done)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
