"""docs/models.md: the tests that it names exist, and every column of its table is filled."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, node_exists

TEXT = (DOCS / "models.md").read_text()
ROWS = [line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
MODELS, DRAFTERS = ([row for row in ROWS if len(row) == columns] for columns in (7, 3))


@pytest.mark.parametrize("node", sorted(set(re.findall(r"`(tests/\S+::\w+)`", TEXT))))
def test_the_tests_exist(node: str) -> None:
    assert node_exists(node)


def test_every_model_has_an_answer_for_every_device() -> None:
    assert len(MODELS) > 10
    assert len(DRAFTERS) > 4
    assert len(MODELS) + len(DRAFTERS) == len(ROWS)
    assert all(cell.strip() for row in ROWS for cell in row)
