"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; and that these would speak up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.more
@pytest.mark.timeout(2700)
def test_the_sanitizers_report_the_planted_bugs_and_nothing_else() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), "--self-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
