"""The stand-ins against vLLM's own definitions of the same ops."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from fastattention_vllm.integration.cpu.stand_ins import ops as cpu_ops


@pytest.fixture(autouse=True, scope="module")
def _ops() -> None:
    cpu_ops.define_missing_ops()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotary_embedding_equals_vllms_native_one(is_neox: bool, dtype: torch.dtype, rotary_dim: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    # vLLM computes in the model's dtype, ours in fp32 rounded once, so the reference is fp32 on rounded input.
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(64, rotary_dim, 4096, 10000.0, is_neox, torch.float32)
    cache = rope.cos_sin_cache.to(dtype)
    rope.cos_sin_cache = cache.float()
    torch.manual_seed(0)
    positions = torch.randint(0, 4096, (33,))
    query, key = torch.randn(33, 4 * 64).to(dtype), torch.randn(33, 2 * 64).to(dtype)
    expected = rope.forward_native(positions, query.float(), key.float())
    torch.ops._C.rotary_embedding(positions, query, key, 64, cache, is_neox)
    for ours, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(dtype))


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_embedding_of_heads_that_lie_apart(is_neox: bool) -> None:
    cache, positions, wide = torch.randn(50, 16), torch.arange(5), torch.randn(5, 4, 24)
    expected, query = wide[..., 8:].reshape(5, -1), wide.clone()[..., 8:]
    torch.ops._C.rotary_embedding(positions, expected, None, 16, cache, is_neox)
    torch.ops._C.rotary_embedding(positions, query, None, 16, cache, is_neox)
    assert torch.equal(query.flatten(1), expected)


def test_every_activation_function_can_be_built() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import activation

    x = torch.randn(3, 16)
    with set_current_vllm_config(VllmConfig()):
        for name in ("gelu_new", "gelu_fast", "quick_gelu", "gelu", "relu", "silu"):
            assert activation.get_act_fn(name)(x).shape == x.shape


@pytest.mark.parametrize(
    ("op", "layer"), [("gelu_new", "NewGELU"), ("gelu_fast", "FastGELU"), ("gelu_quick", "QuickGELU")]
)
def test_gelu_variants_equal_vllms_native_ones(op: str, layer: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import activation

    x = torch.randn(5, 32)
    out = torch.empty_like(x)
    getattr(torch.ops._C, op)(out, x)
    with set_current_vllm_config(VllmConfig()):
        torch.testing.assert_close(out, getattr(activation, layer)().forward_native(x))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activations_equal_vllms_native_ones(name: str) -> None:
    """vLLM looks these ops up when it builds the layer, and also calls them on some architectures."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import activation

    x = torch.randn(5, 32)
    out = torch.empty(5, 16)
    op = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}[name]
    getattr(torch.ops._C, op)(out, x)
    with set_current_vllm_config(VllmConfig()):
        torch.testing.assert_close(out, activation.get_act_and_mul_fn(name).forward_native(x))


def test_threads_are_bound_as_in_vllm_019() -> None:
    """Runs in a separate process, because the binding is permanent."""
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import os, torch; from fastattention_vllm.integration.cpu.stand_ins import ops; ops.define_missing_ops(); "
        "torch.set_num_threads = None; "
        f"print(torch.ops._C.init_cpu_threads_env('{cpu}')); "
        "print(torch.get_num_threads(), sorted(os.sched_getaffinity(0)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"1 [{cpu}]"


def test_threads_stay_unbound_where_the_system_forbids_to_bind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def forbidden(process: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    monkeypatch.setattr(cpu_ops, "set_num_threads", counts.append)
    assert cpu_ops._bind_threads("0,2-3") == (
        "OpenMP threads: 3, not bound to CPUs, because the system does not allow it (Operation not permitted)."
    )
    assert counts == [3]


def test_linear_layers_work_on_a_cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a CPU vLLM would use a compiled kernel for small weights, which a pure-Python vLLM does not have."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", utils.check_cpu_sgl_kernel)
    cpu_ops.keep_linears_off_compiled_kernels()
    layer = torch.nn.Linear(384, 512, bias=False, dtype=torch.bfloat16)
    x = torch.randn(2, 384, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), layer(x))


def test_slot_mapping_of_ragged_requests_and_padding() -> None:
    query_start_loc = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    positions = torch.tensor([14, 15, 16, 0, 1, 2, 3, 4, 99, 99])
    block_table = torch.tensor([[5, 9, 0], [1, 1, 1], [7, 2, 0]], dtype=torch.int32)
    slots = torch.full((12,), 12345)
    cpu_ops._slot_mapping(8, 12, query_start_loc, positions, block_table, 3, slots, 16)
    assert slots.tolist() == [94, 95, 144, 112, 113, 114, 115, 116, -1, -1, -1, -1]


def test_slot_mapping_as_vllm_calls_it_up_to_031() -> None:
    query_start_loc = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    positions = torch.tensor([14, 15, 16, 0, 1, 2, 3, 4, 99, 99])
    block_table = torch.tensor([[5, 9, 0], [1, 1, 1], [7, 2, 0]], dtype=torch.int32)
    slots = torch.full((12,), 12345)
    torch.ops._C.compute_slot_mapping_kernel_impl(query_start_loc, positions, block_table, slots, 16)
    assert slots.tolist() == [94, 95, 144, 112, 113, 114, 115, 116, -1, -1, -1, -1]


def test_greedy_argmax() -> None:
    logits = torch.randn(7, 50)
    assert torch.equal(torch.ops._C.greedy_argmax(logits), logits.argmax(-1))


def test_seeded_sampling_repeats_and_follows_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, 4).contiguous()
    seeds = torch.arange(4000)
    drawn = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    assert torch.equal(drawn, torch.ops._C.fused_gumbel_argmax(logits, seeds))
    shares = torch.bincount(drawn, minlength=4) / 4000
    # Four standard deviations of a binomial share with n = 4000 are at most 0.032.
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.032, rtol=0)
