"""The backend for old GPUs, with vLLM's own metadata classes and the simulated V100 instead of a GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.integration.cpu import backend
from fastattention_vllm.integration.cuda import volta as backend_volta
from fastattention_vllm.integration.cuda import xformers as backend_xformers
from fastattention_vllm.integration.host_layers import metadata
from fastattention_vllm.integration.refusal import Refusal
from kernels.volta import variants
from tests.attention import oracle
from tests.attention.oracle import Case
from tests.attention.volta import simulated_gpu
from tests.attention.volta.conftest import described_kernels  # noqa: F401  an autouse fixture
from tests.kernels.volta.attention import TOLERANCE

HEADS, KV_HEADS, SIZE, PAGE = 8, 2, 64, 16
WIDTH = 40
"""Columns of vLLM's block table, independent of the step's requests."""
CPU = torch.device("cpu")


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            get_num_kv_heads=lambda parallel: KV_HEADS,
            max_model_len=600,
            hf_config=SimpleNamespace(),
        ),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "scheduler_config": SimpleNamespace(max_num_seqs=6),
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[], calculate_kv_scales=False),
    }
    return SimpleNamespace(**(parts | changes))


def builder(**changes: Any) -> backend_volta.VoltaMetadataBuilder:
    return backend_volta.VoltaMetadataBuilder(
        SimpleNamespace(block_size=PAGE, head_size=SIZE), ["layer"], config(**changes), CPU
    )


SPECULATION = {"speculative_config": SimpleNamespace(num_speculative_tokens=3)}


def case(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes: Any) -> AttentionProblem:
    return Case(q_lens, kv_lens, HEADS, KV_HEADS, SIZE, PAGE, torch.float16, **changes).build()


def slots(problem: AttentionProblem) -> torch.Tensor:
    """The slots for the new tokens' keys and values."""
    assert problem.block_table is not None
    found = []
    for seq, kv_len in enumerate(problem.seq_lens.tolist()):
        begin, end = problem.query_start_loc[seq : seq + 2].tolist()
        for position in range(kv_len - (end - begin), kv_len):
            found.append(int(problem.block_table[seq, position // PAGE]) * PAGE + position % PAGE)
    return torch.tensor(found, dtype=torch.int64)


def common(problem: AttentionProblem) -> CommonAttentionMetadata:
    assert problem.block_table is not None
    tokens = torch.diff(problem.query_start_loc)
    return CommonAttentionMetadata(
        query_start_loc=problem.query_start_loc,
        query_start_loc_cpu=problem.query_start_loc,
        seq_lens=problem.seq_lens,
        num_reqs=problem.num_seqs,
        num_actual_tokens=int(problem.query_start_loc[-1]),
        max_query_len=int(tokens.max()),
        max_seq_len=int(problem.seq_lens.max()),
        block_table_tensor=torch.nn.functional.pad(
            problem.block_table.clamp(min=0), (0, WIDTH - problem.block_table.shape[1])
        ),
        slot_mapping=slots(problem),
    )


LAYER = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=2.0)
"""The attributes that vLLM sets on a layer with an fp8 cache."""


def attend(problem: AttentionProblem, metadata: Any, impl: Any) -> torch.Tensor:
    """Run the layer. The new keys and values are not in the cache yet."""
    cache = problem.key._base
    assert cache is not None
    cache = cache.clone()
    where = slots(problem)
    pages, rows = where // PAGE, where % PAGE
    new = [part[pages, rows].clone() for part in (problem.key, problem.value)]
    cache[pages, :, rows] = torch.full((), float("nan")).to(cache.dtype)
    if cache.dtype != torch.float16:  # new keys and values come in fp16, and vLLM declares such caches as bytes
        scales = (problem.key_scale, problem.value_scale)
        new = [(part.float() * scale).half() for part, scale in zip(new, scales, strict=True)]
        cache = cache.view(torch.uint8)
    key_value = torch.stack(new, 1)
    impl.do_kv_cache_update(LAYER, key_value[:, 0], key_value[:, 1], cache, where)
    out = torch.full((len(problem.query), HEADS, SIZE), 7.0, dtype=torch.float16)
    impl.forward(LAYER, problem.query, key_value[:, 0], key_value[:, 1], cache, metadata, out)
    return out


def layer(**changes: Any) -> Any:
    return backend_volta.FastAttentionVoltaImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **changes)


def check(problem: AttentionProblem, found: torch.Tensor) -> None:
    real = int(problem.query_start_loc[-1])
    expected, _ = oracle.attention(problem)
    assert float((found[:real].double() - expected[:real]).abs().max()) < TOLERANCE
    assert (found[real:] == 7).all(), "padding must not be touched"


def test_a_step_of_decoding_requests_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 query heads per KV head, requests of up to 2 tokens use the decode kernel; others get another launch."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((1, 2, 1, 20, 5), (200, 33, 1, 20, 70), padding=3)
    metadata = builder().build(0, common(problem))
    check(problem, attend(problem, metadata, layer()))
    assert [(name, grid[2]) for name, grid in grids] == [
        ("fa_volta_write_kv", 1),
        ("fa_volta_decode", 2),
        ("fa_volta_combine", 3),
        ("fa_volta_prefill", 2),
    ]


def test_a_step_of_a_server_that_speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of up to 4 tokens decode, also without proposals. No token sees later tokens of its own step."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((4, 1, 3, 20, 5), (200, 33, 70, 20, 70), padding=3)
    metadata = builder(**SPECULATION).build(0, common(problem))
    check(problem, attend(problem, metadata, layer()))
    assert [(name, grid) for name, grid in grids[1:]] == [
        ("fa_volta_decode_wide", (KV_HEADS, 3, 2)),
        ("fa_volta_combine", (16, KV_HEADS, 3)),
        ("fa_volta_prefill", (KV_HEADS, 1, 2)),
    ]


def test_an_answer_does_not_depend_on_what_others_have_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bit for bit: one kernel decodes all requests of a server that speculates, whatever is in the step."""
    simulated_gpu.use(monkeypatch)
    mixed, speculating = case((1, 4), (300, 70)), builder(**SPECULATION)
    assert mixed.block_table is not None
    alone = replace(
        mixed,
        query=mixed.query[:1],
        query_start_loc=mixed.query_start_loc[:2],
        seq_lens=mixed.seq_lens[:1],
        block_table=mixed.block_table[:1],
    )
    together = attend(mixed, speculating.build(0, common(mixed)), layer())
    assert torch.equal(together[:1], attend(alone, speculating.build(0, common(alone)), layer()))


def test_a_captured_graph_of_a_server_that_speculates(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures steps of 4 tokens for each request; the replay reads a later step's lengths."""
    grids = simulated_gpu.use(monkeypatch)
    capturing = builder(**SPECULATION)
    captured = capturing.build_for_cudagraph_capture(common(case((4, 4), (4, 4))))
    problem = case((4, 4), (300, 599), seed=3)
    capturing.build(0, common(problem))
    monkeypatch.setattr(torch, "empty", None)
    check(problem, attend(problem, captured, layer()))
    assert ("fa_volta_decode_wide", (KV_HEADS, 2, 5)) in grids


def test_more_short_prompts_than_the_workspace_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace is sized for decoding requests. Prompts with as few rows then run in the prefill kernel."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((6, 8), (300, 50))
    found = builder()
    workspace, room = found.workspace, 2 * KV_HEADS * 3 * 32 * (SIZE // 2 + 1)
    for size, kind in ((room, "decode_wide"), (room - 1, "prefill")):
        found.workspace = workspace.new_empty(size)
        check(problem, attend(problem, found.build(0, common(problem)), layer()))
        assert f"fa_volta_{kind}" in [name for name, _ in grids]
        grids.clear()


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_caches(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled by the layer's scales."""
    simulated_gpu.use(monkeypatch)
    problem = case((1, 9), (100, 50), kv_dtype=dtype, key_scale=0.5, value_scale=2.0)
    check(problem, attend(problem, builder().build(0, common(problem)), layer(kv_cache_dtype=name)))


def test_unsupported_caches_are_refused() -> None:
    """vLLM itself refuses the dtypes that the backend does not list, such as int8_per_token_head."""
    cache = SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=["3"], calculate_kv_scales=False)
    with pytest.raises(Refusal, match=r"--kv-cache-dtype-skip-layers 3\) is not supported: .* or fp8_e5m2\."):
        backend_volta.VoltaMetadataBuilder(None, ["layer"], config(cache_config=cache), CPU)
    accepted = backend_volta.FastAttentionVoltaBackend.supports_kv_cache_dtype
    assert all(map(accepted, ("auto", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")))
    assert not any(map(accepted, ("bfloat16", "int8_per_token_head", "fp8_per_token_head", "nvfp4")))


def test_keys_of_a_chunk_after_a_long_context_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are few CTAs, so the keys are split into parts, whose sums are in the builder's workspace."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((10,), (590,))
    metadata = builder().build(0, common(problem))
    monkeypatch.setattr(torch, "empty", None)
    check(problem, attend(problem, metadata, layer()))
    assert grids[1:] == [("fa_volta_prefill", (4 * KV_HEADS, 1, 1)), ("fa_volta_combine", (40, KV_HEADS, 1))]


def test_more_new_tokens_than_the_grid_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = simulated_gpu.use(monkeypatch)
    problem = case((20,), (200,))
    out = torch.empty(20, HEADS, SIZE, dtype=torch.float16)
    most = 65535 * variants.prefill(SIZE).rows * KV_HEADS // HEADS
    with pytest.raises(
        ValueError, match=f"^a sequence has {most + 1} new tokens, .* with 4 .* at most {most} at a time"
    ):
        volta.attend(problem, volta.Extent(most + 1, most + 1), out)
    assert not grids


@pytest.mark.parametrize("tokens", [1, 20])
def test_more_sequences_than_the_grid_limit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are the second dimension of a grid in decoding, and the third in prefill."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((tokens,), (200,))
    many = replace(problem, seq_lens=problem.seq_lens.expand(65536))
    with pytest.raises(
        ValueError, match=r"^the batch has 65536 .* at most 65535 at a time; .* --max-num-seqs 65535 or less to"
    ):
        volta.attend(many, volta.Extent(tokens, 200), torch.empty_like(many.query))
    assert not grids


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"sliding_window": 40}, {"window": (39, -1)}),
        pytest.param({"logits_soft_cap": 2.0}, {"softcap": 2.0}, marks=pytest.mark.more),
        ({"sinks": torch.linspace(-1, 1, HEADS)}, {"sinks": torch.linspace(-1, 1, HEADS)}),
    ],
    ids=["window", "soft cap", "sinks"],
)
def test_a_layers_own_features(changes: dict[str, Any], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_gpu.use(monkeypatch)
    problem = replace(case((1, 9), (100, 50)), **asked)
    check(problem, attend(problem, builder().build(0, common(problem)), layer(**changes)))


def test_blocks_of_rows_for_the_following_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full form of tiling-AllReduce: each block is complete, and announced, before the next one begins."""
    grids = simulated_gpu.use(monkeypatch)
    problem = case((1, 2, 30, 9), (200, 33, 30, 70), padding=3)
    told: list[tuple[Any, ...]] = []

    class Ready:
        def begin(self, out: torch.Tensor) -> None:
            told.append(("begin", bool((out == 7).all())))

        def mark(self, out: torch.Tensor, end: int) -> None:
            told.append((end, bool((out[:end] != 7).any(2).all()), bool((out[end:] == 7).all())))

    following = SimpleNamespace(ready=Ready(), of=lambda tokens: (16, 16, 13))
    monkeypatch.setattr(backend_volta.row_parallel, "attention_blocks", lambda: following)
    metadata = builder().build(0, common(problem))
    check(problem, attend(problem, metadata, layer()))
    assert told == [("begin", True), (16, True, True), (32, True, True), (42, True, True)]
    kernels = [name.removeprefix("fa_volta_") for name, _ in grids]
    assert kernels == ["write_kv", "decode", "combine", "prefill", "prefill", "prefill"]
    assert not builder().build_for_cudagraph_capture(common(problem)).blocks


@pytest.mark.parametrize(("tokens", "causal"), [((1, 2), True), ((20, 30), False)])
def test_steps_that_are_not_split(tokens: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    following = SimpleNamespace(of=lambda rows: (rows,) if rows < 16 else (rows - 8, 8))
    monkeypatch.setattr(backend_volta.row_parallel, "attention_blocks", lambda: following)
    step = common(case(tokens, (40, 40)))
    step.causal = causal
    assert not builder().build(0, step).blocks


def test_the_buffers_of_a_captured_graph_are_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the metadata of the capture, and only the buffers of a later build(): the replay reads the later step."""
    grids = simulated_gpu.use(monkeypatch)
    capturing = builder()
    captured = capturing.build_for_cudagraph_capture(common(case((1, 1, 1), (1, 1, 1))))
    assert captured.request_groups[0].extent.longest == 600
    problem = case((1, 1, 1), (300, 17, 599), seed=3)
    capturing.build(0, common(problem))
    check(problem, attend(problem, captured, layer()))
    assert ("fa_volta_decode", (KV_HEADS, 3, 5)) in grids


def test_builders_share_the_workspace_that_a_layer_reserved() -> None:
    """The layer reserves it, so that vLLM's profile counts it. Builders share it; a larger head size needs more."""
    reserved = backend_volta.workspace(config(), SIZE, CPU)
    assert builder().workspace is builder().workspace is reserved
    assert reserved.numel() == volta.partial_floats(SIZE, HEADS // KV_HEADS, KV_HEADS, 6, 600)
    assert backend_volta.workspace(config(), 4 * SIZE, CPU).numel() > reserved.numel()
    decoding = 6 * KV_HEADS * 5 * 16 * (SIZE // 2 + 1)  # requests, KV heads, parts, rows
    assert volta.partial_floats(SIZE, HEADS // KV_HEADS, KV_HEADS, 6, 600, speculated=3) >= decoding


def test_the_profiling_run_returns_zeros() -> None:
    out = torch.full((3, HEADS, SIZE), 7.0)
    empty = torch.empty(0)
    assert (layer().forward(None, empty, empty, empty, empty, None, out) == 0).all()


def test_the_fast_prefill_of_layers_that_share_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """--kv-sharing-fast-prefill: vLLM's own class wraps ours and computes only the last token of each request."""
    simulated_gpu.use(monkeypatch)
    problem = case((1, 20, 9), (100, 20, 70))
    last = problem.query_start_loc[1:] - 1
    asked = {"logits_indices_padded": last, "num_logits_indices": len(last), "max_logits_per_req": 1}
    known = {field.name for field in fields(CommonAttentionMetadata)}
    step = replace(common(problem), **{name: value for name, value in asked.items() if name in known})
    wrapped = create_fast_prefill_custom_backend("Fast", backend_volta.FastAttentionVoltaBackend).get_builder_cls()
    metadata = wrapped(SimpleNamespace(block_size=PAGE, head_size=SIZE), ["layer"], config(), CPU).build(0, step)
    assert metadata.num_logits_indices == 3
    alone = replace(problem, query=problem.query[last], query_start_loc=torch.arange(4, dtype=torch.int32))
    out = torch.full((3, HEADS, SIZE), 7.0, dtype=torch.float16)
    layer().forward(LAYER, alone.query, None, None, problem.key._base, metadata, out)
    check(alone, out)


def test_chunks_of_attention_are_refused() -> None:
    spec = SimpleNamespace(block_size=PAGE, head_size=SIZE, attention_chunk_size=8192)
    with pytest.raises(Refusal, match=r"attends within chunks of 8192 tokens, .* serve another model\.$"):
        backend_volta.VoltaMetadataBuilder(spec, ["layer"], config(), CPU)


class OnGpu:
    """Sinks that claim to be on a GPU; their values can only be copied to the host."""

    device = torch.device("cuda", 0)
    dtype = torch.float32

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def detach(self) -> OnGpu:
        return self

    float = detach

    def to(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cuda" else self.numbers


def test_a_host_layers_sinks_are_copied_to_the_cpu() -> None:
    """GPT-OSS: the weights are on the GPU, and the CPU computes its part of the layer."""
    sinks = torch.linspace(-1, 1, HEADS)
    expected = replace(case((1, 9), (100, 50)), sinks=sinks)
    impl = layer(sinks=OnGpu(sinks))
    assert impl.why_not_on_host() is None
    names = ("query", "key", "value", "query_start_loc", "seq_lens", "block_table", "causal")
    problem = impl.problem(LAYER, **{name: getattr(expected, name) for name in names})
    out, _ = cpu.run(problem)
    assert float((out.double() - oracle.attention(expected)[0]).abs().max()) < TOLERANCE
    query = SimpleNamespace(device=OnGpu.device)
    assert impl.problem(LAYER, **dict.fromkeys(names[1:]), query=query).sinks is impl.sinks, "must be the GPU's part"


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_host_layers_take_no_fp8_cache(name: str) -> None:
    assert layer(kv_cache_dtype=name).why_not_on_host() == f"--kv-cache-dtype {name}"
    assert layer().why_not_on_host() is None


BUILDERS = {
    "cpu": backend.FastAttentionMetadataBuilder,
    "volta": backend_volta.VoltaMetadataBuilder,
    "host layers": metadata.HostMetadataBuilder,
    "xformers": backend_xformers.XformersMetadataBuilder,
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_causality_per_request_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "start_cpu_threads", lambda config: None)
    runtime = SimpleNamespace(Stream=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)
    step = common(case((1, 2), (5, 9)))
    step.causal = torch.ones(2, dtype=torch.int32)
    made = BUILDERS[kind](SimpleNamespace(block_size=PAGE, head_size=SIZE), ["layer"], config(), CPU)
    with pytest.raises(
        Refusal, match="uses a causal mask in some requests and none in others, which fastattention does not support"
    ):
        made.build(0, step)


def test_other_scales_are_not_loaded_again() -> None:
    """Captured graphs have the first ones as numbers."""
    impl = backend_volta.FastAttentionVoltaImpl(HEADS, SIZE, 0.125, KV_HEADS, kv_cache_dtype="fp8")
    layer = SimpleNamespace(impl=impl, _k_scale_float=0.25, _v_scale_float=0.5)
    context = {"other": SimpleNamespace(impl=None), "layer": layer, "norm": SimpleNamespace()}
    found: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    for one in (found, found, None):
        impl._check_scales(one)
    layer._v_scale_float = 0.75
    with pytest.raises(
        Refusal, match=r"new weights have KV cache scales \(0.25, 0.75\) instead of \(0.25, 0.5\),.*again"
    ):
        impl._check_scales(None)
