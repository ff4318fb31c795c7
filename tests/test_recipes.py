"""CONTRIBUTING.md and docs/architecture.md name only existing things, and following the recipe "add a device" works.

The files that the recipe adds are in tests/recipes/device/fastattention_vllm, for a dummy device whose tensors are on
the host. The rows that it adds are in tests/recipes/device/overlay.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

import fastattention_vllm
from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention import kernels
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration import claims, compat, plugin
from tests import test_arrows
from tests.attention import oracle, test_families
from tests.attention.families import FEATURES, UnderTest
from tests.attention.oracle import Case
from tests.attention.test_functional import batch, varlen
from tests.attention.test_kernels import FIELDS, read_by
from tests.integration.test_claims import not_its_own
from tests.recipes.device import overlay

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CONTRIBUTING.md", "docs/architecture.md")
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
MAX_LINES = 250
"""Maximum length of CONTRIBUTING.md, so that newcomers read it."""
PLACEHOLDERS = {"DEVICE", "VERSION"}
SUFFIXES = {"py", "md", "toml", "json", "txt", "h", "cpp", "cu", "cuh", "yaml"}
RECIPES = ("Add a device", "Add a kernel feature", "Add a vLLM version")
NEW_FILES = {
    "attention/dummy.py": "fastattention_vllm.attention.dummy",
    "integration/dummy/__init__.py": "fastattention_vllm.integration.dummy",
    "integration/dummy/backend.py": "fastattention_vllm.integration.dummy.backend",
}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def named_paths(text: str) -> set[str]:
    """Quoted or linked text that looks like a file or folder of this repository."""
    found = {one.split("::")[0] for one in quoted(text)} | set(re.findall(r"\]\(([^)#:]+)[)#]", text))
    return {
        one
        for one in found
        if re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)*/?", one) and ("/" in one or one.rpartition(".")[2] in SUFFIXES)
    }


def exists(path: str, page: str) -> bool:
    """Whether the path exists from the root, from the package, or beside the page. A placeholder matches any name."""
    pattern = re.sub("|".join(PLACEHOLDERS), "*", path.rstrip("/"))
    folders = (ROOT, ROOT / "fastattention_vllm", (ROOT / page).parent)
    return any(any(folder.glob(pattern)) for folder in folders)


def named_tests(text: str) -> set[str]:
    return {one for one in quoted(text) if "::" in one}


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.exists():
        return False
    functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    return name in functions


def steps(recipe: str) -> list[str]:
    """The numbered steps of a recipe."""
    section = TEXTS["CONTRIBUTING.md"].split(f"### {recipe}\n")[1].split("\n### ")[0]
    found = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert found, recipe
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    paths = named_paths(TEXTS[page])
    assert len(paths) > 30
    assert sorted(path for path in paths if not exists(path, page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_test_exists(page: str) -> None:
    tests = named_tests(TEXTS[page])
    assert len(tests) > 3
    assert sorted(test for test in tests if not is_there(test)) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {one.split()[1] for one in quoted(TEXTS[page]) if one.startswith("make ")}
    assert named <= targets


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`attention/nowhere.py`", {"attention/nowhere.py"}),
        ("see `nowhere/`", {"nowhere/"}),
        ("[page](docs/nowhere.md#part)", {"docs/nowhere.md"}),
        ("`tests/test_nowhere.py::test_it`", {"tests/test_nowhere.py"}),
    ],
)
def test_a_path_that_does_not_exist_is_detected(text: str, found: set[str]) -> None:
    assert named_paths(text) == found
    assert not any(exists(path, "CONTRIBUTING.md") for path in found)


def test_a_test_that_does_not_exist_is_detected() -> None:
    assert named_tests("Test: `tests/test_arrows.py::test_nothing`") == {"tests/test_arrows.py::test_nothing"}
    assert not is_there("tests/test_arrows.py::test_nothing")
    assert not is_there("tests/test_nowhere.py::test_nothing")


def sources() -> str:
    folders = (ROOT / "fastattention_vllm", ROOT / "kernels")
    return "\n".join(
        path.read_text()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix.removeprefix(".") in SUFFIXES
    )


def test_the_words_of_the_glossary_are_in_the_code() -> None:
    rows = [line for line in TEXTS["docs/architecture.md"].split("## Glossary\n")[1].splitlines() if line[:1] == "|"]
    names = {name for row in rows[2:] for name in quoted(row.split("|")[3]) if name.isidentifier()}
    assert len(rows) > 25
    assert len(names) > 15
    code = set(re.findall(r"\w+", sources()))
    assert sorted(names - code) == []


def test_contributing_is_short() -> None:
    assert len(TEXTS["CONTRIBUTING.md"].splitlines()) < MAX_LINES


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_step_names_a_file_and_a_test(recipe: str) -> None:
    for step in steps(recipe):
        assert re.match(r"`[\w./]+`", step), step
        assert re.search(r"^ *Test: `(tests/|make )", step, re.MULTILINE), step


def test_the_code_map_lists_the_allowed_imports() -> None:
    """Its last column equals what tests/test_arrows.py allows."""
    section = TEXTS["CONTRIBUTING.md"].split("## Code map\n")[1].split("\nThese are in")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    found = {quoted(row[0])[0].removesuffix("/").removesuffix(".py"): set(quoted(row[3])) for row in rows[2:]}
    package = fastattention_vllm.__name__
    assert found == {unit: others for unit, others in test_arrows.MAY_IMPORT.items() if unit != package}


# The recipe "add a device", followed.


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Follow steps 1 to 5 in this process."""
    for parent in overlay.PARENTS:
        monkeypatch.setattr(parent, "__path__", parent.__path__)
    monkeypatch.setattr(kernels, "FAMILIES", overlay.families())
    monkeypatch.setattr(compat, "BACKENDS", overlay.backends())
    overlay.add_files()
    try:
        yield importlib.import_module("fastattention_vllm.attention.dummy")
    finally:
        for name in NEW_FILES.values():
            sys.modules.pop(name, None)
        for parent in overlay.PARENTS:
            vars(parent).pop("dummy", None)


def backend() -> Any:
    return importlib.import_module("fastattention_vllm.integration.dummy.backend")


def test_the_dummy_device_changes_only_what_the_recipe_lists() -> None:
    package = "fastattention_vllm/"
    firsts = [(quoted(step)[0], "(new)" in step.splitlines()[0]) for step in steps("Add a device")]
    new = {path.replace("DEVICE", "dummy") for path, is_new in firsts if is_new and path.startswith(package)}
    changed = {path for path, is_new in firsts if not is_new and path.startswith(package)}
    files = {path.relative_to(overlay.FILES.parent).as_posix() for path in overlay.FILES.rglob("*.py")}
    assert files == new == {package + path for path in NEW_FILES}
    tables = {"FAMILIES": kernels, "BACKENDS": compat}
    assert changed == {Path(str(module.__file__)).relative_to(ROOT).as_posix() for module in tables.values()}
    assert len(new | changed) == 5
    named = {word for step in steps("Add a device") for word in quoted(step)}
    assert set(tables) <= named
    assert all(hasattr(module, name) for name, module in tables.items())


CASES = {
    "causal, pages": Case((5, 1, 33), (40, 17, 33)),
    "contiguous": Case((5, 0, 70), (30, 9, 70), page_size=0, causal=False),
    "window": Case((3, 20), (50, 20), window=(7, -1)),
    "both sides": Case((9, 20), (9, 20), page_size=0, causal=False, window=(4, 2)),
    "grouped queries, fp16, padding": Case((4, 1), (21, 30), num_heads=8, dtype=torch.float16, padding=3),
    "more queries than keys": Case((9,), (4,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_dummy_kernels_equal_the_oracle(name: str, dummy: ModuleType) -> None:
    problem = CASES[name].build()
    assert dummy.can_run(problem) is None
    out, lse = dummy.run(problem, return_lse=True)
    oracle.assert_matches(problem, out, lse, oracle.attention(problem))


def test_the_public_functions_run_on_the_dummy_device(dummy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[AttentionProblem] = []
    run = dummy.run
    monkeypatch.setattr(dummy, "run", lambda problem, **named: computed.append(problem) or run(problem, **named))
    case = CASES["causal, pages"]
    out, lse, _ = fast_attn_varlen_func(**varlen(case), return_attn_probs=True)
    problem = case.build()
    oracle.assert_matches(problem, out, lse.T, oracle.attention(problem))
    q, k, v = batch()
    found = fast_attn_func(q, k, v, causal=True)
    monkeypatch.undo()
    torch.testing.assert_close(found, fast_attn_func(q, k, v, causal=True), rtol=1e-5, atol=2e-6)
    assert len(computed) == 2


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page", ["contiguous", "paged"])
def test_the_dummy_family_passes_the_tests_of_all_families(feature: str, page: str, dummy: ModuleType) -> None:
    """With its row in ``UNDER_TEST``: supported features are right, and others are refused."""
    lacking = dict.fromkeys(("softcap", "sinks", "alibi", "alibi per sequence"), "the dummy kernels do not compute")
    tested = UnderTest(dummy, torch.float32, (1e-5, 2e-6), (1e-6, 4e-6), lacking)
    assert set(lacking) < set(FEATURES)
    test_families.test_ragged_sequences(tested, feature, next(iter(test_families.SEQUENCES)), page)


def test_features_that_the_dummy_kernels_lack_are_refused(dummy: ModuleType) -> None:
    problem = CASES["causal, pages"].build()
    for name, value in {"softcap": 5.0, "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4)}.items():
        with pytest.raises(ValueError, match="the dummy kernels do not compute"):
            dummy.run(dataclasses.replace(problem, **{name: value}))
    q, k, v = batch()
    with pytest.raises(ValueError, match="the dummy kernels do not compute a soft cap"):
        fast_attn_func(q, k, v, softcap=5.0)


def test_the_tests_named_in_the_recipe_pass_with_the_dummy_device(
    dummy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass with the row in each of their lists, and fail without it."""
    assert FIELDS - read_by(Path(str(dummy.__file__)).read_text()) == set()
    ours = backend()
    for kind, one, base in (
        ("backend", ours.FastAttentionDummyBackend, AttentionBackend),
        ("impl", ours.FastAttentionDummyImpl, AttentionImpl),
        ("builder", ours.DummyMetadataBuilder, AttentionMetadataBuilder),
    ):
        assert issubclass(one, base)
        assert not not_its_own(one, kind)
    assert claims.BackendClaims in ours.FastAttentionDummyBackend.__mro__

    def package(name: str) -> str:
        return name if path.name == "__init__.py" else name.rpartition(".")[0]

    arrows = {}
    for file, name in NEW_FILES.items():
        path = overlay.FILES / file
        found = test_arrows.imports(path.read_text(), package(name))
        arrows[name] = {own for one in found if (own := _own(one) or test_arrows.own(one)) and own != name}
    assert "fastattention_vllm.attention.dummy" in arrows["fastattention_vllm.integration.dummy.backend"]
    assert not test_arrows.upward(arrows)
    with pytest.raises(KeyError):
        test_arrows.wrong_levels(arrows)
    *lower, devices, highest = test_arrows.LEVELS
    monkeypatch.setattr(test_arrows, "LEVELS", (*lower, devices | {"dummy"}, highest))
    assert "cuda" in devices
    assert not test_arrows.wrong_levels(arrows)


def _own(name: str) -> str | None:
    """The new file that an imported name is, or belongs to."""
    return next((one for one in NEW_FILES.values() if name == one or name.startswith(f"{one}.")), None)


def test_the_backend_is_chosen_for_the_platform(dummy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {"cuda": lambda: None, "dummy": lambda: "a platform", "cpu": lambda: "the CPU's"}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", probes)
    monkeypatch.setattr(plugin, "NPU_DEVICES", ())
    assert plugin.platform() is None, "the platform must be the device's"
    choose = compat.backend_path.__wrapped__  # without its cache
    assert choose() == overlay.BACKEND
    probes["dummy"] = lambda: None
    assert choose() == compat.BACKEND_PATH


def test_an_engine_equals_hugging_face(tmp_path: Path) -> None:
    """Chunked prefill mixed with decode, in a process that finds the dummy device as a real start would."""
    from tests.integration.engine import LOGPROB_TOLERANCE, MAX_TOKENS
    from tests.reference_models import hugging_face_answers, llama, random_prompts, save_random

    model = save_random(llama(4, 2, 64, layers=2), tmp_path)
    prompts = random_prompts((1, 17, 130))
    result = subprocess.run(
        [sys.executable, "-m", "tests.recipes.device.generate"],
        input=json.dumps({"model": str(model), "prompts": prompts}),
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["backends"] == [overlay.BACKEND]
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    assert found["tokens"] == [answer.token_ids for answer in expected]
    for logprobs, answer in zip(found["logprobs"], expected, strict=True):
        assert max(abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True)) < LOGPROB_TOLERANCE
