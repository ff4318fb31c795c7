"""What the emulator raises."""

from __future__ import annotations


class EmulationError(Exception):
    """One sentence: which thread did what it may not, or why there is no emulator."""
