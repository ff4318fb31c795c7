"""What the doctor says: a list of findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "warning", "problem"]
"""``warning``: it works, but slower or with less than this machine could do. ``problem``: something does not work."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    """What was found, without a full stop."""
    fix: str = ""
    """What to do, one sentence."""
    command: str = ""
    """The command that does it, if there is one."""
