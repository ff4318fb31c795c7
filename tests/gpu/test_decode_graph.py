"""Whole decode steps as CUDA graphs with host layers in them: the same answers as vLLM's own backend, on both ways."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fastattention_vllm.attention import flash
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.placement import cuda_bell, host_memory
from fastattention_vllm.placement.graph_calls import GraphBatch, GraphCalls
from fastattention_vllm.placement.graph_copies import GraphCopies
from fastattention_vllm.placement.host_attention import HostAttention, HostLayerGroup
from fastattention_vllm.placement.link import CudaLink
from fastattention_vllm.placement.pinning import CudaPinning
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import Batch
from tests import reference_models as reference
from tests.attention import oracle
from tests.gpu.apart import apart
from tests.gpu.test_engine import ALLOWED, GPU, LAYERS, LENGTHS, Steps, check, model  # noqa: F401
from tests.integration.engine import NGRAM, check_drafts, engine, generate
from tests.placement.scenario import Model
from tests.reference_models import random_prompts, repeating_prompts, save_repetitive, save_smooth_gpt_oss

GRAPHS: dict[str, Any] = {"enforce_eager": False}
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "whole graphs only": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "prefix caching": {"enable_prefix_caching": True},
    "no async": {"async_scheduling": False},
    "few blocks": {"kv_cache_memory_bytes": 1792 << 10, "max_model_len": 1536},
}
"""Memory is of one device layer: 1 KiB a token. In few blocks, the longest prompt preempts others."""


def changes_of(way: str, hosts: int) -> dict[str, Any]:
    found = dict(WAYS[way])
    if "kv_cache_memory_bytes" in found:
        found["kv_cache_memory_bytes"] *= LAYERS - hosts
    return found


def steps_of(completions: list[Any]) -> list[Steps]:
    return [[(t, step[t].logprob) for t, step in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]


def ask(llm: Any, prompts: list[list[int]], tokens: int) -> list[Steps]:
    return steps_of([output.outputs[0] for output in generate(llm, prompts, max_tokens=tokens)])


def answer(
    path: Path, prompts: list[list[int]], tokens: int = 12, *, alone: bool = False, **changes: Any
) -> tuple[list[Steps], int]:
    """Answers, and the number of calls that graphs have made of the CPU. ``alone``: one request after the other."""
    with engine(path, **(GPU | GRAPHS | changes)) as llm:
        found = host_layers.find(llm.llm_engine.vllm_config)
        thread = found.graph_calls.thread if found and found.graph_calls else None
        before = thread.counters().calls if thread else 0
        parts = [[prompt] for prompt in prompts] if alone else [prompts]
        steps = [one for part in parts for one in ask(llm, part, tokens)]
        if "speculative_config" in changes:
            check_drafts(llm)
        return steps, thread.counters().calls - before if thread else 0


def calls_of(worker: Any) -> int:
    """The number of calls that graphs of this rank have made of the CPU."""
    found = host_layers.find(worker.vllm_config)
    return found.graph_calls.thread.counters().calls if found and found.graph_calls else 0


def answer_of_ranks(path: Path, prompts: list[list[int]], **changes: Any) -> tuple[list[Steps], list[int]]:
    """Answers, and each rank's calls, which are made in processes of the ranks."""
    with engine(path, **(GPU | GRAPHS | changes)) as llm:
        return ask(llm, prompts, 12), llm.collective_rpc(calls_of)


@functools.cache
def of_flash_attn(path: Path, compiled: bool) -> list[Steps]:
    way = {} if compiled else WAYS["whole graphs only"]
    steps, _ = apart(answer, path, random_prompts(LENGTHS), attention_backend="FLASH_ATTN", **way)
    return steps


def test_a_graph_rings_and_waits() -> None:
    """Each replay reads what is there then: here the thread adds up what earlier calls have stored."""
    bell = cuda_bell.create()
    assert not isinstance(bell, str), bell
    calls = GraphCalls(CudaLink(torch.device("cuda")), CudaPinning(), bell)
    group = HostLayerGroup(calls.link, None)  # type: ignore[arg-type]
    cache = host_memory.commit(9 * 2 * 4 * 64 * 4, pin=CudaPinning())[0].view(torch.float32).view(9, 2, 4, 64)
    layer = HostAttention(group, Model(), cache)
    calls.prepare(layer)
    batch = GraphBatch(
        "0",
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
        torch.arange(1, 9, dtype=torch.int32, device="cuda")[None],
        torch.tensor([4], device="cuda"),
    )
    query, key, value, output = (torch.zeros(1, heads, 32, device="cuda") for heads in (4, 2, 2, 4))
    calls.reserve(batch, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.bring_down(batch)
        calls.attend(layer, batch, query, key, value, output)
    for step in range(1, 20):
        value.fill_(step)
        batch.seq_lens.fill_(step)
        batch.slot_mapping.fill_(4 + step - 1)
        graph.replay()
        torch.testing.assert_close(output, torch.full_like(output, (step + 1) / 2))
    assert calls.thread.counters().calls == 19


class Captured(NamedTuple):
    """A graph, and the tensors that it reads and writes where they are."""

    graph: torch.cuda.CUDAGraph
    batch: GraphBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


def captured(calls: GraphCalls, layer: HostAttention, there: torch.Tensor, dtype: torch.dtype) -> Captured:
    """The next token of one request, whose blocks are ``there``. All keys are zero."""
    batch = GraphBatch(
        "0",
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
        there.cuda(),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    query, key, value, output = (torch.zeros(1, heads, 64, dtype=dtype, device="cuda") for heads in (4, 2, 2, 4))
    calls.reserve(batch, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.bring_down(batch)
        calls.attend(layer, batch, query, key, value, output)
    return Captured(graph, batch, query, key, value, output)


def test_a_graph_does_not_ring_if_the_copies_hold_everything() -> None:
    """And the host pool gets what the copies get. A step that needs the CPU rings again."""
    bell = cuda_bell.create()
    assert not isinstance(bell, str), bell
    shape, dtype = (9, 2, 16, 128), torch.float16
    calls = GraphCalls(CudaLink(torch.device("cuda")), CudaPinning(), bell, device=flash)
    group = HostLayerGroup(calls.link, flash)
    cache = host_memory.commit(torch.Size(shape).numel() * 2, pin=CudaPinning())[0].view(dtype).view(shape)
    blocks = ResidentBlocks(9, 2)
    layer = HostAttention(
        group, Model(head_size=64, dtype=dtype), cache, None, torch.zeros(2, *shape[1:]).to("cuda", dtype)
    )
    calls.prepare(layer)
    calls.copies = GraphCopies(calls.link, blocks, 16)
    calls.copies.table = "0"
    there = torch.tensor([[5, 3, 7, 1]], dtype=torch.int32)
    step = captured(calls, layer, there, dtype)
    for length in range(1, 61):
        slot = torch.tensor([int(there[0, (length - 1) // 16]) * 16 + (length - 1) % 16])
        lengths = torch.tensor([length], dtype=torch.int32)
        blocks.admit(Batch(torch.tensor([0, 1], dtype=torch.int32), lengths, there, slot, slot), 16)
        calls.copies.bring_up()
        step.value.fill_(length)
        step.batch.seq_lens.copy_(lengths)
        step.batch.slot_mapping.copy_(slot)
        step.graph.replay()
        torch.testing.assert_close(step.output, torch.full_like(step.output, (length + 1) / 2), rtol=2e-3, atol=0.0)
        assert calls.thread.counters().calls == max(0, length - 32)
        assert float(cache[int(slot) // 16, 0, int(slot) % 16, -1]) == length


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_graph_reads_over_the_link_beside_the_cpu(fraction: float) -> None:
    """What the CPU has stored in earlier steps, too."""
    bell = cuda_bell.create()
    assert not isinstance(bell, str), bell
    shape, dtype = (9, 2, 16, 128), torch.float16
    calls = GraphCalls(CudaLink(torch.device("cuda")), CudaPinning(), bell, device=flash)
    cache = host_memory.commit(torch.Size(shape).numel() * 2, pin=CudaPinning())[0].view(dtype).view(shape)
    layer = HostAttention(HostLayerGroup(calls.link, flash), Model(head_size=64, dtype=dtype), cache)
    calls.prepare(layer)
    assert calls.share_over_link(fraction)
    there = torch.tensor([[5, 3, 7, 1]], dtype=torch.int32)
    step = captured(calls, layer, there, dtype)
    tokens = 0
    for length in range(1, 61):
        step.value.fill_(length)
        step.batch.seq_lens.fill_(length)
        step.batch.slot_mapping.fill_(int(there[0, (length - 1) // 16]) * 16 + (length - 1) % 16)
        step.graph.replay()
        torch.testing.assert_close(step.output, torch.full_like(step.output, (length + 1) / 2), rtol=2e-3, atol=0.0)
        whole = (length - 1) // 16
        tokens += 16 * min(int(torch.tensor(fraction, dtype=torch.float32) * whole), max(0, whole - 1))
    assert tokens
    assert calls.counters().decode_streamed_bytes == tokens * 2 * 128 * 2


@functools.cache
def sinks_on_gpu(num_heads: int) -> torch.Tensor:
    return (torch.arange(num_heads) / 2 - 1).cuda()  # as Model's


class GpuModel(Model):
    """Its sinks are on the GPU before a capture, in which nothing can be copied from a CPU's tensor."""

    def problem(self, **parts: Any) -> AttentionProblem:
        if not (self.has_sinks and parts["query"].is_cuda):
            return super().problem(**parts)
        return replace(self, has_sinks=False).problem(**({"sinks": sinks_on_gpu(self.num_heads)} | parts))


@pytest.mark.parametrize("lengths", [(1500,), (1500, 17, 300, 900, 0)], ids=["one", "several and padding"])
@pytest.mark.parametrize("fraction", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_shared_reading_equals_attention_over_everything(
    dtype: torch.dtype, head_size: int, page_size: int, has_sinks: bool, fraction: float, lengths: tuple[int, ...]
) -> None:
    """Random keys and values, and sequences with whole blocks and without. Padding has length 0."""
    bell = cuda_bell.create()
    assert not isinstance(bell, str), bell
    requests, width = sum(length > 0 for length in lengths), 2048 // page_size
    spec = GpuModel(num_heads=8, head_size=head_size, page_size=page_size, dtype=dtype, has_sinks=has_sinks)
    shape = (len(lengths) * width, spec.num_kv_heads, page_size, 2 * head_size)
    generator = torch.Generator().manual_seed(0)
    cache = host_memory.commit(torch.Size(shape).numel() * 2, pin=CudaPinning())[0].view(dtype).view(shape)
    cache.copy_(torch.randn(shape, generator=generator))
    calls = GraphCalls(CudaLink(torch.device("cuda")), CudaPinning(), bell, device=flash)
    layer = HostAttention(HostLayerGroup(calls.link, flash), spec, cache)
    calls.prepare(layer)
    assert calls.share_over_link(fraction)
    table = torch.randperm(len(cache), generator=generator).int().view(len(lengths), width)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    last = seq_lens.long() - 1
    slots = table.gather(1, last.clamp(min=0)[:, None] // page_size)[:, 0].long() * page_size + last % page_size
    slots[last < 0] = -1
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32).clamp(max=requests)
    batch = GraphBatch("0", starts.cuda(), seq_lens.cuda(), table.cuda(), slots.cuda())
    rows = [torch.randn(len(lengths), heads, head_size, generator=generator) for heads in (8, 2, 2)]
    tensors = [part.to("cuda", dtype) for part in rows]
    output = torch.zeros_like(tensors[0])
    calls.reserve(batch, dtype)
    gc.collect()  # what other tests have pinned must not be released during the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.bring_down(batch)
        calls.attend(layer, batch, *tensors, output)
    graph.replay()
    problem = spec.problem(
        query=tensors[0][:requests].cpu(),
        **layer.in_cache(),
        query_start_loc=starts[: requests + 1],
        seq_lens=seq_lens[:requests],
        block_table=table[:requests],
        causal=True,
    )
    expected, _ = oracle.attention(problem)
    # Two parts are rounded to ``dtype``, and then their sum.
    torch.testing.assert_close(output[:requests].cpu().double(), expected, atol=2e-3, rtol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("second_runner", ["0", "1"], ids=["v1", "v2"])
@pytest.mark.parametrize("way", ["compiled", "few blocks"])
def test_a_share_over_the_link_changes_no_answer(
    way: str,
    second_runner: str,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = of_flash_attn(model, True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    config = {"fastattention": {"host_kv_layers": LAYERS - 1, "stream_fraction": 0.6}}
    found, calls = apart(
        answer, model, random_prompts(LENGTHS), additional_config=config, **changes_of(way, LAYERS - 1)
    )
    check(found, expected)
    assert calls >= 8 * (LAYERS - 1), "most decode steps are graphs"


@pytest.mark.parametrize("gib", [0.0005, 0.1])
def test_copies_change_no_answer(gib: float, model: Path) -> None:  # noqa: F811
    """With room for a few blocks, and for everything: then nothing is asked of the CPU."""
    expected = of_flash_attn(model, True)
    config = {"fastattention": {"host_kv_layers": 2, "resident_kv_gib": gib}}
    found, calls = apart(answer, model, random_prompts(LENGTHS), additional_config=config)
    check(found, expected)
    assert bool(calls) == (gib < 0.1)


@pytest.mark.parametrize("section", [{}, {"volta_kernels": "ptx"}], ids=["flash", "volta"])
@pytest.mark.parametrize("second_runner", ["0", "1"], ids=["v1", "v2"])
@pytest.mark.parametrize("hosts", [1, LAYERS - 1])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_vllms_backend(
    way: str,
    hosts: int,
    second_runner: str,
    section: dict[str, Any],
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = of_flash_attn(model, way != "whole graphs only")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    config = {"fastattention": section | {"host_kv_layers": hosts}}
    found, calls = apart(answer, model, random_prompts(LENGTHS), additional_config=config, **changes_of(way, hosts))
    check(found, expected)
    assert calls >= 8 * hosts, "most decode steps are graphs"
    assert calls % hosts == 0


@pytest.mark.parametrize(
    ("section", "peer"),
    [
        ({}, "FLASH_ATTN"),
        ({"stream_fraction": 0}, "FLASH_ATTN"),
        ({"stream_fraction": 0.6}, "FLASH_ATTN"),
        ({"volta_kernels": "ptx"}, "TRITON_ATTN"),
    ],
    ids=["flash", "cpu alone", "share over the link", "volta"],
)
def test_windows_and_sinks(section: dict[str, Any], peer: str, tmp_path: Path) -> None:
    """FlashAttention has sinks in bf16 only, the V100's kernels in fp16 only."""
    path, prompts = save_smooth_gpt_oss(tmp_path), random_prompts(LENGTHS)
    dtype, allowed = ("float16", ALLOWED) if "volta_kernels" in section else ("bfloat16", 2**-4)
    expected, _ = apart(answer, path, prompts, attention_backend=peer, dtype=dtype)
    config = {"fastattention": section | {"host_kv_layers": 2}}  # of 4: one with a window, and one without
    found, calls = apart(answer, path, prompts, additional_config=config, dtype=dtype)
    check(found, expected, allowed)
    assert calls >= 8 * 2, "most decode steps are graphs"


def test_speculation(tmp_path: Path) -> None:
    """Steps are graphs with all drafts, where only some were found, too."""
    path = save_repetitive(reference.llama(8, 2, 128, layers=LAYERS), tmp_path)
    prompts = repeating_prompts()
    section = {"additional_config": {"fastattention": {"host_kv_layers": 2}}}
    plain, _ = apart(answer, path, prompts, 40, alone=True, **section)
    found, calls = apart(answer, path, prompts, 40, alone=True, **section, speculative_config=NGRAM)
    check(found, plain)
    assert calls >= 2 * 40, "about 57 steps, in 12 of which all four drafts are found"


def changing_batches(path: Path, prompts: list[list[int]], turns: int | None) -> list[list[Steps]]:
    """Answers of single requests of several lengths, and of all together. Every ``turns``-th step runs in pieces."""
    section = {"additional_config": {"fastattention": {"host_kv_layers": 3}}}
    with engine(path, **(GPU | GRAPHS | section | {"max_num_seqs": 4})) as llm:
        found: Any = host_layers.find(llm.llm_engine.vllm_config)
        steps = 0

        def allows(contexts: int) -> bool:
            nonlocal steps
            steps += 1
            return turns is None or steps % turns != 0

        found.allows_whole_step = allows
        singles = [ask(llm, [prompt], 2 + 3 * at) for at, prompt in enumerate(prompts)]
        return [*singles, ask(llm, prompts, 20)]


@pytest.mark.parametrize("turns", [None, 2, 3])
def test_batches_of_every_size_and_steps_in_pieces_between(turns: int | None, model: Path) -> None:  # noqa: F811
    """Requests end and others arrive, padding comes and goes, and some steps are not graphs."""
    prompts = random_prompts((1, 700, 33, 5, 260, 90, 16, 17, 800, 2))
    changes = {"additional_config": {"fastattention": {"host_kv_layers": 0}}, "max_num_seqs": 4}
    expected, _ = apart(answer, model, prompts, 30, **changes)
    *singles, together = apart(changing_batches, model, prompts, turns)
    check(together, [steps[:20] for steps in expected])
    check([single[0] for single in singles[3:]], [steps[: 2 + 3 * at] for at, steps in enumerate(expected)][3:])


TILING = {"tiling_all_reduce": 3, "tiling_min_tokens": 128, "tiling_full_form": True}


@pytest.mark.parametrize("gpus", [2, 4], ids=["two_gpus", "four_gpus"])
@pytest.mark.parametrize("kernels", [{}, {"volta_kernels": "ptx"}], ids=["flash", "volta"])
@pytest.mark.parametrize("sums", [{}, TILING, {"push_all_reduce": "auto"}], ids=["vllms", "tiling", "push"])
def test_several_gpus(kernels: dict[str, Any], sums: dict[str, Any], gpus: int, model: Path) -> None:  # noqa: F811
    """Each rank has a thread and a bell of its own. The answers are those of one GPU."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    alone = kernels | {"host_kv_layers": 2}
    expected, _ = apart(answer, model, random_prompts(LENGTHS), additional_config={"fastattention": alone})
    changes = {"additional_config": {"fastattention": alone | sums}, "tensor_parallel_size": gpus}
    # vLLM's own kernel would come before sums by push.
    changes["disable_custom_all_reduce"] = "push_all_reduce" in sums
    found, calls = apart(answer_of_ranks, model, random_prompts(LENGTHS), **changes)
    check(found, expected)
    assert len(calls) == gpus
    assert min(calls) > 0, "most decode steps are graphs"
