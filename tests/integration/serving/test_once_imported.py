"""A module is changed when it is imported, and not imported for that."""

from __future__ import annotations

import subprocess
import sys

LATER = """
import sys
from fastattention_vllm.integration.serving.once_imported import once_imported
changed, also = [], []
once_imported("colorsys", changed.append)
once_imported("colorsys", also.append)
assert not changed and "colorsys" not in sys.modules
import colorsys
assert changed == also == [colorsys] and colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
once_imported("colorsys", changed.append)
assert changed == [colorsys, colorsys]
assert "vllm.v1.engine.async_llm" not in sys.modules
"""


def test_a_module_is_patched_when_it_is_imported() -> None:
    subprocess.run([sys.executable, "-c", LATER], check=True)


def test_a_change_is_applied_once() -> None:
    twice = "change = changed.append; once_imported('colorsys', change); once_imported('colorsys', change)"
    text = LATER.split("changed, also")[0] + f"changed = []; {twice}\nimport colorsys\nassert changed == [colorsys]"
    subprocess.run([sys.executable, "-c", text], check=True)
