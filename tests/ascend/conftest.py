"""Tests that need genuine torch_npu or vllm-ascend run in the environments of scripts/ascend.py: `make test-ascend`."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob += ["test_schema*.py", "test_host_layers_schema.py"]
if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob += ["test_vllm_ascend*.py"]
if "FASTATTENTION_TRITON" not in os.environ:
    collect_ignore_glob += ["test_vllm_ascend_triton.py"]
