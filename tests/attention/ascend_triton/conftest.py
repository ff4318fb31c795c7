"""The programs run in Triton's interpreter: `make test-ascend` sets TRITON_INTERPRET and installs triton-ascend."""

from __future__ import annotations

import importlib.util
import os

collect_ignore: list[str] = []
if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore += ["test_kernels.py"]
