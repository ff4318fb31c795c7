"""README.md and docs/*.md as the tests read them: fenced blocks with their markers, and links.

A marker is an HTML comment on the line before a fence. It says how the block is tested:

    <!-- run -->               test_blocks.py in this folder runs the block
    <!-- serve: TEST -->       TEST takes the block from the page, and starts the server in it
    <!-- test: TEST -->        TEST runs what the block says
    <!-- needs: HARDWARE -->   nothing runs it here
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
COMMANDS = {"bash", "python"}
OTHER_LANGUAGES = {"text", "yaml", "json", "toml"}
MARKER = re.compile(r"<!-- (?P<kind>run|serve|test|needs)(: (?P<what>[^>]+?))? -->")
LINK = re.compile(r"(?<!!)\[[^]]*\]\((?P<target>[^)\s]+)\)|!\[[^]]*\]\((?P<picture>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    marker: str
    """The line before the fence."""

    @property
    def kind(self) -> str:
        found = MARKER.fullmatch(self.marker)
        return found["kind"] if found else ""

    @property
    def what(self) -> str:
        found = MARKER.fullmatch(self.marker)
        return (found["what"] or "") if found else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = lines[start - 1].strip() if start else ""
        yield Block(page, start + 1, lines[start][3:].strip(), "\n".join(lines[start + 1 : number]), before)
        start = None
    assert start is None, f"{page}:{start}: a fence is not closed"


def blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands() -> list[Block]:
    """Blocks that a reader may paste."""
    return [block for block in blocks() if block.language in COMMANDS]


def blocks_tested_by(test: str) -> list[Block]:
    """Blocks whose marker names ``test``, a pytest node without parameters."""
    found = [block for block in commands() if block.what == test]
    assert found, f"no page names {test}"
    return found


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> list[str]:
    return [found["target"] or found["picture"] for found in LINK.finditer(prose_of(page))]


def node_exists(node: str) -> bool:
    """Whether ``path::function`` exists, without importing the file."""
    path, _, name = node.partition("::")
    if not (ROOT / path).is_file() or not name:
        return False
    return any(
        isinstance(part, ast.FunctionDef) and part.name == name
        for part in ast.walk(ast.parse((ROOT / path).read_text()))
    )
