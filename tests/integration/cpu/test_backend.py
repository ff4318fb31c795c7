"""The backend's steps without an engine: cache write, attention over the cache, padding, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

from fastattention_vllm.integration import binding, support
from fastattention_vllm.integration.compat import keys_before_values
from fastattention_vllm.integration.cpu.backend import (
    FastAttentionImpl,
    FastAttentionMetadata,
    FastAttentionMetadataBuilder,
    start_cpu_threads,
)
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cpus as topology
from tests.integration import kv_caches

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 64, 16


@pytest.mark.parametrize("kind", kv_caches.kinds())
def test_write_then_attend_equals_sdpa_and_leaves_padding_alone(kind: str) -> None:
    torch.manual_seed(0)
    cache = kv_caches.empty_cache(kind, 9, BLOCK, KV_HEADS, HEAD_SIZE)
    impl = FastAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
    lens, blocks = [21, 5], torch.tensor([[7, 2], [4, 0]], dtype=torch.int32)
    tokens, padded = sum(lens), sum(lens) + 3
    key, value = torch.randn(padded, KV_HEADS, HEAD_SIZE), torch.randn(padded, KV_HEADS, HEAD_SIZE)
    query = torch.randn(padded, HEADS, HEAD_SIZE)
    slots = torch.cat(
        [blocks[i].long().repeat_interleave(BLOCK)[:n] * BLOCK + torch.arange(n) % BLOCK for i, n in enumerate(lens)]
    )
    layer = torch.nn.Module()
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    output = torch.full((padded, HEADS, HEAD_SIZE), 42.0)
    metadata = FastAttentionMetadata(
        query_start_loc=torch.tensor([0, 21, 26], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=blocks,
        causal=True,
    )
    impl.forward(layer, query, key, value, cache, metadata, output)
    start = 0
    for n in lens:
        part = slice(start, start + n)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[part].transpose(0, 1).double(),
            key[part].transpose(0, 1).double().repeat_interleave(HEADS // KV_HEADS, 0),
            value[part].transpose(0, 1).double().repeat_interleave(HEADS // KV_HEADS, 0),
            is_causal=True,
        ).transpose(0, 1)
        torch.testing.assert_close(output[part].double(), expected, atol=2e-6, rtol=1e-5)
        start += n
    assert (output[tokens:] == 42.0).all()
    written = keys_before_values(cache, HEAD_SIZE)[0]
    assert int((~written.isnan()).sum()) == tokens * KV_HEADS * HEAD_SIZE, "only the given slots may be written"


def test_another_cache_can_be_bound_later() -> None:
    """Each cache is bound in turn, in one case read first, in the other written first; the given one is always used."""
    impl, layer = FastAttentionImpl(HEADS, HEAD_SIZE, 1.0, KV_HEADS), torch.nn.Module()
    query, states = torch.randn(1, HEADS, HEAD_SIZE), torch.randn(2, 1, KV_HEADS, HEAD_SIZE)
    caches = [kv_caches.empty_cache(kv_caches.kinds()[0], 3, BLOCK, KV_HEADS, HEAD_SIZE) for _ in range(2)]
    metadata = FastAttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        causal=True,
    )
    for cache, value in zip(caches, states, strict=True):
        impl.do_kv_cache_update(layer, value, value, cache, torch.tensor([BLOCK]))
    for cache, value in [*zip(caches, states, strict=True)] * 2:
        output = impl.forward(layer, query, value, value, cache, metadata, torch.empty_like(query))
        torch.testing.assert_close(output, value.repeat_interleave(HEADS // KV_HEADS, 1))


@pytest.mark.parametrize("kind", kv_caches.kinds())
@pytest.mark.parametrize("kv_cache_dtype", support.FP8_CACHES)
def test_an_fp8_cache_is_read_and_written_with_the_layers_scales(kind: str, kv_cache_dtype: str) -> None:
    dtype = support.FP8_CACHES[kv_cache_dtype]
    torch.manual_seed(0)
    cache = kv_caches.empty_cache(kind, 4, BLOCK, KV_HEADS, HEAD_SIZE)
    cache = torch.empty_strided(cache.shape, cache.stride(), dtype=torch.uint8).fill_(0x7F)  # NaN in both formats
    impl = FastAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, kv_cache_dtype=kv_cache_dtype)
    layer: Any = torch.nn.Module()
    layer._k_scale_float, layer._v_scale_float = 0.02, 0.3
    key, value = torch.randn(9, KV_HEADS, HEAD_SIZE), torch.randn(9, KV_HEADS, HEAD_SIZE)
    query = torch.randn(9, HEADS, HEAD_SIZE)
    impl.do_kv_cache_update(layer, key, value, cache, torch.arange(9) + 2 * BLOCK)
    stored = keys_before_values(cache.view(dtype), HEAD_SIZE)
    expected_key, expected_value = ((x / s).to(dtype).float() for x, s in ((key, 0.02), (value, 0.3)))
    assert torch.equal(stored[0][2, :9].float(), expected_key)
    assert torch.equal(stored[1][2, :9].float(), expected_value)

    metadata = FastAttentionMetadata(
        query_start_loc=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
        block_table=torch.tensor([[2]], dtype=torch.int32),
        causal=True,
    )
    output = impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        expected_key.transpose(0, 1).double().repeat_interleave(HEADS // KV_HEADS, 0) * 0.02,
        expected_value.transpose(0, 1).double().repeat_interleave(HEADS // KV_HEADS, 0) * 0.3,
        is_causal=True,
    ).transpose(0, 1)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


def test_an_encoder_ignores_cache_dtype_and_scales() -> None:
    states = torch.randn(5, HEADS, HEAD_SIZE)
    metadata = FastAttentionMetadata(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        causal=False,
    )
    layer: Any = torch.nn.Module()
    layer._k_scale_float = layer._v_scale_float = 3.0
    outputs = []
    for kv_cache_dtype in ("auto", "fp8"):
        impl = FastAttentionImpl(
            HEADS, HEAD_SIZE, 1.0, kv_cache_dtype=kv_cache_dtype, attn_type=AttentionType.ENCODER_ONLY
        )
        empty = torch.tensor([])
        impl.do_kv_cache_update(layer, states, states, empty, torch.arange(5))
        outputs.append(impl.forward(layer, states, states, states, empty, metadata, torch.empty_like(states)))
    assert torch.equal(*outputs)


def test_profiling_runs_without_metadata_give_zeros() -> None:
    impl = FastAttentionImpl(HEADS, HEAD_SIZE, 1.0, KV_HEADS)
    states = torch.randn(5, HEADS, HEAD_SIZE)
    output = impl.forward(torch.nn.Module(), states, states, states, torch.tensor([]), None, torch.empty_like(states))
    assert not output.any()


def test_metadata_is_truncated_to_the_real_requests() -> None:
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 5, 5], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 2, 5, 5], dtype=torch.int32),
        seq_lens=torch.tensor([2, 9, 0], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=5,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=torch.zeros(3, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(5, dtype=torch.int64),
    )
    builder = object.__new__(FastAttentionMetadataBuilder)
    metadata = builder.build(0, common)
    assert metadata.query_start_loc.tolist() == [0, 2, 5]
    assert metadata.seq_lens.tolist() == [2, 9]
    assert metadata.block_table.shape == (2, 4)
    assert metadata.causal is True


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"attn_type": AttentionType.ENCODER_DECODER}, "encoder_decoder"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "fp8_per_token_head"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ],
)
def test_a_layer_with_unsupported_features_is_refused(asked: dict[str, object], named: str) -> None:
    with pytest.raises(Refusal, match=named):
        FastAttentionImpl(HEADS, HEAD_SIZE, 1.0, KV_HEADS, **asked)  # type: ignore[arg-type]


def test_an_unusable_cpu_stops_the_start_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(binding.THREADS_BIND, "0,100000")
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", lambda: SimpleNamespace(local_rank=0))
    parallel = SimpleNamespace(local_world_size=1)
    with pytest.raises(Refusal, match=r"CPU 100000 is offline .* VLLM_CPU_OMP_THREADS_BIND, or unset it\."):
        start_cpu_threads(SimpleNamespace(additional_config={}, parallel_config=parallel))


@pytest.mark.parametrize(("rank", "ranks", "threads"), [(0, 1, 5), (1, 2, 3)])
def test_unbound_threads_are_not_pinned(rank: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setenv(binding.THREADS_BIND, "nobind")
    monkeypatch.setattr(topology, "physical_cpus", lambda: list(range(5)))
    monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", lambda: SimpleNamespace(local_rank=rank))
    monkeypatch.setattr("fastattention_vllm.attention.cpu.kernels.set_num_threads", lambda *given: asked.append(given))
    parallel = SimpleNamespace(local_world_size=ranks)
    start_cpu_threads(SimpleNamespace(additional_config={}, parallel_config=parallel))
    assert asked == [(threads, [])]
