"""deploy/docker: what can be checked of files that nobody has built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
V100 = ROOT / "deploy" / "docker" / "Dockerfile.v100"


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def installation() -> list[str]:
    """The lines of docs/install.md that install the V100's environment."""
    block: Block = next(one for one in blocks_of(DOCS / "install.md") if "fastattention-v100" in one.text)
    lines = block.text.splitlines()
    return lines[: lines.index("fastattention doctor")]


def test_the_v100_is_installed_with_the_lines_of_the_page() -> None:
    lines = installation()
    assert len(lines) == 4
    commands = [part.strip() for name, rest in instructions(V100) if name == "RUN" for part in rest.split("&&")]
    where = [commands.index(line) for line in lines]
    assert where == list(range(where[0], where[0] + len(lines)))


def test_the_v100_has_cuda_12_8_and_pinned_versions() -> None:
    (base,) = (rest for name, rest in instructions(V100) if name == "FROM")
    assert re.fullmatch(r"nvidia/cuda:12\.8\.\d+-base-ubuntu24\.04", base)
    pins = [line for line in (ROOT / "constraints" / "volta.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) > 100
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin) for pin in pins)
    # The extra pins torch and vLLM, and torch pins the rest. The kernels are compiled by another nvrtc than torch's.
    assert [pin for pin in pins if re.match(r"(torch|vllm|triton|nvidia-.*-cu12)==", pin)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_containers_say_that_they_are_not_built_and_have_a_health_check(file: Path) -> None:
    assert "has not been built yet" in file.read_text()
    names = [name for name, _ in instructions(file)]
    assert names.count("HEALTHCHECK") == 1
    assert names[-1] == "CMD"


def test_the_v100s_server_is_not_root() -> None:
    names = [name for name, _ in instructions(V100)]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_copied_files_exist(file: Path) -> None:
    for name, rest in instructions(file):
        if name == "COPY":
            assert [source for source in rest.split()[:-1] if not (ROOT / source).exists()] == []
