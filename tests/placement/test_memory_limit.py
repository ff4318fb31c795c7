"""The host pool under a real memory limit: an error with a sentence, where Linux would have ended the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.limited import limited_to, parent

LIMIT = 1536 << 20
SCRIPT = """
import torch
from fastattention_vllm.placement import budget, host_memory, host_pool
from fastattention_vllm.placement.host_pool import PageShape

host_memory.PATIENCE = 0
available = host_memory.available_bytes()
print(available)
page = PageShape(1, 16, 8, 128, torch.float16).nbytes

def pool(size):
    shape = PageShape(size // page, 16, 8, 128, torch.float16)
    return host_pool.create({"a": shape}, {"a": 0}, size, pin=None)

try:
    pool(available)
except MemoryError as error:
    print(error)
print(len(pool(budget.host_kv_bytes(available)).memory))
"""

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(parent() is None, reason="this user may not create control groups with a memory limit"),
]


def test_a_pool_beyond_the_limit_is_refused_and_the_default_fits() -> None:
    with limited_to(LIMIT) as group:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, preexec_fn=group.enter, capture_output=True, text=True, check=False)
        assert group.times_full() == 0
    assert done.returncode == 0, done.stderr
    available, refusal, default = done.stdout.splitlines()
    assert LIMIT - (1 << 30) < int(available) < LIMIT
    assert refusal.startswith("the host layers' KV cache needs 1."), refusal
    assert "GiB, but only" in refusal
    assert int(available) / 2 - (1 << 20) < int(default) <= int(available) / 2
