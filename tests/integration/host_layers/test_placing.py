"""Which layers become host layers, what is allocated before vLLM sizes its cache, and what is refused.

No engine runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import (
    ChunkedLocalAttention,
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheGroupSpec

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.integration.cuda.flash import (
    FastAttentionFlashBackend,
    FastAttentionFlashImpl,
    HostLayerFlashBackend,
)
from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.integration.host_layers.layers import HostLayerImpl, attention_layers, page_shape
from fastattention_vllm.integration.host_layers.metadata import NOT_COMPUTED, HostMetadata, HostMetadataBuilder
from fastattention_vllm.integration.options import options_of
from fastattention_vllm.integration.refusal import Refusal, sentence
from fastattention_vllm.placement import prefetch
from fastattention_vllm.placement.link import LocalLink
from fastattention_vllm.placement.step import Batch
from tests import reference_models as reference

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 4, 2, 64, 16
BLOCK_BYTES = 2 * BLOCK * KV_HEADS * HEAD_SIZE * 4
STAGING_BLOCKS = 5
WRAPPED = create_chunked_local_attention_backend(FastAttentionFlashBackend, 8192)


def layer(
    cls: type[Any] = Attention,
    backend: type[Any] = FastAttentionFlashBackend,
    *,
    kv_heads: int = KV_HEADS,
    kv_cache_dtype: str = "auto",
    window: int | None = None,
) -> Any:
    """The parts of a vLLM layer that host layers read."""
    impl = FastAttentionFlashImpl.__new__(FastAttentionFlashImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale = HEADS, kv_heads, HEAD_SIZE, 0.125
    impl.sliding_window = (-1 if window is None else window - 1, -1)
    impl.host_window = None if window is None else window - 1
    impl.alibi_slopes, impl.sinks, impl.logits_soft_cap = None, None, 0
    impl.kv_cache_dtype, impl.attn_type = kv_cache_dtype, "decoder"
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    made.impl, made.attn_backend, made.sliding_window, made.attn_type = impl, backend, window, "decoder"
    made.kv_sharing_target_layer_name = None
    made.num_kv_heads, made.head_size, made.head_size_v = kv_heads, HEAD_SIZE, HEAD_SIZE
    made.kv_cache_dtype = kv_cache_dtype
    made.kv_cache_torch_dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
    return made


def name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def model_of(layers: list[Any]) -> dict[str, Any]:
    for index, one in enumerate(layers):
        one.layer_name = name(index)
    return {name(index): one for index, one in enumerate(layers)}


def config_of(**model: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(use_mla=False, **model),
        cache_config=SimpleNamespace(block_size=BLOCK, skip_page_size_padded=None),
    )


def why_not(layers: list[Any], config: Any = None) -> str:
    return attention_layers(model_of(layers), HostLayerFlashBackend, config or config_of())[2]


def test_plain_layers_are_accepted() -> None:
    plain = [layer(), layer(window=100), layer()]
    names, kinds, why = attention_layers(model_of(plain), HostLayerFlashBackend, config_of())
    assert (kinds.full, kinds.windowed, why) == ((0, 2), (1,), "")
    assert names == {index: name(index) for index in range(3)}


@pytest.mark.parametrize(
    ("special", "why"),
    [
        (lambda: layer(ChunkedLocalAttention, WRAPPED), "is an instance of ChunkedLocalAttention"),
        (lambda: layer(Attention, WRAPPED), f"uses the backend {WRAPPED.__name__}"),
        (lambda: layer(type("StaticSinkAttention", (Attention,), {})), "is an instance of StaticSinkAttention"),
    ],
    ids=["its class", "what is wrapped around its backend", "a class below Attention"],
)
def test_a_layer_that_computes_more_than_attention_is_named(special: Callable[[], Any], why: str) -> None:
    """The additional computation is in its class or its builder, which a host layer does not have."""
    found = why_not([layer(), special()])
    assert found.startswith(f"layer {name(1)} ")
    assert why in found


@pytest.mark.parametrize(
    "other", [lambda: layer(kv_heads=4), lambda: layer(kv_cache_dtype="fp8")], ids=["KV heads", "KV cache dtype"]
)
def test_layers_with_different_pages_are_refused(other: Callable[[], Any]) -> None:
    assert "have different numbers of KV heads, head sizes or KV cache dtypes" in why_not([layer(), other()])


def test_each_length_of_window_is_a_kind() -> None:
    """vLLM makes a block table for each, and frees blocks by it."""
    _, kinds, why = attention_layers(
        model_of([layer(window=window) for window in (100, 7, None, 100)]), HostLayerFlashBackend, config_of()
    )
    assert (kinds.full, kinds.windowed, kinds.windows, why) == ((2,), (0, 1, 3), (100, 7, 100), "")


def test_more_lengths_of_windows_are_refused() -> None:
    found = why_not([layer(window=window) for window in (100, 7, None, 40, 7)])
    assert found == "its sliding windows have 3 lengths (7, 40, 100 tokens), and 2 are supported"


def test_an_unknown_kind_of_kv_cache_is_named() -> None:
    unknown = layer()
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32, attention_chunk_size=64
    )
    unknown.get_kv_cache_spec = lambda vllm_config: spec
    assert why_not([layer(), unknown]) == f"layer {name(1)} has a KV cache of the kind ChunkedLocalAttentionSpec"


def test_layers_that_vllm_keeps_apart_for_another_reason_are_refused() -> None:
    apart = layer()
    spec = replace(apart.get_kv_cache_spec(config_of()), attention_chunk_size=64)
    apart.get_kv_cache_spec = lambda vllm_config: spec
    assert why_not([layer(), apart]) == "vLLM keeps separate block tables for layers with the same window"
    assert not why_not([apart, apart])


class State(MambaBase):
    get_state_shape = get_state_dtype = mamba_type = None  # type: ignore[assignment]


def test_layers_with_states_are_left_out_where_host_layers_were_run_beside_them() -> None:
    context = model_of([State(), layer()])
    config = config_of(hf_text_config=SimpleNamespace(model_type="qwen3_next"))
    names, kinds, why = attention_layers(context, HostLayerFlashBackend, config, beside_states=True)
    assert (names, kinds.full, why) == ({1: name(1)}, (1,), "")


@pytest.mark.parametrize(("model_type", "beside_states"), [("qwen3_next", False), ("jamba", True)])
def test_layers_with_other_states_are_named(model_type: str, beside_states: bool) -> None:
    """NPUs, and other models, whose states the plan does not count."""
    context = model_of([State(), layer()])
    config = config_of(hf_text_config=SimpleNamespace(model_type=model_type))
    names, _, why = attention_layers(context, HostLayerFlashBackend, config, beside_states)
    assert (names, why) == ({}, f"layer {name(0)} keeps a state, and host layers beside it are untested")
    assert AcceleratorRuntime.beside_states is False


def test_two_layers_in_one_decoder_layer_are_refused() -> None:
    context = {"model.layers.0.first.attn": layer(), "model.layers.0.second.attn": layer()}
    assert "in one decoder layer" in attention_layers(context, HostLayerFlashBackend, config_of())[2]


@pytest.mark.parametrize(
    ("model", "why"), [({"is_mm_prefix_lm": True}, "both directions"), ({"rswa_window": 128}, "R-SWA")]
)
def test_a_model_whose_metadata_changes_the_mask_is_refused(model: dict[str, Any], why: str) -> None:
    """Its layers look like any others; the metadata defines which tokens attend to which."""
    assert why in why_not([layer(), layer()], config_of(**model))


@pytest.mark.parametrize("asked", NOT_COMPUTED)
def test_a_batch_whose_metadata_changes_the_mask_is_refused(asked: str) -> None:
    builder = HostMetadataBuilder.__new__(HostMetadataBuilder)
    builder.stream, builder.kv_cache_spec = None, SimpleNamespace(block_size=BLOCK)
    common: Any = SimpleNamespace(
        num_reqs=1,
        causal=True,
        query_start_loc_cpu=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32),
        max_seq_len=3,
        block_table_tensor=torch.zeros(1, 4, dtype=torch.int32),
        slot_mapping=torch.arange(3),
    )
    common.mm_req_doc_ranges = {0: []}  # a batch of text: such a model has no images here
    assert builder.build(0, common).batch is not None
    setattr(common, asked, {0: [(0, 2)]} if asked == "mm_req_doc_ranges" else torch.tensor([2]))
    with pytest.raises(Refusal, match=f"{asked}.*set host_kv_layers to 0"):
        builder.build(0, common)


def test_a_page_has_the_heads_of_its_layer() -> None:
    """It has as many tokens as a page of the layer whose block table it uses."""
    target = SimpleNamespace(
        kv_cache=torch.zeros(10, 4, 32, 2 * HEAD_SIZE), impl=SimpleNamespace(num_kv_heads=4, head_size=HEAD_SIZE)
    )
    inner = SimpleNamespace(cache_dtype=lambda cache: cache.dtype)
    host = SimpleNamespace(impl=SimpleNamespace(num_kv_heads=8, head_size=HEAD_SIZE, inner=inner))
    shape = page_shape(host, target)
    assert (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size) == (10, 32, 8, HEAD_SIZE)


class Backend(Enum):
    FASTATTENTION = "ours"
    OTHER = "another"


def refused_with_host_layers(**changes: Any) -> Any:
    """A configuration without special options, except for ``changes`` (by part and name)."""
    parts: dict[str, dict[str, Any]] = {
        "cache_config": {"kv_sharing_fast_prefill": False},
        "parallel_config": {
            "data_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "model_config": {"enable_sleep_mode": False, "is_hybrid": False},
        "attention_config": {"backend_per_kind": {"sliding_window": Backend.FASTATTENTION}},
        "speculative_config": {"method": "ngram"},
    }
    for part, values in changes.items():
        parts[part] = parts[part] | values
    plain = {"kv_transfer_config": None, "additional_config": {}}
    return SimpleNamespace(**plain, **{part: SimpleNamespace(**one) for part, one in parts.items()})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallelism"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"model_config": {"enable_sleep_mode": True}}, "sleep mode"),
        ({"attention_config": {"backend_per_kind": {"full_attention": Backend.OTHER}}}, "backend_per_kind"),
        ({"parallel_config": {"enable_dbo": True}}, "--enable-dbo"),
        ({"parallel_config": {"ubatch_size": 2}}, "--enable-dbo"),
        ({"speculative_config": {"method": "ngram", "enable_adaptive_verification": True}}, "adaptive verification"),
        ({}, "VLLM_BATCH_INVARIANT"),
    ],
)
def test_options_incompatible_with_host_layers_are_refused(
    changes: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", False, raising=False)
    host_plan.check(refused_with_host_layers())
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", not changes, raising=False)
    with pytest.raises(Refusal, match=f"{named} is not supported with host layers.*host_kv_layers to 0") as caught:
        host_plan.check(refused_with_host_layers(**changes))
    assert "\n" not in (sentence(caught.value) or "\n")


def test_host_layers_of_8_bits_are_refused_beside_a_checkpoints_fp8_cache() -> None:
    """vLLM has set the dtype by now; the user may not have passed it."""
    weights = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    config = refused_with_host_layers(
        cache_config={"cache_dtype": "fp8"}, model_config={"hf_config": SimpleNamespace(quantization_config=weights)}
    )
    config.additional_config = {"fastattention": {"host_kv_dtype": "int8"}}
    with pytest.raises(Refusal, match=r"^host_kv_dtype is int8, but the fp8 KV cache of this checkpoint .* to auto\.$"):
        host_plan.check(config)


class CountingLink(LocalLink):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def staging(self, size: int) -> torch.Tensor:
        self.taken.append(size)
        return super().staging(size)


class Device:
    """The CPU kernels; records the number of keys of each call."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def run(self, problem: Any, *, return_lse: bool = False) -> Any:
        self.keys.append(int(problem.seq_lens[0]))
        return cpu_kernels.run(problem, return_lse=return_lse)

    def write_kv(self, *arguments: Any) -> None:
        cpu_kernels.write_kv(*arguments)


class Runtime:
    """A device with separate, small memory."""

    host_backend = HostLayerFlashBackend
    beside_states = False
    pin = SimpleNamespace()

    def __init__(self) -> None:
        self.counting, self.device, self.prepared = CountingLink(), Device(), 0

    def cpus(self) -> list[int]:
        return [0]

    def settle_block_size(self) -> None:
        pass

    def prepare(self) -> None:
        self.prepared += 1

    def kernels(self) -> Any:
        return self.device

    def link(self) -> Any:
        return self.counting

    def graph_calls(self, link: Any) -> Any:
        return None

    def kv_bytes(self) -> int:
        return 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = reference.llama(HEADS, KV_HEADS, HEAD_SIZE, layers=LAYERS)
    config.architectures = ["LlamaForCausalLM"]
    path = tmp_path_factory.mktemp("llama")
    config.save_pretrained(path)
    return path


Place = Callable[..., tuple[Any, Runtime]]


@pytest.fixture
def place(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(host_layers, "_smallest_of_all_ranks", lambda limits: limits)
    monkeypatch.setattr(prefetch, "STAGING_BYTES", STAGING_BLOCKS * BLOCK_BYTES)

    def placed(layers: list[Any], asked: Any, kv_bytes: int | None = None, **more: Any) -> tuple[Any, Runtime]:
        config = EngineArgs(
            model=str(llama),
            attention_backend="fastattention",
            dtype="float32",
            block_size=BLOCK,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            skip_tokenizer_init=True,
            enforce_eager=True,
            additional_config={"fastattention": {"host_kv_layers": asked}},
            **more,
        ).create_engine_config()
        config.additional_config["fastattention"]["host_kv_layers"] = asked  # without a GPU, "auto" means none
        config.compilation_config.static_forward_context = model_of(layers)
        if kv_bytes is not None:  # of a GPU: the CPU platform would refuse too few
            config.cache_config.kv_cache_memory_bytes = kv_bytes
        runtime = Runtime()
        host_layers.set_up(config, runtime)
        return config, runtime

    return placed


def test_a_special_layer_stops_the_start_if_host_layers_were_requested(place: Place) -> None:
    with pytest.raises(Refusal, match=r"host_kv_layers 2 is not supported with this model: layer .* ChunkedLocal"):
        place([layer(), layer(), layer(), layer(ChunkedLocalAttention, WRAPPED)], 2)


def test_a_special_layer_keeps_all_layers_on_the_device_by_default(place: Place) -> None:
    layers = [layer(), layer(), layer(), layer(ChunkedLocalAttention, WRAPPED)]
    config, runtime = place(layers, "auto")
    assert host_layers.find(config) is None
    assert options_of(config).host_kv_layers == []
    assert [one.attn_backend for one in layers] == [FastAttentionFlashBackend] * 3 + [WRAPPED]
    assert runtime.counting.taken == []
    assert not runtime.prepared


def test_host_layers_use_the_table_of_their_own_window(place: Place) -> None:
    layers = [layer(window=window) for window in (100, 7, 100, 7)]
    config, _ = place(layers, [0, 1])
    found = host_layers.find(config)
    assert found is not None
    assert found.targets == {name(0): name(2), name(1): name(3)}
    with pytest.raises(Refusal, match="would need 3 block tables in vLLM instead of 2"):
        place([layer(window=window) for window in (100, 7, 100, 7)], [0])


def test_a_layer_without_a_window_stays_in_the_table_of_all_kinds(place: Place) -> None:
    def layers() -> list[Any]:
        return [layer(window=window) for window in (100, None, 100, None)]

    with pytest.raises(Refusal, match=r"leaves no full-attention layer on the device.*one of 1, 3 from"):
        place(layers(), [1, 3], disable_hybrid_kv_cache_manager=True)
    config, _ = place(layers(), [0, 3], disable_hybrid_kv_cache_manager=True)
    found = host_layers.find(config)
    assert found is not None
    assert set(found.targets.values()) == {name(1)}, "all device layers share a table"


def test_the_tables_that_vllm_made_are_checked(place: Place) -> None:
    """Before a pool is made, on every device: the last place where another grouping than planned can be found."""
    config, _ = place([layer() for _ in range(LAYERS)], [1])
    found, context = host_layers.find(config), config.compilation_config.static_forward_context
    assert found is not None
    spec = layer(window=100).get_kv_cache_spec(config)
    groups = [KVCacheGroupSpec([name(index) for index in (0, 2, 3)], spec)]
    with pytest.raises(Refusal, match=r"vLLM keeps 100 tokens of each request.*sees all tokens; set"):
        found.allocate(context, SimpleNamespace(kv_cache_groups=groups))


def test_a_length_too_long_for_the_device_is_refused_before_the_model_is_compiled(place: Place) -> None:
    """vLLM would refuse it after that, and would not name host layers."""
    enough = 2 * -(-256 // BLOCK) * BLOCK_BYTES
    config, _ = place([layer() for _ in range(LAYERS)], 2, enough)
    fewest = LAYERS - 1
    with pytest.raises(Refusal, match=f"beside 2 host layers.*set host_kv_layers to {fewest}, or pass") as caught:
        place([layer() for _ in range(LAYERS)], 2, enough - 1)
    assert re.fullmatch(r"[^\n]*[^.]\.", str(caught.value))
    found = host_layers.find(config)
    assert found is not None
    with pytest.raises(Refusal, match="--max-model-len"):  # where vLLM has measured what is free
        found.clamp(enough - 1)


def test_host_layers_are_in_the_models_order(place: Place) -> None:
    """They are not sorted by kind: a forward pass visits them in this order, and their KV is prefetched in it."""
    layers = [layer(window=100), layer(), layer(window=100), layer()]
    config, _ = place(layers, [0, 1])
    found = host_layers.find(config)
    assert found is not None
    assert list(found.targets.items()) == [(name(0), name(2)), (name(1), name(3))]
    for host in found.targets:
        config.compilation_config.static_forward_context[host].impl.open(torch.zeros(9, KV_HEADS, BLOCK, 2 * HEAD_SIZE))
    assert [one.layer for one in found.group.layers] == [layers[0].impl, layers[1].impl]


def test_device_memory_is_allocated_before_vllm_measures_the_rest(place: Place) -> None:
    """Two buffers are allocated for all host layers together as they are chosen.

    The profiling run allocates what the longest step needs: it attends to the new tokens, and to a context that fills a
    buffer.
    """
    layers = [layer() for _ in range(LAYERS)]
    config, runtime = place(layers, [1, 3])
    two = [STAGING_BLOCKS * BLOCK_BYTES] * prefetch.NUM_BUFFERS
    assert runtime.counting.taken == two
    found = host_layers.find(config)
    assert found is not None
    assert [one.attn_backend for one in layers] == [FastAttentionFlashBackend, HostLayerFlashBackend] * 2
    query, key, value = torch.zeros(30, HEADS, HEAD_SIZE), *torch.zeros(2, 30, KV_HEADS, HEAD_SIZE)
    for tokens in (20, 10, 30):
        for host in layers[1::2]:
            parts = (query[:tokens], key[:tokens], value[:tokens])
            out = host.impl.forward(host, *parts, torch.empty(0), None, torch.ones_like(parts[0]))
            assert not out.any()
    context = STAGING_BLOCKS * BLOCK
    assert runtime.device.keys == [20, context, 30, context], "one call for each length above all earlier ones"
    for host in layers[1::2]:
        host.impl.open(torch.zeros(9, KV_HEADS, BLOCK, 2 * HEAD_SIZE))
    assert runtime.counting.taken == two, "nothing may be allocated afterwards"
    assert [one.cache.shape[0] for one in found.group.layers] == [9, 9], "without the profiling run's layers"


def test_a_batch_without_a_pool_is_an_error(place: Place) -> None:
    """A worker of another class allocates no pool."""
    layers = [layer() for _ in range(LAYERS)]
    place(layers, [1])
    host = layers[1]
    assert isinstance(host.impl, HostLayerImpl)
    rows = torch.ones(1, HEADS, HEAD_SIZE)

    def batch(slot: int) -> HostMetadata:
        one, slots = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([slot])
        return HostMetadata(Batch(one, one[1:], one[None], slots, slots))

    with pytest.raises(RuntimeError, match=rf"layer {name(1)} .*which this worker has not allocated; remove --worker"):
        host.impl.forward(host, rows, rows, rows, torch.empty(0), batch(16), rows)
    for slot in (-1, 0):  # of vLLM's warm-up; up to 0.19 in block 0, which nobody owns
        assert not host.impl.forward(host, rows, rows, rows, torch.empty(0), batch(slot), rows.clone()).any()
