"""The emulator's error."""

from __future__ import annotations


class EmulationError(Exception):
    """One sentence: which thread did something that is not allowed, or why the emulator cannot run."""
