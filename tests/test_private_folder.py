"""The folder for files that this user's processes share, beside another user who was there first."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastattention_vllm.private_folder import open_private, private_folder
from tests.other_user import NOBODY, as_another_user, needs_another_user


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of all users, as /tmp is. Not pytest's, into which other users cannot look."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield folder


def test_the_folder_is_for_this_user_alone(shared: Path) -> None:
    folder = private_folder()
    assert folder.parent == shared
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder() == folder


def test_the_folder_is_in_the_users_runtime_folder(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert private_folder() == tmp_path / "fastattention"


@pytest.mark.parametrize("runtime", ["", "missing", "open"])
def test_a_runtime_folder_that_others_may_use_is_not_used(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """XDG_RUNTIME_DIR outlives the session that it belongs to, and su keeps the other user's."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime and str(tmp_path / runtime))
    assert private_folder().parent == shared


def test_a_folder_that_is_open_to_others_is_refused(shared: Path) -> None:
    private_folder().chmod(0o770)
    with pytest.raises(OSError, match=r"fastattention-\d+ is open to other users \(mode 0770\); remove it"):
        private_folder()


def test_a_link_is_refused(shared: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (shared / f"fastattention-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is not a folder; remove it"):
        private_folder()


def test_a_temporary_folder_that_cannot_be_written_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared / "missing"))
    with pytest.raises(OSError, match=r"cannot be created .*; set TMPDIR to a folder of this user"):
        private_folder()


def test_the_variable_that_chose_the_folder_is_named(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "fastattention").symlink_to(shared)
    with pytest.raises(OSError, match="remove it, or set XDG_RUNTIME_DIR to another folder of this user"):
        private_folder()

    def full(path: Path, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match=r"\(No space left on device\); set XDG_RUNTIME_DIR to a folder of this user"):
        private_folder()


@needs_another_user
def test_another_users_folder_is_refused(shared: Path) -> None:
    name = shared / f"fastattention-{os.geteuid()}"
    as_another_user(lambda: name.mkdir(mode=0o700))
    with pytest.raises(OSError, match=f"belongs to user {NOBODY}, not to user 0; remove it, or set TMPDIR to another"):
        private_folder()


@needs_another_user
def test_another_user_can_neither_look_nor_write_into_the_folder(shared: Path) -> None:
    folder = private_folder()
    os.close(open_private("file", os.O_RDWR | os.O_CREAT))

    def look() -> None:
        for forbidden in (lambda: os.listdir(folder), lambda: os.open(folder / "file", os.O_RDONLY)):
            with pytest.raises(PermissionError):
                forbidden()
        with pytest.raises(PermissionError):
            os.mkfifo(folder / "other")

    as_another_user(look)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT])
def test_a_fifo_is_refused_without_waiting(shared: Path, flags: int) -> None:
    os.mkfifo(private_folder() / "file")
    with pytest.raises(OSError, match=r"is not a regular file|No such device or address"):
        open_private("file", flags)


def test_a_file_is_opened_and_a_link_is_not(shared: Path) -> None:
    descriptor = open_private("file", os.O_WRONLY | os.O_CREAT)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    (private_folder() / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        open_private("link", os.O_RDONLY)


@needs_another_user
def test_another_users_file_is_refused(shared: Path) -> None:
    os.close(open_private("file", os.O_WRONLY | os.O_CREAT))
    os.chown(private_folder() / "file", NOBODY, NOBODY)
    with pytest.raises(OSError, match="is not a regular file of user 0"):
        open_private("file", os.O_RDONLY)
