"""Host memory that all ranks of one machine share: one segment per rank, in /dev/shm."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
from collections.abc import Callable
from typing import Any

Exchange = Callable[[Any], list[Any]]
"""Sends an object to all ranks of the group and returns the objects of all ranks. All ranks must call it."""

FOLDER = "/dev/shm"


def share(size: int, exchange: Exchange) -> list[mmap.mmap]:
    """Each rank's segment of ``size`` zeroed bytes, by rank. Their names in /dev/shm do not outlive this call.

    Raises:
        OSError: /dev/shm is too small, or cannot be used; raised on every rank.
    """
    path, failure = "", ""
    try:
        path = _create(size)
    except OSError as error:
        failure = f"has no room for {size} bytes ({error.strerror}); make it larger (with Docker: --shm-size)"
    try:
        paths = _all_succeed(exchange, path, failure)
        segments: list[mmap.mmap] = []
        try:
            segments = [_open(name, size) for name in paths]
        except OSError as error:
            failure = f"cannot be mapped ({error.strerror or error}); give all ranks the same {FOLDER}"
        _all_succeed(exchange, None, failure)
    finally:
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return segments


def _all_succeed(exchange: Exchange, result: Any, failure: str) -> list[Any]:
    """The results of all ranks, or an error on all of them."""
    answers = exchange((result, failure))
    for rank, (_, failed) in enumerate(answers):
        if failed:
            raise OSError(f"{FOLDER} of rank {rank} {failed}.")
    return [found for found, _ in answers]


def _create(size: int) -> str:
    """The name of a new file of zeros."""
    handle, path = tempfile.mkstemp(prefix="fastattention-", dir=FOLDER)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path


def _open(path: str, size: int) -> mmap.mmap:
    # Where the folder is no tmpfs with a sticky bit, or not the same on all ranks, another user may have the name.
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            raise OSError(f"{path} is not this user's file of {size} bytes")
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
