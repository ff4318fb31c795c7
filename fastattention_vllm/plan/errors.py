"""The planner's exceptions. Each message is one sentence that names the value and the fix."""

from __future__ import annotations


class PlanError(ValueError):
    """Bad input."""


class DoesNotFitError(PlanError):
    """The input is valid, but the machine is too small."""
