"""Whole decode steps as CUDA graphs: what vLLM is told, what a capture does, and when steps run in pieces."""

from __future__ import annotations

import dataclasses
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from fastattention_vllm.integration import compat, support
from fastattention_vllm.integration.cuda import decode_graph, graph_steps
from fastattention_vllm.integration.cuda.decode_graph import GraphMetadataBuilder, graph_calls
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.layers import HostLayerImpl, HostLayers
from fastattention_vllm.integration.host_layers.metadata import HostMetadata, HostMetadataBuilder
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import cuda_bell
from fastattention_vllm.placement.counters import Counters
from fastattention_vllm.placement.graph_copies import GraphCopies
from fastattention_vllm.placement.link import LocalLink
from fastattention_vllm.placement.resident import ResidentBlocks
from fastattention_vllm.placement.step import MAX_CPU_TOKENS, Batch
from fastattention_vllm.placement.stream_split import Rates, StreamSplit, stream_split


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_layers, "smallest", lambda *numbers: list(numbers))


class Calls:
    """Notes what a capture asks for."""

    over_link: Any = None

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.bell = SimpleNamespace(capturing=lambda: True)

    def bring_down(self, batch: Any) -> None:
        self.log.append(("down", batch))

    def attend(self, layer: Any, batch: Any, *tensors: torch.Tensor) -> None:
        self.log.append((layer, batch))
        tensors[-1].fill_(7)

    def counters(self) -> Counters:
        return Counters(cpu_bytes=5)


def host_layers_of(calls: Any, **more: Any) -> HostLayers:
    size = SimpleNamespace(block_size=16)
    placement = SimpleNamespace(host_bytes_per_block=16 * 100, device_size=size)
    done = Counters(cpu_bytes=2, cpu_seconds=1.0)
    group = SimpleNamespace(layers=[], stream_split=None, total=lambda: done)
    values: dict[str, Any] = {
        "runtime": SimpleNamespace(pin=None),
        "group": group,
        "placement": placement,
        "targets": {},
        "budget": 0,
        "max_model_len": 64,
        "nodes": [],
        "stream_fraction": "auto",
        "dtype": torch.float16,
        "graph_calls": calls,
    }
    return HostLayers(**(values | more))


def layer_of(found: HostLayers, name: str) -> HostLayerImpl:
    inner: Any = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
    impl = HostLayerImpl(SimpleNamespace(layer_name=name), inner, found)
    attention: Any = SimpleNamespace(layer=impl)
    impl.attention = attention
    found.group.layers.append(attention)
    return impl


def test_a_capture_copies_each_batch_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    found = host_layers_of(calls)
    layers = [layer_of(found, name) for name in "abcd"]
    batches: list[Any] = [SimpleNamespace(), SimpleNamespace()]
    steps = [HostMetadata(None, graph_batch=batch) for batch in batches]
    of_layer = dict(zip("abcd", (steps[0], steps[1], steps[0], steps[1]), strict=True))
    monkeypatch.setattr(host_layers, "get_forward_context", lambda: SimpleNamespace(attn_metadata=of_layer))
    rows = torch.zeros(2, 4, 8)
    for _ in range(2):  # captured for two sizes
        for name, layer in zip("abcd", layers, strict=True):
            output = layer.forward(None, rows, rows, rows, rows, of_layer[name], torch.zeros_like(rows))  # type: ignore[arg-type]
            assert (output == 7).all()
    first, second = batches
    a, b, c, d = (layer.attention for layer in layers)
    once = [("down", first), (a, first), ("down", second), (b, second), (c, first), (d, second)]
    assert calls.log == once * 2


def test_graphs_before_there_is_a_cache_are_captured_without_calls() -> None:
    calls = Calls()
    layer = layer_of(host_layers_of(calls), "a")
    layer.attention = None
    rows = torch.ones(2, 4, 8)
    assert not layer.forward(None, rows, rows, rows, rows, HostMetadata(None), rows.clone()).any()  # type: ignore[arg-type]
    assert calls.log == []


@pytest.mark.parametrize(
    ("found", "support"),
    [
        (None, AttentionCGSupport.NEVER),
        (host_layers_of(None), AttentionCGSupport.NEVER),
        (host_layers_of(Calls()), AttentionCGSupport.UNIFORM_BATCH),
    ],
    ids=["no host layers", "no doorbell", "doorbell"],
)
def test_vllm_is_told_whether_graphs_may_hold_host_layers(
    monkeypatch: pytest.MonkeyPatch, found: HostLayers | None, support: AttentionCGSupport
) -> None:
    monkeypatch.setattr(host_layers, "find", lambda config: found)
    assert GraphMetadataBuilder.get_cudagraph_support(None, None) is support


def config_of(mode: CUDAGraphMode | None, drafted: int | None = None, copies: float = 0) -> Any:
    speculative = None if drafted is None else SimpleNamespace(num_speculative_tokens=drafted)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        speculative_config=speculative,
        additional_config={"fastattention": {"resident_kv_gib": copies}},
    )


@pytest.mark.parametrize(
    ("mode", "drafted", "why_not", "works"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, None, None, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, 7, None, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 8, None, False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, None, "the driver is too old", False),
        (CUDAGraphMode.PIECEWISE, None, None, False),
        (CUDAGraphMode.NONE, None, None, False),
        (None, None, None, False),
    ],
)
def test_graphs_hold_host_layers_where_everything_allows_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: CUDAGraphMode | None,
    drafted: int | None,
    why_not: str | None,
    works: bool,
) -> None:
    monkeypatch.setattr(cuda_bell, "create", lambda: why_not or SimpleNamespace())
    monkeypatch.setattr(decode_graph, "GraphCalls", lambda *arguments: SimpleNamespace(arguments=arguments))
    monkeypatch.setattr(decode_graph.logger, "propagate", True)
    found: Any = graph_calls(config_of(mode, drafted), LocalLink(), None, 3)  # type: ignore[arg-type]
    assert (found is not None) == works
    wanted = why_not or ("steps of 9 tokens per request" if drafted == 8 else None)
    assert (wanted is None) == ("in pieces instead of one CUDA graph" not in caplog.text)
    assert (wanted or "") in caplog.text


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Installs the choice with these host layers, over methods that return what reaches them."""
    for runner in graph_steps.gpu_model_runners():
        monkeypatch.setattr(runner, "execute_model", lambda self, scheduled, dummy_run=False: self.dispatch())
    monkeypatch.setattr(
        CudagraphDispatcher, "dispatch", lambda self, num_tokens, valid_modes=None, invalid_modes=None: invalid_modes
    )
    monkeypatch.setattr(
        CudaGraphManager, "dispatch", lambda self, num_reqs, num_tokens, uniform_token_count: uniform_token_count
    )

    def install(found: Any) -> None:
        graph_steps.choose_whole_steps(lambda config: found)

    yield install
    if hasattr(CudagraphDispatcher, "_fastattention_step"):
        del CudagraphDispatcher._fastattention_step


def scheduled(*contexts: int, new: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=tokens) for tokens in new],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=list(contexts)),
    )


FULL = {CUDAGraphMode.FULL}


@pytest.mark.parametrize("kind", graph_steps.gpu_model_runners(), ids=["v1", "v2"])
def test_steps_with_long_contexts_run_in_pieces(kind: type[Any], chooses: Callable[[Any], None]) -> None:
    found = host_layers_of(None)
    found.whole_steps_until = 100 * 30
    chooses(found)
    first, second, runner = (cls.__new__(cls) for cls in (CudagraphDispatcher, CudaGraphManager, kind))
    runner.vllm_config = None
    runner.dispatch = lambda: (first.dispatch(4), first.dispatch(4, invalid_modes={7}), second.dispatch(4, 4, 1))
    assert runner.execute_model(scheduled(10, 19)) == (None, {7}, 1)
    assert runner.execute_model(scheduled(10, 20)) == (FULL, {7} | FULL, None)
    assert runner.execute_model(scheduled(10, new=(20,))) == (FULL, {7} | FULL, None)
    assert runner.dispatch() == (None, {7}, 1), "a step's choice ends with the step, for graphs are captured between"
    assert runner.execute_model(scheduled(10, 20), dummy_run=True) == (None, {7}, 1)

    def fails() -> None:
        raise MemoryError

    runner.dispatch = fails
    with pytest.raises(MemoryError):
        runner.execute_model(scheduled(30))
    assert first.dispatch(4) is None


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, chooses: Callable[[Any], None]) -> Iterator[Callable[..., list[list[int]]]]:
    """What the genuine n-gram drafting gives after a step with these host layers, in texts of at most 12 tokens."""
    if not support.has_numba():
        pytest.skip("vLLM's n-gram drafting needs numba")
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(prompt_lookup_min=2, prompt_lookup_max=3, num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=12),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    proposer, runner = NgramProposer(config), GPUModelRunner.__new__(GPUModelRunner)  # before host layers are set up
    monkeypatch.setattr(NgramProposer, "batch_propose", NgramProposer.batch_propose)
    runner.dispatch = lambda: None
    monkeypatch.setattr(graph_steps, "tokens_in_cache", lambda scheduled: 0)
    graph_steps.choose_whole_steps(lambda found: found)
    graph_steps.fill_ngram_drafts(lambda found: found)

    def propose(
        found: Any,
        *texts: list[int],
        sampled: list[list[int]] | None = None,
        seeds: dict[int, Any] | None = None,
        grammars: bool = False,
    ) -> list[list[int]]:
        runner.vllm_config, runner.input_batch = found, SimpleNamespace(generators=seeds or {})
        runner.execute_model(SimpleNamespace(has_structured_output_requests=grammars))
        tokens = np.zeros((4, 12), dtype=np.int32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text)] = text
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        most = [4] if "num_speculative_tokens" in inspect.signature(proposer.propose).parameters else []  # not in 0.23
        return proposer.propose(*most, sampled or [[0]] * len(texts), lengths, tokens)

    return propose


REPEATS, NOVEL = [5, 6, 7, 8, 9, 5, 6], [1, 2, 3]


def test_missing_drafts_are_made_up_in_short_contexts(drafts: Callable[..., list[list[int]]]) -> None:
    found = host_layers_of(Calls(), max_filled_tokens=10)
    found.filled_steps_until = 11 * 100  # 10 tokens
    assert drafts(found, REPEATS, NOVEL) == [[7, 8, 9, 5], [3, 3, 3, 3]]
    assert drafts(found, [5, 6, 7, 5, 6], NOVEL) == [[7, 5, 6, 6], [3, 3, 3, 3]]
    assert drafts(found, REPEATS, [*NOVEL, 4]) == [[7, 8, 9, 5], []], "11 tokens"
    found.filled_steps_until = math.inf
    assert drafts(found, list(range(7))) == [[6] * 4]
    assert drafts(found, list(range(8)), NOVEL) == [[], []], "the first one ends at 12 tokens, in fewer than five"
    assert drafts(found, list(range(12)), NOVEL) == [[], []], "one has ended, so the step is not uniform"
    assert drafts(found, NOVEL, NOVEL, NOVEL) == [[], [], []], "15 tokens"
    assert drafts(found, NOVEL, grammars=True) == drafts(found, NOVEL, seeds={0: None}) == [[]]
    assert drafts(found, REPEATS, NOVEL, sampled=[[], [3]]) == [[], []], "a prompt that is not finished"
    assert drafts(None, NOVEL) == [[]]
    assert drafts(found, NOVEL) == [[3, 3, 3, 3]]
    found.whole_steps_until = 0
    assert drafts(found, NOVEL) == [[]], "the step runs in pieces in any case"


def test_which_steps_get_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rates of all ranks, and where drafts may be made up at all."""
    rates = Rates(170e9, 160e9, link=50e9, cpu_beside_link=55e9, link_beside_cpu=45e9)
    drafting = dataclasses.replace(rates, cpu=60e9)
    for finds, other, until in ((True, math.inf, 57600000), (True, 1000, 1000), (False, math.inf, 0)):
        monkeypatch.setattr(
            host_layers, "smallest", lambda *numbers, other=other: [min(number, other) for number in numbers]
        )
        found = host_layers_of(Calls(), max_filled_tokens=5 * finds, rates=rates, draft_rates=drafting)
        found.group.layers = [SimpleNamespace(window=None)]  # type: ignore[list-item]
        found.set_stream_split(StreamSplit(0.3, 1 << 20))
        assert found.filled_steps_until == pytest.approx(until)
        assert found.fills_drafts(until // 100 // 2, 5) == finds
        assert not found.fills_drafts(until // 100 + 1, 5)
        assert not found.fills_drafts(until // 100 // 2, 6)


@pytest.mark.parametrize(
    ("method", "experts", "captured", "most"),
    [
        ("ngram", False, 512, 64),
        ("ngram", False, 40, 40),
        ("ngram", False, None, 0),
        ("ngram", True, 512, 0),
        ("mtp", False, 512, 0),
        (None, False, 512, 0),
    ],
)
def test_drafts_are_made_up_for_few_requests(
    method: str | None, experts: bool, captured: int | None, most: int
) -> None:
    config: Any = SimpleNamespace(
        speculative_config=method and SimpleNamespace(method=method),
        model_config=SimpleNamespace(is_moe=experts),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=captured),
    )
    assert host_layers.max_filled_tokens(config) == most


def test_a_closed_engines_host_layers_are_not_kept(chooses: Callable[[Any], None]) -> None:
    found = host_layers_of(None)
    chooses(found)
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.vllm_config, runner.dispatch = found, lambda: None
    runner.execute_model(scheduled(1))
    gone = weakref.ref(runner)
    del runner
    assert gone() is None


def test_runners_without_host_layers_dispatch_as_before(chooses: Callable[[Any], None]) -> None:
    chooses(None)
    first, runner = (cls.__new__(cls) for cls in (CudagraphDispatcher, GPUModelRunner))
    runner.vllm_config, runner.dispatch = None, lambda: first.dispatch(4)
    assert runner.execute_model(scheduled(1 << 30)) is None


def test_the_users_split_decides_over_pieces() -> None:
    found = host_layers_of(Calls())
    found.group.layers = [SimpleNamespace(window=None), SimpleNamespace(window=7)]  # type: ignore[list-item]
    found.set_stream_split(StreamSplit(0.3))
    assert found.whole_steps_until == 0.0
    assert not found.allows_whole_step(0)
    found.set_stream_split(StreamSplit(0.0))
    assert found.whole_steps_until == math.inf
    assert found.allows_whole_step(1 << 40)


def test_a_graph_that_reads_over_the_link_does_it_at_every_length() -> None:
    calls, fractions = Calls(), []
    calls.over_link = SimpleNamespace(set_fraction=fractions.append)
    found = host_layers_of(calls)
    found.group.layers = [SimpleNamespace(window=None)]  # type: ignore[list-item]
    found.set_stream_split(StreamSplit(0.3))
    assert found.whole_steps_until == math.inf
    found.set_stream_split(StreamSplit(0.4, 1 << 20, fraction_in_graph=0.2))
    assert fractions == [0.3, 0.2]


@pytest.mark.parametrize("asked", [0.0, 0.25])
def test_the_users_fraction_is_read_in_graphs_too(asked: float) -> None:
    calls: Any = Calls()
    shared: list[float] = []
    calls.share_over_link = lambda fraction: shared.append(fraction) or False
    found = host_layers_of(calls, stream_fraction=asked)
    found.group.layers = [SimpleNamespace(window=None)]  # type: ignore[list-item]
    found._divide_reading({})
    assert shared == [asked]
    assert found.group.stream_split == StreamSplit(asked)


def test_ranks_share_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU of this rank needs no help, as measured alone; another one's does."""
    fast = Rates(100e9, 99e9, link=50e9, cpu_beside_link=40e9, link_beside_cpu=30e9, in_place=25e9)
    slow = (100e9, 60e9, 50e9, 40e9, 30e9, 25e9)
    monkeypatch.setattr(
        host_layers, "smallest", lambda *numbers: [min(pair) for pair in zip(numbers, slow, strict=True)]
    )
    monkeypatch.setattr(host_layers.calibrate, "measure", lambda *given, **named: fast)
    found = measured(drafts_per_request=0)
    assert found.rates == found.draft_rates == Rates(*slow)
    assert found.group.stream_split == stream_split(Rates(*slow))
    assert stream_split(fast) == StreamSplit(0.0)


def measured(drafts_per_request: int) -> HostLayers:
    """Host layers that have decided by measured rates which fraction the device reads."""
    found = host_layers_of(None, stream_fraction="auto", drafts_per_request=drafts_per_request)
    found.runtime = SimpleNamespace(pin=True)  # type: ignore[assignment]
    found.targets = {"layer": "target"}
    found._divide_reading({"layer": SimpleNamespace(impl=SimpleNamespace(attention=object(), num_heads=4))})
    return found


@pytest.mark.parametrize(("drafts", "tokens"), [(0, [1]), (4, [1, 5]), (20, [1, MAX_CPU_TOKENS])])
def test_rates_are_measured_with_one_token_and_with_all_drafts(
    drafts: int, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer steps are divided between CPU and device."""
    rates = {count: Rates(100e9, 70e9 / count, 50e9, 60e9 / count, 30e9, 25e9) for count in (1, 5, MAX_CPU_TOKENS)}
    asked: list[int] = []
    monkeypatch.setattr(host_layers, "smallest", lambda *numbers: list(numbers))
    monkeypatch.setattr(
        host_layers.calibrate,
        "measure",
        lambda layer, heads, dtype, count, **named: asked.append(count) or rates[count],
    )
    found = measured(drafts)
    assert asked == tokens
    assert (found.rates, found.draft_rates) == (rates[1], rates[tokens[-1]])
    for with_drafts in (False, True):
        expected = rates[tokens[-1] if with_drafts else 1]
        share = found.group.stream_split.of(1 << 40, drafts=with_drafts)
        assert share == stream_split(expected).of(1 << 40)


def test_counters_are_of_both_ways() -> None:
    assert host_layers_of(Calls()).counters() == Counters(cpu_seconds=1.0, cpu_bytes=7)
    assert host_layers_of(None).counters() == Counters(cpu_seconds=1.0, cpu_bytes=2)


def test_two_ranks_have_graphs_or_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda_bell, "create", SimpleNamespace)
    monkeypatch.setattr(host_layers, "smallest", lambda *numbers: [0.0])
    monkeypatch.setattr(decode_graph.logger, "propagate", True)
    assert graph_calls(config_of(CUDAGraphMode.FULL_DECODE_ONLY), LocalLink(), None, 3) is None  # type: ignore[arg-type]
    assert "it is impossible on another rank" in caplog.text


@pytest.mark.parametrize("able", [True, False])
def test_graphs_hold_copies_where_the_kernels_can_read_them(
    able: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_bell, "create", SimpleNamespace)
    monkeypatch.setattr(decode_graph, "GraphCalls", lambda *arguments: arguments)
    monkeypatch.setattr(decode_graph.logger, "propagate", True)
    kernels = SimpleNamespace(run_in_graph=None) if able else SimpleNamespace()
    found: Any = graph_calls(config_of(CUDAGraphMode.FULL_DECODE_ONLY, copies=1), LocalLink(), None, 3, kernels)  # type: ignore[arg-type]
    assert (found is not None) == able
    if able:
        assert found[-2] is kernels
    else:
        assert "cannot attend to the copies of resident_kv_gib in a graph" in caplog.text


def builder_of(found: HostLayers, names: list[str], monkeypatch: pytest.MonkeyPatch, batch: Batch) -> Any:
    """A builder whose batches are all ``batch``."""
    monkeypatch.setattr(host_layers, "find", lambda config: found)
    monkeypatch.setattr(graph_steps, "may_be_whole_step", lambda: True)
    monkeypatch.setattr(HostMetadataBuilder, "build", lambda *arguments: HostMetadata(batch))
    return GraphMetadataBuilder(None, names, config_of(CUDAGraphMode.FULL_DECODE_ONLY), torch.device("cpu"))


def common_of(batch: Batch) -> Any:
    return SimpleNamespace(
        max_query_len=1,
        num_reqs=len(batch.seq_lens),
        num_actual_tokens=len(batch.slot_mapping),
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slot_mapping,
        causal=True,
    )


def test_blocks_get_copies_before_a_graph_that_begins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the block table whose layers have copies, and none for a capture."""
    reserved: list[Any] = []
    thread = SimpleNamespace(wake=lambda: None)
    calls: Any = SimpleNamespace(copies=None, thread=thread, reserve=lambda batch, dtype: reserved.append(batch))
    found = host_layers_of(calls)
    for name, copies in (("a", torch.zeros(1)), ("b", None)):
        attention: Any = layer_of(found, name).attention
        attention.copies = copies
    found.group.resident = ResidentBlocks(9, 4)
    calls.copies = GraphCopies(LocalLink(), found.group.resident, 16)
    slots = torch.tensor([3 * 16])
    batch = Batch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([[3, 0]], dtype=torch.int32),
        slots,
        slots,
    )
    other, own = (builder_of(found, [name], monkeypatch, batch) for name in "ba")
    other.build_for_cudagraph_capture(common_of(batch))
    assert calls.copies.table is None
    own.build_for_cudagraph_capture(common_of(batch))
    assert calls.copies.table == reserved[-1].table
    other.build(0, common_of(batch))
    assert set(found.group.resident.row_of.tolist()) == {-1}
    own.build(0, common_of(batch))
    assert found.group.resident.row_of[3] == calls.copies.row_of[3] == 0
    found.group.resident.row_of.fill_(-1)
    monkeypatch.setattr(graph_steps, "may_be_whole_step", lambda: False)
    own.build(0, common_of(batch))
    assert found.group.resident.row_of[3] == -1, "pieces do it by themselves"


def test_a_runner_that_captures_without_saying_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_bell, "create", SimpleNamespace)
    monkeypatch.setattr(compat, "captures_backends_metadata", lambda config: False)
    with pytest.raises(Refusal, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        graph_calls(config_of(CUDAGraphMode.FULL_DECODE_ONLY), LocalLink(), None, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("second", [False, True])
def test_this_vllms_runners_say_when_they_capture(second: bool) -> None:
    config: Any = SimpleNamespace(use_v2_model_runner=second)
    has = not second or vllm.__version__ >= "0.23"
    assert compat.captures_backends_metadata(config) == has
