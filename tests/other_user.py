"""Plays another, unprivileged user of the machine. Only root can."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

NOBODY = 65534

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="not run: playing another user needs root")


def as_another_user(action: Callable[[], object]) -> None:
    """Calls ``action`` as ``nobody`` in a child process and waits for it. Its failure fails the test."""
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
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
