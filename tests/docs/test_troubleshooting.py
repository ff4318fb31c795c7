"""The messages that docs/troubleshooting.md explains or quotes occur in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import vllm
from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS

from fastattention_vllm.attention.volta.launch import HEAD_SIZES
from fastattention_vllm.integration import compat
from tests.docs.pages import DOCS, ROOT, prose_of

VLLM = Path(vllm.__file__).parent

PAGE = DOCS / "troubleshooting.md"
HEADINGS = re.findall(r"^### (.*)$", PAGE.read_text(), flags=re.MULTILINE)
SYMPTOMS = [symptom for heading in HEADINGS for symptom in re.findall(r"`([^`]+)`", heading)]
BODIES = " ".join(line for line in prose_of(PAGE).splitlines() if not line.startswith("#"))
COMMANDS = ("apt-get ", "fastattention ", "git ", "make ", "pip ", "taskset ", "ulimit ", ".venv/", "--")
"""How code in a sentence begins that is typed. Other code of several words is read in a log."""
QUOTED = [one for one in re.findall(r"`([^`]+)`", BODIES) if re.search(r"[ …]", one) and not one.startswith(COMMANDS)]
SETTINGS = {"host_kv_layers: 0", 'tiling_all_reduce: "auto"'}
OTHERS = {
    "no kernel image is available for execution on the device": "",
    "file too short": "",
    "Failed to infer device type": "config/device.py",
    "Bfloat16 is only supported on GPUs with compute capability of at least 8.0": "platforms/cuda.py",
    "The quantization method … is not supported for the current GPU": "config/vllm.py",
    "Failed to import from vllm._C": "platforms/cpu.py",
    "Triton is not installed": "platforms/cpu.py",
    "is not found in LD_PRELOAD": "v1/worker/cpu_worker.py",
}
"""Messages of other software, and the file of vLLM that has each; "" where it is torch or the system."""


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


def found(symptom: str, among: list[str]) -> bool:
    parts = [re.escape(part.strip()) for part in symptom.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), flags=re.DOTALL)
    return any(pattern.search(text) for text in among)


@pytest.mark.parametrize("symptom", [symptom for symptom in SYMPTOMS if symptom not in OTHERS])
def test_the_code_contains_each_message(symptom: str) -> None:
    assert found(symptom, messages()), f"no message contains {symptom!r}"


@pytest.mark.parametrize("quoted", [one for one in QUOTED if one not in SETTINGS])
def test_the_code_contains_what_the_text_quotes(quoted: str) -> None:
    assert found(quoted, messages()), f"no message contains {quoted!r}"


def test_quotes_are_found_in_the_text() -> None:
    assert len(QUOTED) - len(SETTINGS) >= 4
    assert set(SETTINGS) <= set(QUOTED)


def test_messages_of_other_software_are_in_the_page() -> None:
    assert set(OTHERS) <= set(SYMPTOMS)


@pytest.mark.parametrize("symptom", [symptom for symptom, file in OTHERS.items() if file])
def test_vllm_contains_its_messages(symptom: str) -> None:
    assert found(symptom, texts(VLLM / OTHERS[symptom]))


def test_models_that_do_not_run_in_float16_are_named() -> None:
    names = {"gemma2": "Gemma-2", "gemma3": "Gemma-3", "gemma3_text": "Gemma-3", "glm4": "GLM-4"}
    assert set(_FLOAT16_NOT_SUPPORTED_MODELS) == set(names)
    assert all(name in BODIES for name in names.values())


def test_head_sizes_and_versions_are_the_codes() -> None:
    *first, last = map(str, HEAD_SIZES)
    assert f"head sizes other than {', '.join(first)} and {last} have no kernel" in BODIES
    (oldest, newest) = re.findall(r"Install a vLLM from ([\d.]+\d) to ([\d.]+\d)", BODIES)[0]
    before, after = (
        f"{oldest[:-1]}{int(oldest[-1]) - 1}",
        f"{newest.rpartition('.')[0]}.{int(newest.rpartition('.')[2]) + 1}.0",
    )
    accepted = [compat.SUPPORTED_VLLM.contains(one) for one in (before, oldest, f"{newest}.0", after)]
    assert accepted == [False, True, True, False]
