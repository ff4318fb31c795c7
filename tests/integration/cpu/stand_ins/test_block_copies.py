"""A copied block is whole, whichever layer comes first."""

from __future__ import annotations

import pytest
import torch

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.cpu.stand_ins import block_copies

BLOCKS, PAGE, STATE = 6, 64, 40


@pytest.mark.skipif(not compat.has_cpu_linear_attention(), reason="nothing is replaced in this vLLM")
def test_the_rest_of_a_block_behind_a_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of each kind, in two parts of one allocation, as vLLM makes them."""
    from vllm.v1.worker import gpu_model_runner

    monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", gpu_model_runner.copy_kv_cache_blocks_inplace)
    block_copies.copy_whole_blocks()
    memory = torch.randint(-128, 128, (2, BLOCKS, PAGE), dtype=torch.int8)
    expected = memory.clone()
    expected[:, [4, 1]] = memory[:, [2, 4]]
    caches = [memory[0, :, :STATE], memory[0].view(torch.int16), memory[1, :, :STATE], memory[1].view(torch.int16)]
    gpu_model_runner.copy_kv_cache_blocks_inplace(caches, BLOCKS, [(2, 4), (4, 1)])
    assert torch.equal(memory, expected)
