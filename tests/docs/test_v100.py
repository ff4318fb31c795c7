"""docs/v100.md: every line of its tables names the means by which it is known, and the tests that it names exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT, node_exists

TEXT = (DOCS / "v100.md").read_text()
LEGEND = {"test", "PTX", "H100", "simulated", "faked", "read", "code", "reported"}


def rows(after: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = f"\n{TEXT}".split(f"\n{after}\n", 1)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split(" |")])
    return table


TABLES = ["## Works", "## Works, but slower", "## Refused"]
LINES = [pytest.param(row, id=row[0][:40]) for heading in TABLES for row in rows(heading)]


def test_every_means_is_explained() -> None:
    assert {row[0] for row in rows("# NVIDIA V100")} == LEGEND


@pytest.mark.parametrize("row", LINES)
def test_every_line_names_its_means(row: list[str]) -> None:
    means = re.findall(r"(?:^|; )(\w+)\b", re.sub(r"`[^`]*`|\([^)]*\)|\[[^]]*\]", "", row[-1]))
    assert means, row
    assert set(means) <= LEGEND, means


@pytest.mark.parametrize("node", sorted(set(re.findall(r"`(tests/\S+::\w+)`", TEXT))))
def test_the_tests_exist(node: str) -> None:
    assert node_exists(node)


def test_a_line_that_is_tested_or_simulated_names_a_test() -> None:
    for parameters in LINES:
        (row,) = parameters.values
        for part in row[-1].split("; "):
            if part.startswith(("test", "PTX", "H100", "simulated")):
                assert "`tests/" in part, part


@pytest.mark.parametrize("name", ["v100.md", "install.md"])
def test_nothing_is_called_run_on_a_v100(name: str) -> None:
    text = " ".join((ROOT / "docs" / name).read_text().split())
    assert "**Not yet run on a V100.**" in text
    assert not re.search(
        r"(?<!not yet )\b(ran|run|measured|tested) on (a|the|one) V100",
        re.sub(r"[Nn]ot (yet |been )?run on a V100", "", text),
    )
