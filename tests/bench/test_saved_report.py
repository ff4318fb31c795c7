from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fastattention_vllm.bench.saved_report import saved_report


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "result.json cannot be read: No such file or directory"),
        ("{", "result.json is no result of a benchmark: it has no rows"),
        ("[1]", "it has no rows"),
        ('{"date": "2026-11-23"}', "it has no rows"),
        ('{"rows": 3}', "its rows are no list"),
    ],
)
def test_files_without_results_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        saved_report(str(path))
    path.write_text('{"rows": []}')
    assert saved_report(str(path)) == path
