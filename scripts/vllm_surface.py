"""The names of a vLLM version's options, of its questions to a backend and of its statistics, read from its sources.

    python -m scripts.vllm_surface SDIST_OR_FOLDER ...

Run by: contributors who add a vLLM version.
Needs: `make setup-dev`, and that version's sdist (`pip download --no-deps --no-binary vllm vllm==X`) or its sources.

Writes one file per version under tests/integration/vllm_surface. The sources are parsed, not imported, so any version
can be recorded from its sdist; nothing is installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

RECORDS = Path(__file__).resolve().parent.parent / "tests" / "integration" / "vllm_surface"

Surface = Mapping[str, Sequence[str]]
"""The sorted names by kind."""

FIELDS = {
    "engine": (("vllm/engine/arg_utils.py", "EngineArgs"), ("vllm/engine/arg_utils.py", "AsyncEngineArgs")),
    "sampling": (("vllm/sampling_params.py", "SamplingParams"),),
    "pooling": (("vllm/pooling_params.py", "PoolingParams"),),
    "attention_config": (("vllm/config/attention.py", "AttentionConfig"),),
    "scheduler_stats": (("vllm/v1/metrics/stats.py", "SchedulerStats"),),
    "finished_request_stats": (("vllm/v1/metrics/stats.py", "FinishedRequestStats"),),
}
"""Dataclasses and structs, whose fields are options, or statistics that the status page shows."""
ENVIRONMENT = "vllm/envs.py"
BASES = "vllm/v1/attention/backend.py"
FLASH = "vllm/v1/attention/backends/flash_attn.py"
ASKED = {
    "AttentionBackend": BASES,
    "AttentionImplBase": BASES,
    "AttentionImpl": BASES,
    "AttentionMetadataBuilder": BASES,
    "FlashAttentionBackend": FLASH,
    "FlashAttentionImpl": FLASH,
    "FlashAttentionMetadataBuilder": FLASH,
}
"""Classes from which our backends derive. Their answers are inherited unless a backend overrides them."""


def surface(read: Callable[[str], str]) -> Surface:
    """The names of one version.

    Args:
        read: Returns a source file's text by its path in the distribution.
    """
    found = {
        kind: sorted(name for file, owner in classes for name in _fields(_class(read(file), owner)))
        for kind, classes in FIELDS.items()
    }
    found["environment"] = sorted(_variables(read(ENVIRONMENT)))
    for owner, file in ASKED.items():
        found[owner] = sorted(_members(_class(read(file), owner)))
    return found


def installed() -> Surface:
    """The names of the vLLM in this environment."""
    import vllm

    folder = Path(vllm.__file__).parent.parent
    return surface(lambda file: (folder / file).read_text())


def recorded(version: str) -> Surface | None:
    """None if this version was never recorded."""
    file = RECORDS / f"{version}.json"
    if not file.exists():
        return None
    found: Surface = json.loads(file.read_text())
    return found


def versions() -> list[str]:
    """The recorded versions, oldest first."""
    return sorted((file.stem for file in RECORDS.glob("*.json")), key=lambda text: [int(n) for n in text.split(".")])


def differences(was: Surface, now: Surface) -> list[str]:
    """One line for each added or removed name."""
    lines = []
    for kind in sorted(set(was) | set(now)):
        old, new = set(was.get(kind, ())), set(now.get(kind, ()))
        lines += [f"{kind}: {name} is new" for name in sorted(new - old)]
        lines += [f"{kind}: {name} is gone" for name in sorted(old - new)]
    return lines


def _class(source: str, name: str) -> ast.ClassDef:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"no class {name}")


def _fields(owner: ast.ClassDef) -> Iterator[str]:
    for node in owner.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(node.annotation) and not node.target.id.startswith("_"):
            yield node.target.id


def _members(owner: ast.ClassDef) -> Iterator[str]:
    """The functions of the class, and its attributes with a value."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _variables(source: str) -> Iterator[str]:
    """The keys of the dictionary of environment variables."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign | ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        if "environment_variables" in [target.id for target in targets if isinstance(target, ast.Name)]:
            for key in node.value.keys:
                if not isinstance(key, ast.Constant):
                    raise LookupError(f"{ENVIRONMENT} has a variable whose name is not a string literal")
                yield str(key.value)


def read_distribution(path: Path) -> tuple[str, Surface]:
    """Version and names of an sdist, or of a folder into which one was unpacked."""
    if path.is_dir():
        text = (path / "PKG-INFO").read_text()
        return _version(text), surface(lambda file: (path / file).read_text())
    with tarfile.open(path) as archive:
        root = archive.getnames()[0].partition("/")[0]

        def read(file: str) -> str:
            member = archive.extractfile(f"{root}/{file}")
            assert member is not None
            return member.read().decode()

        return _version(read("PKG-INFO")), surface(read)


def _version(information: str) -> str:
    found = re.search(r"^Version: ([0-9.]+)", information, re.MULTILINE)
    if found is None:
        raise LookupError("PKG-INFO contains no version")
    return found.group(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SDIST_OR_FOLDER")
    for path in parser.parse_args(arguments).sources:
        try:
            version, names = read_distribution(path)
        except (OSError, LookupError, tarfile.TarError) as error:
            print(f"vllm_surface: {path} cannot be read as a source distribution of vLLM: {error}", file=sys.stderr)
            return 1
        RECORDS.mkdir(exist_ok=True)
        file = RECORDS / f"{version}.json"
        file.write_text(json.dumps(names, indent=1) + "\n")
        print(f"{file.relative_to(RECORDS.parent.parent.parent)}: {sum(map(len, names.values()))} names")
    return 0


if __name__ == "__main__":
    sys.exit(main())
