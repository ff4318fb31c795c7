"""A results file as an argument of a benchmark: for argparse's ``type``.

Used by: the benchmarks that draw or print saved runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def saved_report(text: str) -> Path:
    """The path of a file with rows, or one sentence that says what is wrong with it."""
    path = Path(text)
    try:
        rows = json.loads(path.read_text())["rows"]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no result of a benchmark: it has no rows.") from error
    if not isinstance(rows, list):
        raise argparse.ArgumentTypeError(f"{text} is no result of a benchmark: its rows are no list.")
    return path
