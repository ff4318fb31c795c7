"""The messages that docs/troubleshooting.md explains occur in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

HEADINGS = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
SYMPTOMS = [symptom for heading in HEADINGS for symptom in re.findall(r"`([^`]+)`", heading)]
OTHERS = {
    "no kernel image is available for execution on the device": "torch",
    "Failed to infer device type": "vLLM",
    "Bfloat16 is only supported on GPUs with compute capability of at least 8.0": "vLLM",
    "The quantization method … is not supported for the current GPU": "vLLM",
}
"""Messages of other software."""


@cache
def messages() -> list[str]:
    """String literals of the package and of scripts, with … in place of each inserted value."""
    files = [*(ROOT / "fastattention_vllm").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    return [text for file in files for text in texts(file)]


def texts(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found


@pytest.mark.parametrize("symptom", [symptom for symptom in SYMPTOMS if symptom not in OTHERS])
def test_the_code_contains_each_message(symptom: str) -> None:
    parts = [re.escape(part.strip()) for part in symptom.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), flags=re.DOTALL)
    assert any(pattern.search(text) for text in messages()), f"no message contains {symptom!r}"


def test_messages_of_other_software_are_in_the_page() -> None:
    assert set(OTHERS) <= set(SYMPTOMS)
