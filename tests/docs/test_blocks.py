"""Every block of README.md and docs/ that a reader may paste is run by a test, or names the hardware it needs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastattention_vllm.integration.options import KEY, Options
from tests.docs.pages import (
    COMMANDS,
    DOCS,
    OTHER_LANGUAGES,
    PAGES,
    ROOT,
    Block,
    blocks,
    blocks_of,
    commands,
    node_exists,
    prose_of,
)
from tests.environment import USER_ENVIRONMENT

SHELL = ("bash", "-euo", "pipefail", "-c")


@pytest.mark.parametrize("block", commands(), ids=str)
def test_every_block_is_marked(block: Block) -> None:
    assert block.kind, f"{block} has no marker; tests/docs/pages.py explains them"
    if block.kind in ("serve", "test"):
        assert node_exists(block.what), f"{block} names a test that does not exist"
    elif block.kind == "needs":
        assert block.what, f"{block} does not say what it needs"


def test_no_block_hides_from_these_tests() -> None:
    assert {block.language for block in blocks()} <= COMMANDS | OTHER_LANGUAGES
    indented = [
        f"{page.name}: {line}"
        for page in PAGES
        for before, line in zip(["", *prose_of(page).splitlines()], prose_of(page).splitlines(), strict=False)
        if line.startswith("    ") and line.strip() and not before.strip()
    ]
    assert indented == [], "indented blocks have no marker: fence them"


@pytest.mark.parametrize("block", [block for block in commands() if block.kind == "run"], ids=str)
def test_blocks_run(block: Block, tmp_path: Path) -> None:
    command = [sys.executable, "-c", block.text] if block.language == "python" else [*SHELL, block.text]
    environment = USER_ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_block_that_fails_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        test_blocks_run(Block(DOCS / "index.md", 1, "bash", "false\ntrue", "<!-- run -->"), tmp_path)


def test_an_unmarked_block_is_a_failure(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```bash\nmake serve\n```\n<!-- test: tests/docs/test_blocks.py::nothing -->\n```bash\nls\n```\n"
    )
    unmarked, unknown = blocks_of(page)
    assert unmarked.kind == ""
    assert unknown.kind == "test"
    assert not node_exists(unknown.what)


# --- checks of blocks that need hardware ------------------------------------------------------------------------------


def words(block: Block) -> list[str]:
    return shlex.split(block.text.replace("\\\n", " "), comments=True)


@pytest.mark.parametrize("block", [block for block in commands() if block.language == "bash"], ids=str)
def test_targets_extras_and_files_exist(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for target in re.findall(r"^make ([a-z-]+)", block.text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{block}: no target {target}"
    for extra in re.findall(r"\.\[([a-z,-]+)\]", block.text):
        assert set(extra.split(",")) <= set(extras), f"{block}: no extra {extra}"
    for word in words(block):
        if re.fullmatch(r"(benchmarks|configs|scripts|deploy)/\S+\.\w+", word):
            assert (ROOT / word).is_file(), f"{block}: no file {word}"


@pytest.mark.parametrize("block", [block for block in commands() if "--additional-config" in block.text], ids=str)
def test_options_are_valid(block: Block) -> None:
    found = words(block)
    config = json.loads(found[found.index("--additional-config") + 1])
    assert set(config) == {KEY}
    Options.model_validate(config[KEY])


@pytest.mark.parametrize("block", [block for block in commands() if "vllm serve" in block.text], ids=str)
def test_flags_are_vllms(block: Block) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = set(AsyncEngineArgs.__dataclass_fields__) | {"config", "host", "port", "root_path"}
    flags = {word for word in words(block) if word.startswith("--")}
    asked = {flag[2:].replace("-", "_") for flag in flags if f"{flag} " in block.text.split("vllm serve", 1)[1] + " "}
    assert asked <= fields, asked - fields
