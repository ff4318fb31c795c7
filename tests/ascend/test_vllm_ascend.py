"""Genuine vllm-ascend on a CPU: its metadata builder and the attention class that ours derives from, in float64.

Replaced by stand-ins: the NPU's operators (tests/ascend/operator.py and two that write the cache), vLLM's and
vllm-ascend's configuration, and pinned memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend.ops  # noqa: F401  before attention_v1: they import each other
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_ascend.attention import attention_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend, AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.device.device_op import DeviceOperator
from vllm_ascend.quantization.methods import kv_c8

from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.ascend import backend as backend_ascend
from fastattention_vllm.integration.ascend.backend import FastAttentionAscendBackend, FastAttentionAscendImpl
from fastattention_vllm.integration.refusal import Refusal
from tests.ascend import operator as ascend_operator
from tests.ascend.test_attention import ROUNDING, bound  # noqa: F401  a fixture
from tests.attention.oracle import attention

PAGE = 128


def write_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = new


def write_nz_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **others: Any,
) -> None:
    """Stand-in for ``npu_scatter_pa_kv_cache``, which writes into ``[pages, heads, size / 32, page, 32]``."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        pages, rows = slot_mapping.long() // cache.shape[3], slot_mapping.long() % cache.shape[3]
        cache[pages, :, :, rows] = new.unflatten(-1, (-1, 32))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(
        kv_transfer_config=None,
        quant_config=None,
        speculative_config=None,
        additional_config={},
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(block_size=PAGE),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            hf_config=SimpleNamespace(),
            runner_type="generate",
            is_hybrid=False,
            max_model_len=1024,
            dtype=torch.bfloat16,
        ),
    )
    for name, stand_in in {
        "get_current_vllm_config": lambda: made,
        "needs_layer_aware_fia_graph_replay": lambda: False,
        "is_enable_hamming_sparse": lambda: made.additional_config.get("enable_hamming_sparse", False),
        "enable_cp": lambda: made.parallel_config.decode_context_parallel_size > 1,
        "using_paged_attention": lambda *_: False,
        "_EXTRA_CTX": SimpleNamespace(capturing=False),
    }.items():
        monkeypatch.setattr(attention_v1, name, stand_in)
    monkeypatch.setattr(attention_v1.flashcomm2_oshard_manager, "flashcomm2_oshard_enable", lambda: False)
    monkeypatch.setattr(kv_c8, "get_current_vllm_config", lambda: made)
    monkeypatch.setattr(DeviceOperator, "reshape_and_cache", staticmethod(write_pages))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return made


class Engine:
    """One attention layer and its cache. Requests are identified by number; their pages are shuffled."""

    def __init__(
        self,
        config: SimpleNamespace,
        backend: Any = FastAttentionAscendBackend,
        heads: int = 8,
        kv_heads: int = 2,
        size: int = 128,
        window: int | None = None,
        requests: int = 4,
    ) -> None:
        self.dtype = config.model_config.dtype
        self.heads, self.kv_heads, self.size, self.window = heads, kv_heads, size, window
        cls = backend.get_impl_cls()
        self.impl = cls(heads, size, size**-0.5, kv_heads, None, window, "auto", None, "decoder", None)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=kv_heads, head_size=size, dtype=self.dtype)
        self.builder = backend.get_builder_cls()(spec, ["layers.0"], config, torch.device("cpu"))
        shape = AscendAttentionBackend.get_kv_cache_shape(requests * 8, PAGE, kv_heads, size)[1:]
        self.cache = (torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))
        random = torch.Generator().manual_seed(1)
        self.table = torch.randperm(requests * 8, generator=random).to(torch.int32).view(requests, 8)
        self.history = [torch.empty(2, 0, kv_heads, size, dtype=self.dtype) for _ in range(requests)]
        self.random = random
        self.layer: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, layer_name="model.layers.0.attn")

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def step(self, new: dict[int, int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step with ``new`` tokens of each request. Returns the computed rows and the float64 reference."""
        tokens = sum(new.values())
        query = self.draw(tokens + padding, self.heads, self.size)
        key, value = self.draw(2, tokens + padding, self.kv_heads, self.size)
        before = [self.history[r].shape[1] for r in new]
        begin = 0
        for request, count in new.items():
            own = torch.stack([key[begin : begin + count], value[begin : begin + count]])
            self.history[request] = torch.cat([self.history[request], own], 1)
            begin += count
        metadata = self.metadata(new, before, padding)
        out = torch.full((tokens + padding, self.heads, self.size), -7.0, dtype=self.dtype)
        computed = self.impl.forward(self.layer, query, key, value, self.cache, metadata, out)
        self.asked = (query, new)
        return computed, self.expected(query, new)

    def metadata(self, new: dict[int, int], before: list[int], padding: int) -> Any:
        counts = list(new.values())
        lengths = [earlier + count for earlier, count in zip(before, counts, strict=True)]
        slots = [
            int(self.table[request, position // PAGE]) * PAGE + position % PAGE
            for request, earlier, count in zip(new, before, counts, strict=True)
            for position in range(earlier, earlier + count)
        ]
        if not any(before):
            state = AscendAttentionState.PrefillNoCache
        elif all(count == 1 for count in counts):
            state = AscendAttentionState.DecodeOnly
        else:
            state = AscendAttentionState.ChunkedPrefill
        queries = counts + ([padding] if padding else [])  # the dummy request of vllm-ascend's runner
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        kept = torch.tensor(lengths, dtype=torch.int32)
        common = AscendCommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=kept,
            seq_lens_cpu=kept,
            num_reqs=len(queries),
            num_actual_tokens=sum(counts),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=self.table[list(new)],
            slot_mapping=torch.tensor(slots, dtype=torch.int32),
            attn_state=state,
        )
        return self.builder.build(0, common)

    def expected(self, query: torch.Tensor, new: dict[int, int]) -> torch.Tensor:
        rows = torch.cat([self.history[request] for request in new], 1)
        lengths = torch.tensor([self.history[request].shape[1] for request in new], dtype=torch.int32)
        starts = torch.tensor([0, *new.values()], dtype=torch.int32).cumsum(0).to(torch.int32)
        problem = AttentionProblem(
            query=query,
            key=rows[0],
            value=rows[1],
            query_start_loc=starts,
            seq_lens=lengths,
            scale=self.size**-0.5,
            causal=True,
            kv_start_loc=(lengths.cumsum(0) - lengths).to(torch.int32),
            window=(-1 if self.window is None else self.window - 1, -1),
        )
        return attention(problem)[0][: sum(new.values())]


STEPS: dict[str, list[dict[int, int]]] = {
    "prefill": [{0: 150, 1: 3, 2: 128}],
    "decode": [{0: 127, 1: 1, 2: 128}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {1: 1}],
    "chunked prefill": [{0: 100}, {0: 100}, {0: 57}],
    "mixed": [{0: 60}, {0: 1, 1: 200}, {0: 1, 1: 90, 2: 5}, {0: 1, 1: 1, 2: 1, 3: 40}],
}


def assert_near(computed: torch.Tensor, expected: torch.Tensor, step: float) -> None:
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(computed.double(), expected, rtol=step, atol=step * 1e-3 * size)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("steps", STEPS)
def test_equals_float64(config: SimpleNamespace, steps: str, window: int | None, size: int) -> None:
    engine = Engine(config, size=size, window=window)
    assert type(engine.impl) is FastAttentionAscendImpl
    for new in STEPS[steps]:
        computed, expected = engine.step(new)
        assert_near(computed, expected, ROUNDING[engine.dtype])


def test_causality_per_request_is_refused(config: SimpleNamespace) -> None:
    metadata = SimpleNamespace(causal=torch.ones(2, dtype=torch.int32))
    with pytest.raises(
        Refusal, match="uses a causal mask in some requests and none in others, which fastattention does not support"
    ):
        Engine(config, size=64, window=None).impl.step(None, None, None, metadata, None)


@pytest.mark.parametrize("heads", [(4, 4), (16, 1), (12, 4)])
def test_query_heads_share_kv_heads(config: SimpleNamespace, heads: tuple[int, int]) -> None:
    config.model_config.dtype = torch.float16
    engine = Engine(config, heads=heads[0], kv_heads=heads[1])
    for new in STEPS["mixed"]:
        computed, expected = engine.step(new)
        assert_near(computed, expected, ROUNDING[engine.dtype])


def test_padding_of_parallel_layers_is_left_alone(config: SimpleNamespace) -> None:
    engine = Engine(config)
    engine.step({0: 9, 1: 30})
    computed, expected = engine.step({0: 1, 1: 4}, padding=3)
    assert_near(computed[:5], expected, ROUNDING[engine.dtype])
    assert (computed[5:] == -7.0).all()


def test_our_operator_calls_equal_vllm_ascends(config: SimpleNamespace) -> None:
    """Holds for the head sizes that vllm-ascend supports. Its own results are as close to float64 as ours."""
    asked = []
    for backend in (FastAttentionAscendBackend, AscendAttentionBackend):
        engine = Engine(config, backend)
        ascend_operator.calls.clear()
        for new in STEPS["mixed"]:
            computed, expected = engine.step(new)
            assert_near(computed, expected, ROUNDING[engine.dtype])
        asked.append(list(ascend_operator.calls))
    assert asked[0] == asked[1]


def test_vllm_ascends_own_window_shows_one_key_more(config: SimpleNamespace) -> None:
    """Our class sets the window one smaller for as long as this holds."""
    engine = Engine(config, AscendAttentionBackend, window=40)
    computed, expected = engine.step({0: 100})
    with pytest.raises(AssertionError):
        assert_near(computed, expected, ROUNDING[engine.dtype])
    engine.window = 41
    assert_near(computed, engine.expected(*engine.asked), ROUNDING[engine.dtype])


def test_captured_graphs_use_vllm_ascends_attention(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(config, window=40)
    engine.step({0: 20})
    engine.step({0: 1})
    captured: list[Any] = []

    def full_graph_fia(self: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        captured.append(self.sliding_window)
        return torch.full_like(query, 3.0), len(query)

    monkeypatch.setattr(attention_v1.AscendAttentionBackendImpl, "full_graph_fia", full_graph_fia)
    monkeypatch.setattr(attention_v1, "_EXTRA_CTX", SimpleNamespace(capturing=True))
    computed, _ = engine.step({0: 1})
    assert captured == [39]
    assert (computed == 3.0).all()


@pytest.mark.parametrize("steps", STEPS)
def test_int8_cache_of_vllm_ascend(config: SimpleNamespace, steps: str) -> None:
    """Its "C8" class replaces ours layer by layer. Through the same operator it is as accurate as int8 allows."""
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_scatter_pa_kv_cache", write_nz_pages, "CPU")
    engine = Engine(config)
    engine.layer.impl = engine.impl
    kv_c8.AscendC8KVCacheAttentionMethod({}, "model.layers.0.attn").create_weights(engine.layer)
    assert type(engine.impl) is attention_v1.AscendC8AttentionBackendImpl
    assert engine.layer.kv_cache_torch_dtype == torch.int8
    scale = 1 / 32  # a power of two; almost all keys are below 4
    for name in ("k_cache_scale", "v_cache_scale"):
        getattr(engine.layer, name).data = torch.full((256,), scale, dtype=engine.dtype)
    engine.cache = tuple(cache.to(torch.int8) for cache in engine.cache)
    for new in STEPS[steps]:
        computed, expected = engine.step(new)
        # A stored number is off by up to half a step. Values are off by that much, and keys change the weights by a
        # similar amount.
        torch.testing.assert_close(computed.double(), expected, rtol=0.0, atol=2.5 * scale)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"alibi_slopes": [1.0] * 8}, "ALiBi"),
        ({"logits_soft_cap": 50.0}, "soft cap of 50"),
        ({"sliding_window": 1}, "sliding window is 1 token"),
        ({"head_size": 72}, "head size is 72"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads"),
    ],
)
def test_unsupported_features_stop_the_start(config: SimpleNamespace, changes: dict[str, Any], sentence: str) -> None:
    given = {
        "num_heads": 8,
        "head_size": 128,
        "scale": 1.0,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    FastAttentionAscendImpl(**given)
    with pytest.raises(Refusal, match=sentence):
        FastAttentionAscendImpl(**(given | changes))


def test_float32_stops_the_start(config: SimpleNamespace) -> None:
    config.model_config.dtype = torch.float32
    with pytest.raises(Refusal, match="--dtype bfloat16"):
        Engine(config)


@pytest.mark.parametrize("what", ["sinks", "attn_type", "enable_hamming_sparse"])
def test_layers_that_vllm_ascend_computes_differently_stay_with_it(
    config: SimpleNamespace, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = [8, 128, 1.0, 2, None, None, "auto", None, "decoder", None]
    more = {"sinks": torch.zeros(8)} if what == "sinks" else {}
    if what == "attn_type":
        given[8] = "encoder_decoder"
    config.additional_config = {"enable_hamming_sparse": what == "enable_hamming_sparse"}
    impl = FastAttentionAscendImpl(*given, **more)
    parent = attention_v1.AscendAttentionBackendImpl
    monkeypatch.setattr(parent, "forward_fused_infer_attention", lambda self, *_: "theirs")
    assert impl.forward_fused_infer_attention(*[None] * 5) == "theirs"


def test_context_parallel_layers_stay_with_vllm_ascend(config: SimpleNamespace) -> None:
    config.parallel_config.decode_context_parallel_size = 2
    assert FastAttentionAscendBackend.get_impl_cls().__name__ == "AscendAttentionCPImpl"


def test_the_backend_is_one_that_vllm_ascends_runner_accepts() -> None:
    assert issubclass(backend_ascend.FastAttentionAscendBackend, AscendAttentionBackend)
    assert FastAttentionAscendBackend.get_name() == AscendAttentionBackend.get_name()
