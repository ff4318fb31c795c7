"""The plan's assumptions, against vLLM's own grouping of the layers that stay on the device."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.integration.kv_size import as_grouped
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.host_pool import assign_slabs
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, PlacementError, all_splits, indices_text, plan
from tests import reference_models as reference
from tests.integration.kv_caches import HAS_LAYOUTS

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
BYTES_PER_BLOCK = 2 * 16 * 2 * 64 * 4
SHARED = [HealthCheck.function_scoped_fixture]
"""All examples of a test have the same value of ``merged``."""


Windows = list[int | None]
"""The window of each layer; None: it attends to all tokens."""
Grouping = Callable[[Windows, set[int]], list[Any]]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = reference.llama(4, 2, 64)
    config.architectures = ["LlamaForCausalLM"]
    path = tmp_path_factory.mktemp("llama")
    config.save_pretrained(path)
    arguments = {"attention_backend": "fastattention", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    vllm_config = EngineArgs(model=str(path), skip_tokenizer_init=True, **arguments).create_engine_config()
    if HAS_LAYOUTS:
        vllm_config.cache_config.kv_cache_layout = "LBHNC"  # the engine would have set it by now
    return vllm_config


@pytest.fixture(params=[False, True], ids=["kinds apart", "one kind"])
def merged(vllm_config: Any, request: pytest.FixtureRequest) -> bool:
    """Whether --disable-hybrid-kv-cache-manager is set."""
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = request.param
    return bool(request.param)


@pytest.fixture
def vllm_groups(vllm_config: Any, merged: bool) -> Grouping:
    """The block tables that vLLM keeps for the layers on the device."""

    def groups(windows: Windows, device: set[int]) -> list[Any]:
        specs = {str(index): spec_of(windows[index]) for index in sorted(device)}
        return get_kv_cache_groups(vllm_config, cast(Any, specs))

    return groups


def spec_of(window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
    return FullAttentionSpec(**SHAPE) if window is None else SlidingWindowSpec(sliding_window=window, **SHAPE)


def layers_and_size(windows: Windows, merged: bool = False) -> tuple[Layers, KvSize]:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=merged)
    layers = as_grouped(dict(enumerate(windows)), (), cast(Any, SimpleNamespace(scheduler_config=scheduler)))
    full, windowed = len(layers.full), len(layers.windowed)
    size = KvSize(16, BYTES_PER_BLOCK, full, windowed, tokens_per_step=64, windows=layers.windows)
    return layers, size


def of_kinds(kinds: list[bool]) -> Windows:
    return [None if full else 100 for full in kinds]


# As in llama, gemma3 (one full layer after five windowed ones), gpt-oss (alternating), and any other order.
WINDOWS = st.one_of(
    st.builds(lambda count: of_kinds([True] * count), st.integers(1, 40)),
    st.builds(lambda count: of_kinds([index % 6 == 5 for index in range(count)]), st.integers(1, 62)),
    st.builds(lambda count: of_kinds([index % 2 == 1 for index in range(count)]), st.integers(1, 40)),
    st.lists(st.sampled_from([None, 100]), min_size=1, max_size=30),
)
# With windows of two lengths, as in openPangu. vLLM cannot merge these into one kind.
SEVERAL = st.one_of(
    st.builds(lambda count: ([None, 100, 7] * count)[:count], st.integers(1, 24)),
    st.lists(st.sampled_from([None, 100, 7]), min_size=1, max_size=20),
)


@st.composite
def subsets(draw: st.DrawFn, least: int) -> tuple[Windows, set[int]]:
    windows = draw(st.one_of(WINDOWS, SEVERAL))
    return windows, draw(st.sets(st.integers(0, len(windows) - 1), min_size=least))


def vllm_can_merge(windows: Windows) -> bool:
    return len({*windows} - {None}) < 2


@settings(max_examples=400, suppress_health_check=SHARED)
@given(subsets(least=1))
def test_the_plan_counts_as_many_block_tables_as_vllm(
    vllm_groups: Grouping, merged: bool, case: tuple[Windows, set[int]]
) -> None:
    """This holds for any set of layers that may stay on the device."""
    windows, device = case
    on_device = [windows[index] for index in sorted(device)]
    assume(not merged or vllm_can_merge(on_device))
    _, size = layers_and_size(on_device, merged)
    groups = vllm_groups(windows, device)
    assert len(groups) == size.groups()
    assert max(len(group.layer_names) for group in groups) <= size.layers_per_group()


@settings(max_examples=600, suppress_health_check=SHARED)
@given(subsets(least=0), st.booleans())
def test_the_pool_has_a_slab_for_every_layer(
    vllm_groups: Grouping, merged: bool, case: tuple[Windows, set[int]], by_number: bool
) -> None:
    """Layers of one block table have separate slabs, and the number of slabs is at most the plan's.

    vLLM keeps all the blocks that the host layers of a table need.
    """
    windows, host = case
    assume(not merged or vllm_can_merge(windows))
    layers, size = layers_and_size(windows, merged)
    try:
        placement = plan(layers, size, len(host) if by_number else sorted(host), Limits(0, 0, 0))
    except PlacementError:
        return
    targets = host_layers._targets(layers, placement)
    assert set(targets) == set(placement.host)
    assert set(targets.values()) <= set(placement.device)
    groups = vllm_groups(windows, set(placement.device))
    names = {str(host): str(target) for host, target in targets.items()}
    host_layers.check_tables(names, {name: spec_of(windows[int(name)]) for name in names}, groups)
    tables = [[host for host, target in names.items() if target in group.layer_names] for group in groups]
    slabs = assign_slabs(tables)
    assert len(slabs) == len(placement.host)
    used = 1 + max(slabs.values(), default=-1)
    assert used <= placement.slabs <= used + 1
    for table in tables:
        assert max(Counter(slabs[name] for name in table).values(), default=1) == 1


@pytest.mark.parametrize(
    ("windows", "target", "merged", "said"),
    [
        ([100, 7], 1, False, "vLLM keeps 7 tokens .* host layer 0 shares that table and sees 100 tokens"),
        ([7, 100], 1, False, "vLLM keeps 100 tokens .* sees 7 tokens"),
        ([None, 100], 1, False, "vLLM keeps 100 tokens .* sees all tokens"),
        ([None, 100], 1, True, "vLLM keeps 100 tokens .* sees all tokens"),
    ],
    indirect=["merged"],
)
def test_a_table_that_frees_blocks_too_early_is_refused(
    vllm_groups: Grouping, merged: bool, windows: Windows, target: int, said: str
) -> None:
    """Layer 0 is on the host. The others are on the device, where vLLM itself makes the block tables."""
    groups = vllm_groups(windows, set(range(1, len(windows))))
    with pytest.raises(Refusal, match=f"{said}; set host_kv_layers to 0.$"):
        host_layers.check_tables({"0": str(target)}, {"0": spec_of(windows[0])}, groups)


@pytest.mark.parametrize(
    ("windows", "target", "merged"),
    [
        ([None, None], 1, False),
        ([100, None], 1, False),
        ([100, 100], 1, False),
        ([None, 100, None], 1, True),
    ],
    indirect=["merged"],
)
def test_a_table_that_keeps_the_blocks_is_accepted(vllm_groups: Grouping, windows: Windows, target: int) -> None:
    """A table that keeps whole sequences serves every window."""
    groups = vllm_groups(windows, set(range(1, len(windows))))
    host_layers.check_tables({"0": str(target)}, {"0": spec_of(windows[0])}, groups)


@pytest.mark.parametrize("change", [{"num_kv_heads": 4}, {"head_size": 32}, {"dtype": torch.float16}])
def test_a_table_with_other_rows_is_refused(vllm_groups: Grouping, change: dict[str, Any]) -> None:
    groups = vllm_groups([None, None], {1})
    with pytest.raises(Refusal, match="layer 1 has another number of KV heads, head size or KV cache dtype than host"):
        host_layers.check_tables({"0": "1"}, {"0": FullAttentionSpec(**SHAPE | change)}, groups)


def test_a_table_that_vllm_did_not_make_is_refused(vllm_groups: Grouping) -> None:
    groups = vllm_groups([None, None], {1})
    with pytest.raises(Refusal, match="no block table for layer 2"):
        host_layers.check_tables({"0": "2"}, {"0": spec_of(None)}, groups)


@pytest.mark.parametrize("pattern", ["WF" * 12, "WF" * 21, ("WWWWWF" * 11)[:62], "WWWF" * 8, "FW", "WWF"])
def test_a_layer_without_a_window_stays_in_the_table_of_all_kinds(pattern: str) -> None:
    """vLLM keeps whole sequences in it only for such a layer: GPT-OSS, Gemma-2, Gemma-3, Olmo-3."""
    layers, size = layers_and_size(of_kinds([letter == "F" for letter in pattern]), merged=True)
    full = tuple(index for index, letter in enumerate(pattern) if letter == "F")
    assert all(set(full) & set(split.device) for split in all_splits(layers, size))
    for count in range(len(pattern)):
        assert set(full) & set(plan(layers, size, count, Limits(0, 0, 0)).device)
    one_layer = replace(size, full_layers=1).of_request(65536)
    for tenths in range(10):
        limits = Limits(max(one_layer, size.of_request(65536) * tenths // 10), 1 << 40, 65536)
        assert set(full) & set(plan(layers, size, "auto", limits).device)
    with pytest.raises(PlacementError, match=f"no full-attention layer.*at least one of {indices_text(full)} from"):
        plan(layers, size, full, Limits(0, 0, 0))


def test_the_budget_is_the_configured_one_or_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_plan, "available_bytes", lambda: 40 * GIB)
    assert host_plan.host_budget(1.5, local_ranks=4, spoken_for=GIB) == 3 * GIB // 2
    assert host_plan.host_budget(None, local_ranks=1, spoken_for=0) == 20 * GIB
    assert host_plan.host_budget(None, local_ranks=4, spoken_for=2 * GIB) == 4 * GIB
    assert host_plan.host_budget(None, local_ranks=4, spoken_for=12 * GIB) == 0


def test_a_pool_that_grows_beyond_the_device_is_clamped_to_whole_blocks() -> None:
    """This way vLLM's number of blocks equals the plan's."""
    layers, size = layers_and_size([None] * 4)
    placement = plan(layers, size, 1, Limits(0, 0, 0))
    placed = host_layers.HostLayers(
        runtime=cast(Any, None),
        group=cast(Any, None),
        placement=placement,
        targets={},
        budget=10 * BYTES_PER_BLOCK + 5,
        max_model_len=100,
        nodes=(),
        stream_fraction=0.0,
        dtype=torch.float32,
    )
    page = 3 * BYTES_PER_BLOCK
    assert placed.clamp(20 * page + 7) == 10 * page
    assert placed.clamp(10 * page) == 10 * page
    assert placed.clamp(9 * page + 7) == 9 * page


def test_the_page_lists_everything_that_is_refused_beside_host_layers() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/host-layers.md").read_text()
    limits = " ".join(page.partition("\n## Limits\n")[2].replace("`", "").lower().split())
    table = next(node for node in ast.walk(ast.parse(inspect.getsource(host_plan.check))) if isinstance(node, ast.Dict))
    refused = [key.value for key in table.keys if isinstance(key, ast.Constant)]
    assert len(refused) > 10
    assert [name for name in refused if name.rstrip(",").lower() not in limits] == []
