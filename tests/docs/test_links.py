"""Links of the repository's pages, and paths named in README.md and docs/, lead to existing files and headings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, links_of, prose_of

TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
MARKDOWN = sorted({ROOT / name for name in TRACKED if (ROOT / name).is_file()} | set(PAGES))
FOLDERS = "benchmarks|configs|constraints|deploy|docs|fastattention_vllm|kernels|scripts|tests"


def anchors(page: Path) -> set[str]:
    """Anchors as code hosts and MkDocs generate them for plain headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links_of(page):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.relative_to(ROOT)}: no {target}"
        assert file.is_relative_to(ROOT), f"{page.relative_to(ROOT)}: {target} leaves the repository"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.relative_to(ROOT)}: no heading {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+?)`", prose_of(page))
    named += re.findall(rf"`((?:{FOLDERS})/[\w./-]+?)::\w+", prose_of(page))
    missing = [path for path in named if not (ROOT / path).exists() and not path.endswith("lib/volta")]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_results_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`(2026-[\w.-]+\.(?:json|txt|png))`", prose_of(page))
    assert [name for name in named if not (ROOT / "benchmarks" / "results" / name).is_file()] == []


def test_headings_become_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# V100, T4 and RTX 20\n\n```bash\n# a comment\n```\n\n## `cpu_threads`\n")
    assert anchors(page) == {"v100-t4-and-rtx-20", "cpu_threads"}
