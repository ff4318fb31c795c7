"""Copies of states, and the preparation of drafters' passes, against vLLM's own Triton kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter

import pytest

from fastattention_vllm.integration import compat

SEEDS = 8


@pytest.mark.more
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not compat.has_kernel_dispatcher(),
    reason="needs Triton's interpreter, and a vLLM whose kernels are replaced",
)
def test_every_kernel_does_what_vllms_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.cpu.stand_ins.against_triton", str(SEEDS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = ("next_tokens", "rows_to_sample", "advance", "inputs_of_draft_model", "move_on", "keep_at_borders")
    assert Counter(done.stdout.split()) == dict.fromkeys(names, SEEDS)
