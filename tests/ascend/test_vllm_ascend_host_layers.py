"""Host layers in genuine vllm-ascend on a CPU, step after step, against float64.

Genuine: vLLM's attention layers, layer groups and block counts; vllm-ascend's metadata builders, and the calls of its
worker and model runner that count memory and allocate caches. Replaced by stand-ins: the rest of worker and runner,
vLLM's configuration, the NPU's operators, streams and pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_ascend.ops  # noqa: F401  before attention_v1: they import each other
from torch import nn
from vllm import forward_context
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl, AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.ascend import device as ascend_device
from fastattention_vllm.integration.ascend.backend import FastAttentionAscendBackend, HostLayerAscendBackend
from fastattention_vllm.integration.host_layers import accelerator
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.host_layers.layers import HostLayerImpl
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement import host_attention, npu
from tests.ascend.genuine_worker import NPUModelRunner, NPUWorker
from tests.ascend.streams import npu_streams  # noqa: F401  a fixture
from tests.ascend.test_attention import bound  # noqa: F401  a fixture
from tests.ascend.test_vllm_ascend import PAGE, STEPS, config  # noqa: F401  a fixture
from tests.attention.oracle import OUTPUT_TOLERANCE, attention
from tests.placement.conftest import exact_weights  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("exact_weights", "npu_streams")
HEADS, KV_HEADS, REQUESTS, BLOCKS = 8, 2, 4, 80
NPU = torch.device("cpu")


class Pins:
    """Pinned memory, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size: int) -> None:
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    made = Pins()
    monkeypatch.setattr(ascend_device.AscendRuntime, "pin", made)
    return made


@pytest.fixture
def ascend_config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(enable_cpu_binding=True)
    monkeypatch.setattr(ascend_device, "get_ascend_config", lambda: made)
    return made


@pytest.fixture
def asked(
    config: SimpleNamespace,  # noqa: F811
    pins: Pins,
    ascend_config: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SimpleNamespace]:
    """The part of vLLM's configuration that host layers read. Restores the number of threads afterwards."""
    config.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    config.scheduler_config = SimpleNamespace(
        enable_chunked_prefill=True,
        disable_hybrid_kv_cache_manager=False,
        max_num_batched_tokens=256,
        max_num_seqs=REQUESTS,
    )
    vars(config.parallel_config).update(
        local_world_size=1,
        tensor_parallel_size=1,
        data_parallel_size=1,
        pipeline_parallel_size=1,
        worker_cls="vllm_ascend.worker.worker.NPUWorker",  # which vllm-ascend's platform names
    )
    config.attention_config = SimpleNamespace(backend_per_kind={})
    vars(config.cache_config).update(
        cache_dtype="auto", kv_offloading_size=None, kv_sharing_fast_prefill=False, num_gpu_blocks_override=None
    )
    config.cache_config.kv_cache_memory_bytes = 0
    vars(config.model_config).update(
        original_max_model_len=1024,
        max_model_len=8 * PAGE,
        enable_sleep_mode=False,
        use_mla=False,
        attn_type="decoder",
        get_num_kv_heads=lambda parallel: KV_HEADS,
    )
    monkeypatch.setattr(accelerator, "local_rank", lambda: 0)
    monkeypatch.setattr(host_layers, "_smallest_of_all_ranks", lambda limits: limits)

    def at_home(self: Any, vllm_config: Any, host_backend: Any) -> None:
        AcceleratorRuntime.__init__(self, vllm_config, host_backend, npu, "stand-ins", NPU)

    monkeypatch.setattr(ascend_device.AscendRuntime, "__init__", at_home)
    monkeypatch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
    threads = cpu.num_threads()
    yield config
    cpu.set_num_threads(threads)
    cpu.set_spin(0.0)


class Model:
    """Attention layers in sequence, in a worker, with requests identified by number.

    ``windows``: the window of each layer, or None for full attention.
    """

    def __init__(self, asked: SimpleNamespace, windows: list[int | None], size: int = 128, **options: Any) -> None:
        self.config, self.windows, self.size = asked, windows, size
        self.dtype = asked.model_config.dtype
        asked.additional_config = {"fastattention": {"stream_fraction": 0.0, "host_kv_gib": 1.0} | options}
        model = asked.model_config
        model.get_head_size = lambda: size
        model.get_num_layers_by_block_type = lambda parallel: len(windows)
        model.get_sliding_window = lambda: next((window for window in windows if window), None)
        model.hf_text_config.layer_types = ["sliding_attention" if window else "full_attention" for window in windows]
        model.hf_text_config.model_type = "llama"
        self.page_bytes = 2 * PAGE * KV_HEADS * size * self.dtype.itemsize
        asked.cache_config.kv_cache_memory_bytes = BLOCKS * len(windows) * self.page_bytes
        self.layers = [self.attention_layer(index, window) for index, window in enumerate(windows)]
        for layer in self.layers:
            layer.impl.process_weights_after_loading(self.dtype)
        self.random = torch.Generator().manual_seed(1)

    def attention_layer(self, index: int, window: int | None) -> Any:
        """A genuine layer, created without its constructor, which needs a genuine configuration."""
        layer: Any = Attention.__new__(Attention)
        nn.Module.__init__(layer)
        impl = FastAttentionAscendBackend.get_impl_cls()(
            HEADS, self.size, self.size**-0.5, KV_HEADS, None, window, "auto", None, "decoder", None
        )
        given = {
            "layer_name": f"model.layers.{index}.self_attn.attn",
            "attn_type": "decoder",
            "attn_backend": FastAttentionAscendBackend,
            "sliding_window": window,
            "num_kv_heads": KV_HEADS,
            "head_size": self.size,
            "head_size_v": self.size,
            "kv_cache_dtype": "auto",
            "kv_cache_torch_dtype": self.dtype,
            "kv_sharing_target_layer_name": None,
            "kv_cache": torch.tensor([]),
            "_k_scale_float": 1.0,
            "_v_scale_float": 1.0,
            "impl": impl,
        }
        for name, value in given.items():
            setattr(layer, name, value)
        self.config.compilation_config.static_forward_context[layer.layer_name] = layer
        return layer

    def on_host(self) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if isinstance(layer.impl, HostLayerImpl)]

    def start(self) -> None:
        """Count memory and allocate the caches, as vLLM's engine has the worker do."""
        runner = NPUModelRunner.__new__(NPUModelRunner)
        nothing: dict[str, Any] = {
            "vllm_config": self.config,
            "compilation_config": self.config.compilation_config,
            "model_config": self.config.model_config,
            "cache_config": self.config.cache_config,
            "parallel_config": self.config.parallel_config,
            "speculative_config": None,
            "device": NPU,
            "shared_kv_cache_layers": {},
            "runner_only_attn_layers": set(),
            "attn_groups": [],
            "kv_caches": [],
            "max_num_reqs": REQUESTS,
            "uniform_decode_query_len": 1,
            "reorder_batch_threshold": None,
        }
        off = "use_compress use_sparse enable_hamming_sparse use_aclgraph".split()
        for name, value in (nothing | dict.fromkeys(off, False)).items():
            setattr(runner, name, value)
        runner.cudagraph_dispatcher = SimpleNamespace(
            initialize_cudagraph_keys=lambda mode, length: None, get_capture_descs=list
        )
        runner.may_reinitialize_input_batch = lambda kv_cache_config: None
        runner.profile_run = lambda: None
        runner.model_config.enable_return_routed_experts = False
        worker = NPUWorker.__new__(NPUWorker)
        worker.vllm_config, worker.model_runner, worker.cache_config = self.config, runner, self.config.cache_config
        worker.init_snapshot = SimpleNamespace(free_memory=0)
        self.runner = runner
        specs = runner.get_kv_cache_spec()
        self.available = worker.determine_available_memory()
        groups = get_kv_cache_groups(self.config, specs)
        self.kv_cache_config = get_kv_cache_config_from_groups(self.config, groups, self.available)
        worker.initialize_from_config(self.kv_cache_config)
        order = torch.randperm(self.kv_cache_config.num_blocks, generator=self.random).int()
        count = len(groups) * REQUESTS
        self.tables = order[: count * 8].view(len(groups), REQUESTS, 8)
        kinds = [torch.empty(2, 0, KV_HEADS, self.size, dtype=self.dtype) for _ in range(REQUESTS)]
        self.history = [list(kinds) for _ in self.layers]

    @property
    def placed_layers(self) -> host_layers.HostLayers:
        found = host_layers.find(self.config)
        assert found is not None
        return found

    def step(self, new: dict[int, int], padding: int = 0) -> None:
        """Run all layers for ``new`` tokens of each request, and check the result of each layer."""
        before = [self.history[0][request].shape[1] for request in new]
        metadata = self.metadata(new, before, padding)
        for index, layer in enumerate(self.layers):
            tokens = sum(new.values())
            query = self.draw(tokens + padding, HEADS)
            key, value = self.draw(tokens + padding, KV_HEADS), self.draw(tokens + padding, KV_HEADS)
            for request, keys, values in zip(
                new, key[:tokens].split(list(new.values())), value[:tokens].split(list(new.values())), strict=True
            ):
                self.history[index][request] = torch.cat(
                    [self.history[index][request], torch.stack([keys, values])], dim=1
                )
            out = torch.full_like(query, -7.0)
            of_this_pass = SimpleNamespace(attn_metadata=metadata, capturing=False)
            with mock.patch.object(forward_context, "_forward_context", of_this_pass):
                computed = layer.impl.forward(
                    layer, query, key, value, layer.kv_cache, metadata[layer.layer_name], output=out
                )
            self.compare(computed[:tokens].double(), self.problem(index, query, new))
            assert (computed[tokens:] == -7.0).all()

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        """A slice of the output of one shared projection, as in a model, so it is not contiguous."""
        return torch.randn(tokens, heads, 2 * self.size, generator=self.random).to(self.dtype)[..., : self.size]

    def metadata(self, new: dict[int, int], before: list[int], padding: int) -> dict[str, Any]:
        counts = list(new.values())
        lengths = [earlier + count for earlier, count in zip(before, counts, strict=True)]
        queries = counts + ([padding] if padding else [])  # the dummy request of vllm-ascend's runner
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        kept = torch.tensor(lengths, dtype=torch.int32)
        state = AscendAttentionState.ChunkedPrefill if any(before) else AscendAttentionState.PrefillNoCache
        found = {}
        for group, table in zip(self.runner.attn_groups, self.tables, strict=True):
            slots = [
                int(table[request, position // PAGE]) * PAGE + position % PAGE
                for request, earlier, count in zip(new, before, counts, strict=True)
                for position in range(earlier, earlier + count)
            ]
            common = AscendCommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=kept,
                seq_lens_cpu=kept,
                num_reqs=len(queries),
                num_actual_tokens=sum(counts),
                max_query_len=max(queries),
                max_seq_len=max(lengths),
                block_table_tensor=table[list(new)],
                slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int32),
                attn_state=state,
            )
            for each in group:
                built = each.get_metadata_builder(0).build(common_prefix_len=0, common_attn_metadata=common)
                found |= dict.fromkeys(each.layer_names, built)
        return found

    def compare(self, computed: torch.Tensor, problem: AttentionProblem) -> None:
        """The bound of tests/placement/scenario.py: each merged part is rounded, and so is the result."""
        expected, _ = attention(problem)
        size, _ = attention(replace(problem, value=problem.value.abs()))
        rtol, atol = OUTPUT_TOLERANCE[self.dtype]
        excess = (computed - expected).abs() - rtol * (expected.abs() + size) - 2 * atol
        assert float(excess.max()) <= 0, f"off by {float(excess.max()):.3g} more than allowed"

    def problem(self, index: int, query: torch.Tensor, new: dict[int, int]) -> AttentionProblem:
        rows = torch.cat([self.history[index][request] for request in new], 1)
        lengths = torch.tensor([self.history[index][request].shape[1] for request in new], dtype=torch.int32)
        window = self.windows[index]
        return AttentionProblem(
            query=query[: sum(new.values())],
            key=rows[0],
            value=rows[1],
            query_start_loc=torch.tensor([0, *new.values()], dtype=torch.int32).cumsum(0).int(),
            seq_lens=lengths,
            scale=self.size**-0.5,
            causal=True,
            kv_start_loc=(lengths.cumsum(0) - lengths).int(),
            window=(-1 if window is None else window - 1, -1),
        )


LONG = [{0: 200, 1: 9}, {0: 1, 1: 100}, {0: 30, 1: 3, 2: 256}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 12, 2: 9, 3: 140}]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("steps", [*STEPS, "long"])
def test_equals_float64(asked: SimpleNamespace, steps: str, size: int, share: float) -> None:
    """Two of four layers are on the host. With a stream fraction, NPU and CPU each read a part of each context."""
    model = Model(asked, [None] * 4, size, host_kv_layers=2, stream_fraction=share)
    model.start()
    assert len(model.on_host()) == 2
    for new in LONG if steps == "long" else STEPS[steps]:
        model.step(new)


@pytest.mark.parametrize("steps", [*STEPS, "long"])
def test_windows_have_block_tables_of_their_own(asked: SimpleNamespace, steps: str) -> None:
    """Alternating layers, as in Gemma, with one layer of each kind on the host."""
    model = Model(asked, [40, None, 40, None], host_kv_layers=[0, 3])
    model.start()
    assert len(model.tables) == 2
    assert model.on_host() == [0, 3]
    for new in LONG if steps == "long" else STEPS[steps]:
        model.step(new)


def test_padding_of_parallel_layers_is_ignored(asked: SimpleNamespace) -> None:
    model = Model(asked, [None] * 2, host_kv_layers=1)
    model.start()
    model.step({0: 40, 1: 3})
    model.step({0: 1, 1: 20}, padding=3)
    model.step({0: 1, 1: 1, 2: 1, 3: 1}, padding=12)


def test_host_layers_use_no_npu_memory_and_the_pool_holds_every_block(asked: SimpleNamespace, pins: Pins) -> None:
    model = Model(asked, [None] * 4, host_kv_layers=3)
    model.start()
    blocks = model.kv_cache_config.num_blocks
    assert len(model.on_host()) == 3
    assert blocks == 4 * BLOCKS
    layers = model.placed_layers
    assert layers.pool is not None
    assert layers.pool.pinned
    assert layers.pool.memory.nbytes == 3 * blocks * model.page_bytes
    assert list(pins.registered) == [layers.pool.memory.data_ptr()]
    assert pins.registered[layers.pool.memory.data_ptr()] >= layers.pool.memory.nbytes
    for index in model.on_host():
        cache = layers.pool.caches[model.layers[index].layer_name]
        assert cache.shape == (blocks, KV_HEADS, PAGE, 2 * model.size)
        assert not cache.any()
    device = next(layer for layer in model.layers if not isinstance(layer.impl, HostLayerImpl))
    model.step({0: 200, 1: 5})
    written = set((layers.pool.caches[model.layers[model.on_host()[0]].layer_name] != 0).flatten(1).any(1).nonzero())
    assert {int(block) for block in written} == {int(b) for b in (*model.tables[0][0, :2], model.tables[0][1, 0])}
    assert {int(b) for b in (device.kv_cache[0] != 0).flatten(1).any(1).nonzero()} == {int(b) for b in written}


def test_the_pool_is_bounded(asked: SimpleNamespace) -> None:
    """Fewer blocks than the NPU has memory for, so that their host part fits."""
    gib = 60 * 2 * 2 * PAGE * KV_HEADS * 128 * 2 / (1 << 30)  # 60 blocks of two layers
    model = Model(asked, [None] * 4, host_kv_layers=2, host_kv_gib=gib)
    model.start()
    assert model.kv_cache_config.num_blocks == 60
    model.step({0: 200})


def test_too_little_host_memory_stops_the_start(asked: SimpleNamespace) -> None:
    model = Model(asked, [None] * 4, host_kv_layers=2, host_kv_gib=0.0005)
    with pytest.raises(Refusal, match="raise host_kv_gib"):
        model.start()


def test_memory_that_cannot_be_pinned_stops_the_start(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwilling(Pins):
        def register(self, address: int, size: int) -> None:
            raise MemoryError("CANN could not pin it")

    monkeypatch.setattr(ascend_device.AscendRuntime, "pin", Unwilling())
    model = Model(asked, [None] * 4, host_kv_layers=2)
    with pytest.raises(Refusal, match="CANN could not pin it"):
        model.start()


def test_auto_moves_the_fewest_layers_that_fit_the_longest_request(asked: SimpleNamespace) -> None:
    model = Model(asked, [None] * 4, host_kv_layers="auto")
    assert model.on_host() == []
    assert asked.additional_config["fastattention"]["host_kv_layers"] == []
    asked.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    asked.model_config.max_model_len = 200 * PAGE  # the memory holds 80 blocks of four layers
    model = Model(asked, [None] * 4, host_kv_layers="auto")
    assert len(model.on_host()) == 3
    assert asked.additional_config["fastattention"]["host_kv_layers"] == model.on_host()


def test_profiling_before_the_pool_exists_returns_zeros(asked: SimpleNamespace) -> None:
    model = Model(asked, [None] * 2, host_kv_layers=1)
    layer = model.layers[model.on_host()[0]]
    out = torch.full((5, HEADS, 128), -7.0, dtype=model.dtype)
    rows = model.draw(5, HEADS)
    assert not layer.impl.forward(layer, rows, rows, rows, layer.kv_cache, None, output=out).any()


@pytest.mark.parametrize(
    ("mode", "after"),
    [("NONE", "NONE"), ("PIECEWISE", "PIECEWISE"), ("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", None)],
)
def test_graphs_contain_the_pieces_between_attention_layers(
    asked: SimpleNamespace, mode: str, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own rule for metadata that cannot be captured. If no graph remains, the start is refused."""
    asked.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode], mode=3)
    asked.compilation_config.cudagraph_capture_sizes = [1]
    asked.compilation_config.set_splitting_ops_for_v1(all2all_backend="naive")
    if after is None:
        with pytest.raises(Refusal, match=r"FULL_DECODE_ONLY captures whole steps.*PIECEWISE.*--enforce-eager"):
            Model(asked, [None] * 2, host_kv_layers=1)
        Model(asked, [None] * 2, host_kv_layers=0)
        return
    monkeypatch.setattr("vllm_ascend.worker.model_runner_v1.enable_sp", lambda _: False)
    model = Model(asked, [None] * 2, host_kv_layers=1)
    model.start()
    assert asked.compilation_config.cudagraph_mode.name == after


def test_other_block_sizes_stop_the_start(asked: SimpleNamespace) -> None:
    asked.cache_config.block_size = 256
    with pytest.raises(Refusal, match="blocks of 128 tokens, not 256; pass --block-size 128"):
        Model(asked, [None] * 2, host_kv_layers=1)


def test_host_layers_disable_vllm_ascends_cpu_binding(asked: SimpleNamespace, ascend_config: SimpleNamespace) -> None:
    Model(asked, [None] * 2, host_kv_layers=0)
    assert ascend_config.enable_cpu_binding
    asked.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)
    Model(asked, [None] * 2, host_kv_layers=1)
    assert not ascend_config.enable_cpu_binding


@pytest.mark.parametrize("what", ["attention sinks", "fp8"])
def test_layers_that_cannot_be_placed_stop_the_start(
    asked: SimpleNamespace, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Model.attention_layer

    def attention_layer(self: Model, index: int, window: int | None) -> Any:
        layer = make(self, index, window)
        if what == "fp8":
            layer.impl.kv_cache_dtype = "fp8"
        else:
            layer.impl.upstream_reason = what
        return layer

    monkeypatch.setattr(Model, "attention_layer", attention_layer)
    with pytest.raises(Refusal, match=f"do not support .*{what}.*set host_kv_layers to 0"):
        Model(asked, [None] * 2, host_kv_layers=1)


def test_layers_whose_class_vllm_ascend_replaced_are_not_candidates(asked: SimpleNamespace) -> None:
    layer = Model(asked, [None] * 2, host_kv_layers=0).layers[0]
    assert hasattr(layer.impl, "host_window")
    layer.impl.__class__ = AscendAttentionBackendImpl
    assert not hasattr(layer.impl, "host_window")


def test_metadata_of_host_layers_is_built_apart(asked: SimpleNamespace) -> None:
    model = Model(asked, [None] * 4, host_kv_layers=2)
    model.start()
    kinds = {group.backend: set(group.layer_names) for group in model.runner.attn_groups[0]}
    hosts = {model.layers[index].layer_name for index in model.on_host()}
    assert kinds[HostLayerAscendBackend] == hosts
    assert len(kinds[FastAttentionAscendBackend]) == 2
