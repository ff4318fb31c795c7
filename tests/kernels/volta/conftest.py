"""As in tests/attention/volta, the launcher reads a description of the kernels, and nothing is compiled for it."""

from __future__ import annotations

from tests.attention.volta.conftest import described_kernels  # noqa: F401  an autouse fixture
