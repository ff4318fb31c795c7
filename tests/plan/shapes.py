"""The models that the planner is tested with: the folders of shapes/, each with the source of its config.json."""

from __future__ import annotations

from pathlib import Path

from fastattention_vllm.plan.model import ModelShape, read

FOLDER = Path(__file__).parent / "shapes"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def folder(name: str) -> str:
    return str(FOLDER / name)


def shape(name: str) -> ModelShape:
    return read(folder(name))
