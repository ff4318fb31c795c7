"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, which must find planted bugs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.sanitize import SANITIZERS, Sanitizer
from tests.conftest import keep_every

ROOT = Path(__file__).resolve().parents[2]
WORD = re.compile(r"(?<!not )\b(?!and\b|or\b|not\b)\w+")
"""Words of a ``-k`` expression that are not excluded."""


@pytest.mark.full
@pytest.mark.timeout(2700)
def test_the_sanitizers_report_the_planted_bugs_and_nothing_else() -> None:
    """This runs a part of the kernel tests; `make sanitize` runs all of them."""
    command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), "--self-check", "--every", "16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sanitizer", SANITIZERS, ids=lambda one: one.name)
def test_every_named_file_and_word_selects_tests(sanitizer: Sanitizer) -> None:
    """A renamed file or test must not leave the selection empty."""
    options = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run([*options, *sanitizer.tests], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for file in (test for test in sanitizer.tests if test.startswith("tests/")):
        assert file in found
    for word in WORD.findall(sanitizer.tests[-1] if "-k" in sanitizer.tests else ""):
        assert word in found


def test_a_part_has_the_first_case_of_every_test_and_each_value_of_a_parameter() -> None:
    config: Any = SimpleNamespace(
        getoption=lambda name: 5, hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    )
    cases = [f"t.py::grid[{isa}-{size}]" for size in range(100) for isa in ("scalar", "avx2", "avx512", "neon", "amx")]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in ["t.py::one", "t.py::two", *cases]]
    whole, left = list(items), list[Any]()
    keep_every(config, items)
    names = [item.nodeid for item in items]
    assert names[:3] == ["t.py::one", "t.py::two", cases[0]]
    for isa in ("scalar", "avx2", "avx512", "neon", "amx"):
        assert 10 <= sum(f"[{isa}-" in name for name in names) <= 30
    assert sorted(map(id, items + left)) == sorted(map(id, whole))
