"""deploy/docker: what can be checked of files that nobody has built."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
V100 = ROOT / "deploy" / "docker" / "Dockerfile.v100"
GPU = ROOT / "deploy" / "docker" / "Dockerfile.gpu"
USER_ID = 10001
"""Of the images' user. The Kubernetes manifests name it, because Kubernetes cannot tell whether a name is root's."""


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def installation(environment: str) -> list[str]:
    """The lines of docs/install.md that make this environment."""
    block: Block = next(one for one in blocks_of(DOCS / "install.md") if environment in one.text)
    lines = block.text.splitlines()
    return lines[: lines.index("fastattention doctor")]


@pytest.mark.parametrize("name", ["v100", "t4"])
def test_gpus_are_installed_with_the_lines_of_the_page(name: str) -> None:
    lines = installation(f"fastattention-{name}")
    assert len(lines) == 4
    file = V100 if name == "v100" else GPU
    commands = [part.strip() for name, rest in instructions(file) if name == "RUN" for part in rest.split("&&")]
    where = [commands.index(line) for line in lines]
    assert where == list(range(where[0], where[0] + len(lines)))


def base(file: Path) -> str:
    found = instructions(file)
    (image,) = (rest for name, rest in found if name == "FROM")
    defaults = dict(rest.split("=", 1) for name, rest in found if name == "ARG")
    return re.sub(r"\$\{(\w+)\}", lambda argument: defaults[argument[1]], image)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_the_base_image_is_pinned(file: Path) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base(file)), "name a whole version"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_ray_and_vllm_are_pinned(file: Path) -> None:
    """Ray is the version that this project's tests run."""
    pins = (ROOT / "constraints" / "cpu.txt").read_text().split()
    for word in [word.strip("'") for name, rest in instructions(file) if name == "RUN" for word in rest.split()]:
        assert not re.fullmatch(r"(vllm|ray)\b.*", word) or re.fullmatch(r"[\w\[\]]+==[\d.]+", word), word
        assert not word.startswith("ray") or re.sub(r"\[.*\]", "", word) in pins


def test_the_v100_has_cuda_12_8_and_pinned_versions() -> None:
    (base,) = (rest for name, rest in instructions(V100) if name == "FROM")
    assert re.fullmatch(r"nvidia/cuda:12\.8\.\d+-base-ubuntu24\.04", base)
    pins = [line for line in (ROOT / "constraints" / "volta.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) > 100
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin) for pin in pins)
    # The extra pins torch and vLLM, and torch pins the rest. The kernels are compiled by another nvrtc than torch's.
    assert [pin for pin in pins if re.match(r"(torch|vllm|triton|nvidia-.*-cu12)==", pin)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_containers_say_whether_they_were_built_and_have_a_health_check(file: Path) -> None:
    assert "Built on Debian 12 with buildah, not yet on the base image below" in file.read_text()
    names = [name for name, _ in instructions(file)]
    assert names.count("HEALTHCHECK") == 1
    assert names[-1] == "CMD"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_the_server_is_not_root(file: Path) -> None:
    found = instructions(file)
    names = [name for name, _ in found]
    assert [rest for name, rest in found if name == "USER"] == ["serve"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    assert any(f"useradd --uid {USER_ID} --create-home serve" in rest for name, rest in found if name == "RUN")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_without_a_command_a_config_is_served(file: Path) -> None:
    """That the configs themselves are valid is tested in test_configs.py."""
    command = json.loads(next(rest for name, rest in instructions(file) if name == "CMD"))
    assert command[:3] == ["vllm", "serve", "--config"]
    assert (ROOT / command[3]).is_file()
    assert command[4:] == ["--host", "0.0.0.0"], "the port is published"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_the_entry_point_runs_the_command(file: Path) -> None:
    for entry in (json.loads(rest) for name, rest in instructions(file) if name == "ENTRYPOINT"):
        assert subprocess.check_output([*entry, "echo", "two  words"], text=True) == "two  words\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)
def test_copied_files_exist(file: Path) -> None:
    for name, rest in instructions(file):
        if name == "COPY":
            assert [source for source in rest.split()[:-1] if not (ROOT / source).exists()] == []
