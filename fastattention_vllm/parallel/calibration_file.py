"""Measured choices on disk, so that a layer is measured once per machine and not at every start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import stat
from pathlib import Path

from fastattention_vllm.parallel.choice import Choice, Trial

MAX_ROWS = 1 << 30
MOST_BYTES = 16 << 20
"""Of the file. A layer's measurements take less than 4 KiB."""


def read(path: Path, key: str) -> Choice | None:
    """The choice that was saved for ``key``, or None.

    Raises:
        ValueError: the file holds no valid measurements. The message is one sentence.
    """
    try:
        text = _text(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    try:
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise TypeError("it is not a JSON object")
        return _choice(entries[key]) if key in entries else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} holds no valid measurements ({error!r})") from error


def write(path: Path, key: str, choice: Choice) -> None:
    """Add ``choice`` to the file. Readers see either the old or the new file, never a part of it.

    Raises:
        OSError: the disk is full, or there is no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = _entries(path) | {key: dataclasses.asdict(choice)}
    # Users may share the folder: nobody can guess the name, and what has it is neither followed nor waited for.
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(new, "x", encoding="utf-8") as file:
            file.write(json.dumps(entries, indent=1))
        new.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()


def _text(path: Path) -> str:
    """Raises ``OSError`` or ``ValueError`` if it is no text of a regular file. Never waits for another process."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"it has {found.st_size} bytes")
        return file.read(MOST_BYTES).decode()


def _entries(path: Path) -> dict[str, object]:
    try:
        found = json.loads(_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _choice(entry: object) -> Choice:
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} is not an object")
    trials = tuple(_trial(one) for one in entry["trials"])
    rows = [trial.rows for trial in trials]
    if not rows or rows != sorted(set(rows)):
        raise ValueError(f"the row counts of the trials, {rows}, are not in ascending order")
    return Choice(trials)


def _trial(one: dict[str, object]) -> Trial:
    blocks = one["blocks"]
    if not isinstance(blocks, list) or not blocks:
        raise ValueError(f"{blocks!r} is not a list of blocks")
    if len(blocks) > 1 and not one["collective"]:
        raise ValueError(f"the blocks {blocks!r} have no collective")
    return Trial(
        _count(one["rows"]),
        str(one["collective"]),
        tuple(map(_count, blocks)),
        *(_seconds(one[name]) for name in ("seconds", "plain_seconds", "hideable_seconds")),
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or not 1 <= value <= MAX_ROWS:
        raise ValueError(f"{value!r} is not a number of rows")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)
