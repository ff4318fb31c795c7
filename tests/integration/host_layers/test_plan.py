"""The plan's assumptions, against vLLM's own grouping of the layers that stay on the device."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.integration.host_layers import plan as host_plan
from fastattention_vllm.placement.host_memory import GIB
from fastattention_vllm.placement.host_pool import assign_slabs
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, PlacementError, plan
from tests import reference_models as reference
from tests.integration.kv_caches import HAS_LAYOUTS

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
BYTES_PER_BLOCK = 2 * 16 * 2 * 64 * 4


Grouping = Callable[[Layers, set[int]], list[list[int]]]


@pytest.fixture(scope="module")
def vllm_groups(tmp_path_factory: pytest.TempPathFactory) -> Grouping:
    """The block tables that vLLM keeps for the layers on the device, each as a list of layers."""
    config = reference.llama(4, 2, 64)
    config.architectures = ["LlamaForCausalLM"]
    path = tmp_path_factory.mktemp("llama")
    config.save_pretrained(path)
    arguments = {"attention_backend": "fastattention", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    vllm_config = EngineArgs(model=str(path), skip_tokenizer_init=True, **arguments).create_engine_config()
    if HAS_LAYOUTS:
        vllm_config.cache_config.kv_cache_layout = "LBHNC"  # the engine would have set it by now
    windowed, full = SlidingWindowSpec(sliding_window=100, **SHAPE), FullAttentionSpec(**SHAPE)

    def groups(layers: Layers, device: set[int]) -> list[list[int]]:
        specs = {str(index): windowed if index in layers.windowed else full for index in sorted(device)}
        return [[int(name) for name in group.layer_names] for group in get_kv_cache_groups(vllm_config, specs)]

    return groups


def layers_and_size(kinds: list[bool]) -> tuple[Layers, KvSize]:
    layers = Layers(
        tuple(index for index, kind in enumerate(kinds) if kind),
        tuple(index for index, kind in enumerate(kinds) if not kind),
    )
    size = KvSize(16, BYTES_PER_BLOCK, len(layers.full), len(layers.windowed), window=100, tokens_per_step=64)
    return layers, size


# As in llama, gemma3 (one full layer after five windowed ones), gpt-oss (alternating), and any other order.
KINDS = st.one_of(
    st.builds(lambda count: [True] * count, st.integers(1, 40)),
    st.builds(lambda count: [index % 6 == 5 for index in range(count)], st.integers(1, 62)),
    st.builds(lambda count: [index % 2 == 1 for index in range(count)], st.integers(1, 40)),
    st.lists(st.booleans(), min_size=1, max_size=30),
)


@st.composite
def subsets(draw: st.DrawFn, least: int) -> tuple[list[bool], set[int]]:
    kinds = draw(KINDS)
    return kinds, draw(st.sets(st.integers(0, len(kinds) - 1), min_size=least))


@settings(max_examples=400)
@given(subsets(least=1))
def test_the_plan_counts_as_many_block_tables_as_vllm(vllm_groups: Grouping, case: tuple[list[bool], set[int]]) -> None:
    """This holds for any set of layers that may stay on the device."""
    kinds, device = case
    layers, _ = layers_and_size(kinds)
    _, size = layers_and_size([kinds[index] for index in sorted(device)])
    groups = vllm_groups(layers, device)
    assert len(groups) == size.groups()
    assert max(map(len, groups)) <= size.layers_per_group()


@settings(max_examples=600)
@given(subsets(least=0), st.booleans())
def test_the_pool_has_a_slab_for_every_layer(
    vllm_groups: Grouping, case: tuple[list[bool], set[int]], by_number: bool
) -> None:
    """Layers of one block table have separate slabs, and the number of slabs is at most the plan's."""
    kinds, host = case
    layers, size = layers_and_size(kinds)
    try:
        placement = plan(layers, size, len(host) if by_number else sorted(host), Limits(0, 0, 0))
    except PlacementError:
        return
    targets = host_layers._targets(layers, placement)
    assert set(targets) == set(placement.host)
    assert set(targets.values()) <= set(placement.device)
    assert all((host in layers.full) == (target in layers.full) for host, target in targets.items())
    tables = [
        [str(host) for host, target in targets.items() if target in group]
        for group in vllm_groups(layers, set(placement.device))
    ]
    slabs = assign_slabs(tables)
    assert len(slabs) == len(placement.host)
    used = 1 + max(slabs.values(), default=-1)
    assert used <= placement.slabs <= used + 1
    for table in tables:
        assert max(Counter(slabs[name] for name in table).values(), default=1) == 1


def test_the_budget_is_the_configured_one_or_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_plan, "available_bytes", lambda: 40 * GIB)
    assert host_plan.host_budget(1.5, local_ranks=4, spoken_for=GIB) == 3 * GIB // 2
    assert host_plan.host_budget(None, local_ranks=1, spoken_for=0) == 20 * GIB
    assert host_plan.host_budget(None, local_ranks=4, spoken_for=2 * GIB) == 4 * GIB
    assert host_plan.host_budget(None, local_ranks=4, spoken_for=12 * GIB) == 0


def test_a_pool_that_grows_beyond_the_device_is_clamped_to_whole_blocks() -> None:
    """This way vLLM's number of blocks equals the plan's."""
    layers, size = layers_and_size([True] * 4)
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
