"""A folder for files that this user's processes share, which no other user can write or read.

Names in the shared temporary folder can be guessed, so another user may be there first: with a file that never ends, a
lock that is never released, or a link. In this folder only this user creates names.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """The folder, created if missing: in XDG_RUNTIME_DIR if that is this user's alone, else in the temporary folder.

    Raises:
        OSError: something else has its name, or it cannot be created. The text says which, and what to do.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_absolute() and not _why_not_private(Path(runtime)):
        where, folder = "XDG_RUNTIME_DIR", Path(runtime) / "fastattention"
    else:
        where, folder = "TMPDIR", Path(tempfile.gettempdir()) / f"fastattention-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise OSError(
            f"{folder} cannot be created ({error.strerror}); set {where} to a folder of this user that can be written"
        ) from error
    if why := _why_not_private(folder):
        raise OSError(f"{folder} {why}; remove it, or set {where} to another folder of this user")
    return folder


def open_private(name: str, flags: int) -> int:
    """A descriptor of the regular file ``name`` in :func:`private_folder`, opened with ``flags``; never waits.

    Links are not followed. With O_CREAT, the file is for this user alone.

    Raises:
        OSError: there is no such file, it is of another type or another user's, or there is no private folder.
    """
    path = private_folder() / name
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file of user {os.geteuid()}")
    return descriptor


def _why_not_private(path: Path) -> str:
    """What stands against ``path`` as a folder of this user alone; empty if nothing does."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""
