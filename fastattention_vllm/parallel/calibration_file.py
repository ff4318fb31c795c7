"""Measured choices on disk, so that a server measures each layer once on a machine and not at every start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from fastattention_vllm.parallel.choice import Choice, Trial


def read(path: Path, key: str) -> Choice | None:
    """What was written for ``key``; None if nothing was, or the file is not one of ours."""
    entry = _entries(path).get(key)
    try:
        return _choice(entry) if entry is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def write(path: Path, key: str, choice: Choice) -> None:
    """Keep ``choice`` next to what is there. Readers see the old file or the new one, never a part.

    Raises:
        OSError: there is no room, or no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = _entries(path) | {key: dataclasses.asdict(choice)}
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(entries, indent=1))
        new.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()


def _entries(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _choice(entry: object) -> Choice:
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} is no choice")
    return Choice(
        tuple(
            Trial(
                int(one["rows"]),
                str(one["collective"]),
                tuple(int(rows) for rows in one["blocks"]),
                *(float(one[name]) for name in ("seconds", "plain_seconds", "hideable_seconds")),
            )
            for one in entry["trials"]
        )
    )
