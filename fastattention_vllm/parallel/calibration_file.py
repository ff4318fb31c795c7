"""Measured pipelines on disk, so that a server measures each layer once on a machine and not at every start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

from fastattention_vllm.parallel.pipeline import Pipeline, Times


def read(path: Path, key: str) -> Pipeline | None:
    """What was written for ``key``; None if nothing was, or the file is not one of ours."""
    entry = _entries(path).get(key)
    try:
        return _pipeline(entry) if entry is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def write(path: Path, key: str, pipeline: Pipeline) -> None:
    """Keep ``pipeline`` next to what is there. Readers see the old file or the new one, never a part.

    Raises:
        OSError: there is no room, or no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = _entries(path) | {key: dataclasses.asdict(pipeline)}
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


def _pipeline(entry: object) -> Pipeline:
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} is no pipeline")
    matmul, all_reduce = (
        Times(tuple((int(rows), float(seconds)) for rows, seconds in entry[lane]["points"]))
        for lane in ("matmul", "all_reduce")
    )
    return Pipeline(matmul, all_reduce, float(entry["matmul_slowdown"]), float(entry["all_reduce_slowdown"]))
