"""Host memory that all ranks of one machine share: one segment per rank, in /dev/shm."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

Exchange = Callable[[Any], list[Any]]
"""Sends an object to all ranks of the group and returns the objects of all ranks. All ranks must call it."""

FOLDER = "/dev/shm"


def share(size: int, exchange: Exchange) -> list[mmap.mmap]:
    """Each rank's segment of ``size`` zeroed bytes, by rank. Their names in /dev/shm do not outlive this call.

    Raises:
        OSError: /dev/shm is too small; raised on every rank.
    """
    handle, path = tempfile.mkstemp(prefix="fastattention-", dir=FOLDER)
    try:
        failure = None
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            failure = error
        answers = exchange((path, failure is None))
        short = [rank for rank, (_, there) in enumerate(answers) if not there]
        segments = []
        if not short:
            for name, _ in answers:
                other = os.open(name, os.O_RDWR)
                try:
                    segments.append(mmap.mmap(other, size))
                finally:
                    os.close(other)
        exchange(None)  # all have opened all
    finally:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if short:
        raise OSError(
            f"{FOLDER} has no room for {size} bytes on rank {short[0]}; make it larger (with Docker: --shm-size)."
        )
    return segments
