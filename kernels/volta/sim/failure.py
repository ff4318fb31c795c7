"""The one error of the simulator."""

from __future__ import annotations


class SimulationError(Exception):
    """One sentence: what the kernel did, or what it needs that is not modelled."""
