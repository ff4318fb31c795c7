"""The exceptions of this room. Their message is one sentence that names the value and the fix."""

from __future__ import annotations


class PlanError(ValueError):
    """Bad input."""


class DoesNotFitError(PlanError):
    """Good input, but the machine is too small."""
