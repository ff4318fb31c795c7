"""The tests mirror the repository: the folder of a module's tests has the name of the module's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import DEVICES

ROOT = Path(__file__).resolve().parents[1]
NOT_MIRRORED = {*DEVICES, "cluster", "conformance", "packaging", "recipes", "server"}
"""Folders without a counterpart, besides devices: upstream's suites, the wheel as users install it, the recipes for
contributors, and servers as users start them, on one machine or on several.
"""
NAMED_AFTER_MODULES = {
    "tests/bench": "fastattention_vllm/bench",
    "tests/benchmarks": "benchmarks",
    "tests/scripts": "scripts",
}


def mirrored(folder: Path) -> list[str]:
    inside = folder.relative_to(ROOT / "tests")
    return [str(place) for place in (Path("fastattention_vllm") / inside, inside) if (ROOT / place).is_dir()]


def test_every_test_folder_mirrors_a_folder_of_the_repository() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    lost = {
        str(folder.relative_to(ROOT))
        for folder in folders
        if folder.relative_to(ROOT / "tests").parts[0] not in NOT_MIRRORED and not mirrored(folder)
    }
    assert not lost


@pytest.mark.parametrize("folder", NAMED_AFTER_MODULES)
def test_test_files_are_named_after_modules(folder: str) -> None:
    modules = {path.stem for path in (ROOT / NAMED_AFTER_MODULES[folder]).iterdir()}
    lost = {path.name for path in (ROOT / folder).glob("test_*.py") if path.stem.removeprefix("test_") not in modules}
    assert not lost


def test_every_device_has_a_marker(pytestconfig: pytest.Config) -> None:
    registered = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert set(DEVICES) <= registered
