"""The allowed imports between packages: checks every import of the package and of the kernels, also inside functions.

A unit is a package or module directly in fastattention_vllm/. Imports for type checking only do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fastattention_vllm"
MAY_IMPORT = {
    PACKAGE: {"attention"},  # fast_attn_func, imported when it is first used
    "cuda_driver": set(),
    "private_folder": set(),
    "attention": {"cuda_driver"},
    "placement": {"attention", "cuda_driver", "private_folder"},
    "parallel": {"attention", "cuda_driver"},
    "linear": {"attention", "cuda_driver"},
    "integration": {PACKAGE, "attention", "linear", "placement", "parallel", "plan", "private_folder"},
    "bench": {"attention", "linear", "placement", "parallel"},
    "doctor": {PACKAGE, "attention", "linear", "placement", "parallel", "integration", "bench"},
    "plan": {"placement"},
    "demo": set(),
    "cli": {"bench", "doctor", "plan"},
}
LEVELS = (
    {"refusal", "patches"},
    {"compat", "options", "claims", "binding", "multimodal"},
    {"support", "kv_size", "drafter", "base"},
    {"checkpoint"},
    {"tiling"},
    {"host_layers"},
    {"serving"},
    {"cpu", "cuda", "ascend"},
    {"plugin"},
)
"""The levels of integration/: each imports only from lower ones. Devices do not import each other."""
MAX_MODULES = 14
KNOW_VLLM = {"attention/flash.py", "bench/exllama.py", "bench/vllm_native.py", "bench/serving.py"}
"""Files outside of integration/ that may: flash.py borrows vLLM's kernels, bench/ runs vLLM as a peer."""
OTHERS = ("vllm", "vllm_ascend")


def imports(source: str, package: str) -> Iterator[str]:
    """Dotted names of what a file in ``package`` imports; ``from a import b`` as ``a.b``."""
    tree = ast.parse(source)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant))


def modules(folder: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert len(found) > 5
    return found


def package_of(name: str, path: Path) -> str:
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


MODULES = modules(PACKAGE)
IMPORTED = {name: set(imports(path.read_text(), package_of(name, path))) for name, path in MODULES.items()}


def own(name: str) -> str | None:
    """The module of the package that an imported name is, or belongs to."""
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


ARROWS = {
    name: {found for one in found_here if (found := own(one)) and found != name}
    for name, found_here in IMPORTED.items()
}


def unit_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for following in sorted(arrows.get(name, ())):
            found = visit(following, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := visit(name, []))), [])


def upward(arrows: Mapping[str, set[str]]) -> list[str]:
    """Imports between units that are not in ``MAY_IMPORT``."""
    return [
        f"{name} -> {other}"
        for name, others in arrows.items()
        for other in others
        if unit_of(name) != unit_of(other) and unit_of(other) not in MAY_IMPORT.get(unit_of(name), ())
    ]


def wrong_levels(arrows: Mapping[str, set[str]]) -> list[str]:
    """Imports within integration/ that go up, or from one device or feature to another of the same level."""
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    folders = {path.name for path in (ROOT / PACKAGE / "integration").iterdir() if path.is_dir()}
    found = []
    for name, others in arrows.items():
        for other in others:
            here, there = name.split(".")[2:3], other.split(".")[2:3]
            if unit_of(name) != "integration" or unit_of(other) != "integration" or here == there or not there:
                continue
            same = level[here[0]] == level[there[0]] and not folders & {here[0], there[0]}
            if level[there[0]] > level[here[0]] or (level[there[0]] == level[here[0]] and not same):
                found.append(f"{name} -> {other}")
    return found


def test_every_unit_is_known() -> None:
    assert {unit_of(name) for name in MODULES} == set(MAY_IMPORT)
    parts = {path.stem for path in (ROOT / PACKAGE / "integration").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__init__", "__pycache__"} == set().union(*LEVELS)


def test_imports_between_units_go_one_way() -> None:
    assert not upward(ARROWS)


def test_imports_within_integration_go_one_way() -> None:
    assert not wrong_levels(ARROWS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle(ARROWS)


def test_only_integration_imports_vllm() -> None:
    knowing = {
        MODULES[name].relative_to(ROOT / PACKAGE).as_posix()
        for name, found in IMPORTED.items()
        if unit_of(name) != "integration" and any(one.split(".")[0] in OTHERS for one in found)
    }
    assert knowing <= KNOW_VLLM
    assert "attention/flash.py" in knowing


def test_integration_has_few_modules_outside_of_folders() -> None:
    files = [path for path in (ROOT / PACKAGE / "integration").iterdir() if path.suffix == ".py"]
    assert 5 < len(files) <= MAX_MODULES


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_import_nothing_above_them(path: Path) -> None:
    """They import neither the package nor torch nor vLLM; the simulator and the emulator take numpy arrays."""
    found = imports(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))
    assert not [one for one in found if one.split(".")[0] in (PACKAGE, "torch", *OTHERS)]


def test_a_wrong_import_is_detected() -> None:
    a, b = f"{PACKAGE}.attention.flash", f"{PACKAGE}.integration.compat"
    assert upward({a: {b}})
    assert upward({f"{PACKAGE}.parallel.plan": {f"{PACKAGE}.placement.plan"}})
    assert not upward({b: {a}})
    cpu, cuda = f"{PACKAGE}.integration.cpu.backend", f"{PACKAGE}.integration.cuda.volta"
    assert wrong_levels({cuda: {cpu}})
    assert wrong_levels({b: {cpu}})
    assert not wrong_levels({cpu: {b}})
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import vllm.config", "vllm.config"),
        ("from vllm import config", "vllm.config"),
        ("def f():\n    from vllm import config", "vllm.config"),
        ("from . import compat", "a.b.compat"),
        ("from ..c import d", "a.c.d"),
        ("import importlib\nimportlib.import_module('vllm')", "vllm"),
    ],
)
def test_imports_are_found(line: str, found: str) -> None:
    assert found in set(imports(line, "a.b"))


def test_imports_for_types_do_not_count() -> None:
    assert not set(imports("if TYPE_CHECKING:\n    import vllm", "a")) - {"typing.TYPE_CHECKING"}
