from __future__ import annotations

import os
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

import tests.environment  # noqa: F401  copies the environment as it is now

TESTS = Path(__file__).parent
DEVICES = ("gpu", "ascend")
"""Test folders that concern one device, with their markers."""

# Engines run in this process, without a spawned engine core, so that tests see errors where they happen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# The same examples every time, so that only a change can make a run fail. HYPOTHESIS_PROFILE=search looks for new
# examples.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, help="Of each parametrised test the first case and one in so many others."
    )


@pytest.hookimpl(tryfirst=True)  # -m selects by markers after this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the longest time limits begin first, so that neither of two processes runs one alone at the end."""
    mark_devices(items)
    keep_every(config, items)
    longest: defaultdict[str, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            longest[str(item.path)] = max(longest[str(item.path)], limit.args[0])
    items.sort(key=lambda item: -longest[str(item.path)])


def mark_devices(items: list[pytest.Item]) -> None:
    """Tests in a device's folder get its marker: `pytest -m "not gpu and not ascend"` leaves them out."""
    for item in items:
        device = item.path.relative_to(TESTS).parts[0]
        if device in DEVICES:
            item.add_marker(device)


def keep_every(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one in so many tests, chosen by checksums of their names; counting would always pick the same parameter."""
    every = config.getoption("--every")
    first: set[str] = set()
    kept, left = [], []
    for item in items:
        function = item.nodeid.split("[")[0]
        chosen = function not in first or zlib.crc32(item.nodeid.encode()) % every == 0
        (kept if chosen else left).append(item)
        first.add(function)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)
