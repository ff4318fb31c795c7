"""The documentation site builds without a warning: no dead link, no missing page, no page outside the navigation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, ROOT


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        [*command, "--config-file", str(folder / "mkdocs.yml")], capture_output=True, text=True, cwd=folder
    )


def test_the_site_builds_in_strict_mode(tmp_path: Path) -> None:
    result = build(ROOT, tmp_path / "site")
    assert result.returncode == 0, result.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {path.stem for path in DOCS.glob("*.md")}
    html = "".join(path.read_text() for path in (tmp_path / "site").glob("*.html"))
    pictures = list((tmp_path / "site" / "pictures").glob("*.png"))
    assert pictures
    assert all(f'src="pictures/{path.name}"' in html for path in pictures)


def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(DOCS, folder / "docs")
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_links.py", folder / "scripts")
    shutil.copytree(ROOT / "benchmarks" / "results", folder / "benchmarks" / "results")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    return folder


def test_faults_in_the_site_are_found(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    index = folder / "docs" / "index.md"
    index.write_text(
        index.read_text() + "\n[a](nowhere.md) [b](install.md#nowhere) ![c](../benchmarks/results/no.png)\n"
    )
    (folder / "docs" / "outside.md").write_text("# Outside\n")
    result = build(folder, tmp_path / "site")
    assert result.returncode != 0
    for fault in ("nowhere.md", "install.md#nowhere", "no.png", "outside.md"):
        assert fault in result.stderr
