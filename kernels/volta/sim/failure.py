"""The simulator's error."""

from __future__ import annotations


class SimulationError(Exception):
    """One sentence: what the kernel did wrong, or which feature it needs that is not modelled."""
