"""The tests named in tests/mutations detect each deliberate break, and an undetected break would be reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastattention_vllm.attention.cpu import kernels as cpu
from scripts import mutate

ROOT = Path(__file__).resolve().parents[2]
ENTRY = """
[[mutation]]
name = "a break"
file = "{file}"
text = "{text}"
replacement = "{replacement}"
tests = ["{test}"]
"""
FITS = {
    "file": "fastattention_vllm/attention/cpu/kernels.py",
    "text": "A call runs once per layer",
    "replacement": "",
    "test": "tests/attention/cpu/test_errors.py::test_can_run_gives_the_reason",
}


def write(path: Path, **change: str) -> Path:
    path.write_text(ENTRY.format(**(FITS | change)))
    return path


@pytest.mark.parametrize("path", sorted(mutate.LISTS.rglob("*.toml")), ids=lambda path: path.name)
def test_every_entry_fits_the_code(path: Path) -> None:
    names = [mutation.name for mutation in mutate.read(path)]
    assert len(names) == len(set(names))


def test_every_named_test_exists() -> None:
    """Except for tests of instruction sets that this machine lacks."""
    usable = ("", *cpu.usable_isas())
    mutations = [mutation for path in mutate.LISTS.glob("*.toml") for mutation in mutate.read(path)]
    named = {test for mutation in mutations if mutation.isa in usable for test in mutation.tests}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(named)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"text": "torch"},
            r"'a break': its text occurs \d+ times in fastattention_vllm/attention/cpu/kernels.py, but must occur",
        ),
        ({"text": "no such text"}, "its text occurs 0 times"),
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"replacement": "A call runs once per layer"}, "it names no test, or its replacement equals its text"),
    ],
)
def test_entries_that_do_not_fit_are_refused(change: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(mutate.DoesNotFit, match=message):
        mutate.read(write(tmp_path / "list.toml", **change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no such text", "its text occurs 0 times"),
        (FITS["text"], "names no test, or its replacement equals"),
    ],
)
def test_additional_edits_must_fit_too(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "list.toml")
    also = FITS | {"text": text, "replacement": FITS["text"]}
    lines = [f'{name} = "{also[name]}"' for name in ("file", "text", "replacement")]
    path.write_text(path.read_text() + "\n[[mutation.also]]\n" + "\n".join(lines) + "\n")
    with pytest.raises(mutate.DoesNotFit, match=message):
        mutate.read(path)


@pytest.mark.parametrize(
    ("text", "message"), [("", "no mutation matches"), ("[[mutations]]", "unknown table 'mutations'")]
)
def test_an_empty_list_is_a_failure(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text(text)
    done = run(tmp_path / "list.toml")
    assert done.returncode == 2
    assert message in done.stderr


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.more
def test_a_change_that_breaks_nothing_survives(tmp_path: Path) -> None:
    done = run(write(tmp_path / "list.toml"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a break    SURVIVED" in done.stdout


@pytest.mark.more
def test_a_missing_test_is_a_failure(tmp_path: Path) -> None:
    done = run(write(tmp_path / "list.toml", test="tests/attention/cpu/test_errors.py::test_gone"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "fail even without a mutation" in done.stderr


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_breaks_of_the_kernels_are_detected() -> None:
    """Every fortieth entry of the list. The whole list, which `make mutate` runs, would take 20 minutes."""
    done = run(mutate.LISTS / "kernels.toml", "--jobs", "2", "--every", "40")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.more
def test_a_break_that_does_not_compile_is_not_detected(tmp_path: Path) -> None:
    kernel = {"file": "kernels/volta/src/write_kv.cu", "text": "if (slot < 0) return;", "replacement": "nonsense"}
    test = "tests/kernels/volta/test_attention_kernels.py::test_new_keys_and_values_go_to_their_slots[64]"
    done = run(write(tmp_path / "list.toml", **kernel, test=test))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "UNFIT" in done.stdout
    assert "write_kv.cu does not compile for sm_70" in done.stdout


def test_tests_that_hang_have_failed(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text("import time\n\ndef test() -> None:\n    time.sleep(600)\n")
    copy = object.__new__(mutate.Copy)
    copy.tree, copy.environment = tmp_path, dict(os.environ)
    assert copy.pytest(["test_hangs.py"], timeout=1) == (mutate.FAILED, "")
