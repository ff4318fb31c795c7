"""Which FlashAttention steps are split into blocks of rows, with the metadata of every supported vLLM version."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata

from fastattention_vllm.integration.cuda.flash import BlockedMetadataBuilder
from fastattention_vllm.integration.tiling import row_parallel
from fastattention_vllm.integration.tiling.attention_rows import ALIKE, CUT

BASE = "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping"
CASCADE = "use_cascade common_prefix_len cu_prefix_query_lens prefix_kv_lens suffix_kv_lens prefix_scheduler_metadata"
CONTEXT_PARALLEL = "max_dcp_context_kv_len dcp_context_kv_lens"
SCHEDULE = "scheduler_metadata max_num_splits causal"
SPLIT = "num_decode_reqs num_prefill_reqs num_decode_tokens num_prefill_tokens"
PREFIX = "mm_prefix_query_range_tensor rswa_prefix_lens rswa_window rswa_window_tensor"
FIELDS = {
    "0.19.1": f"{BASE} {CASCADE} {CONTEXT_PARALLEL} {SCHEDULE}",
    "0.23.0": f"{BASE} {CASCADE} {CONTEXT_PARALLEL} {SCHEDULE}",
    "0.28.0": f"{BASE} {CASCADE} {CONTEXT_PARALLEL} {SCHEDULE} {SPLIT} {PREFIX}",
    "0.32.0": f"{BASE} {CONTEXT_PARALLEL} {SCHEDULE} {SPLIT} {PREFIX}",
    "0.33.0": f"{BASE} {CONTEXT_PARALLEL} {SCHEDULE} {SPLIT} {PREFIX}",
}
"""The fields of FlashAttentionMetadata in vLLM's sources, by version."""
NUMBERS = f"{SPLIT} max_dcp_context_kv_len common_prefix_len rswa_window".split()
TOKENS = 8
STARTS = torch.arange(TOKENS + 1, dtype=torch.int32)


def others(version: str) -> list[str]:
    """Fields that would have to differ in each block, but do not."""
    return sorted(set(FIELDS[version].split()) - {*CUT, *ALIKE})


def metadata_of(version: str, lengths: torch.Tensor, **changes: Any) -> Any:
    """The metadata that vLLM builds for a step that contains only requests."""
    names = FIELDS[version].split()
    unset = {name: 0 if name in NUMBERS else None for name in names}
    if "use_cascade" in names:
        unset["use_cascade"] = False
    whole = {
        "num_actual_tokens": TOKENS,
        "max_query_len": 1,
        "query_start_loc": STARTS,
        "max_seq_len": 600,
        "seq_lens": lengths,
        "block_table": torch.zeros(TOKENS, 40, dtype=torch.int32),
        "slot_mapping": torch.zeros(TOKENS, dtype=torch.int64),
        "max_num_splits": 3,
        "causal": True,
    }
    return dataclasses.make_dataclass("FlashAttentionMetadata", names)(**(unset | whole | changes))


COMMON: Any = SimpleNamespace(num_reqs=TOKENS, query_start_loc_cpu=STARTS, query_start_loc=STARTS)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split steps into blocks of four rows."""
    blocks = row_parallel.AttentionBlocks(None, lambda rows: (4, 4))  # type: ignore[arg-type]
    monkeypatch.setattr(row_parallel, "_attention_blocks", blocks)


def builder(monkeypatch: pytest.MonkeyPatch, made: Any) -> BlockedMetadataBuilder:
    monkeypatch.setattr(FlashAttentionBackend.get_builder_cls(), "build", lambda self, *given, **named: made)
    found = BlockedMetadataBuilder.__new__(BlockedMetadataBuilder)
    found.aot_schedule, found.aot_sliding_window = False, None  # FlashAttention 2
    return found


class DeviceLayer(FlashAttentionImpl):  # type: ignore[misc]
    def __init__(self, window: tuple[int, int] | None) -> None:
        self.sliding_window = window


@pytest.mark.parametrize(
    ("windows", "scheduled"),
    [([(-1, -1)], (-1, -1)), ([(63, 0), (63, 0)], (63, 0)), ([None], (-1, -1)), ([(63, 0), (-1, -1)], None)],
    ids=["no window", "one window", "none known", "two windows"],
)
def test_steps_are_planned_for_the_window_of_device_layers(
    windows: list[tuple[int, int] | None], scheduled: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.19.1 ends with an AssertionError if one layer is not FlashAttention's, and a host layer is not."""
    found = builder(monkeypatch, SimpleNamespace())
    found.aot_schedule = True
    layers = {f"layers.{index}": SimpleNamespace(impl=DeviceLayer(window)) for index, window in enumerate(windows)}
    layers |= {"host": SimpleNamespace(impl=object()), "not attention": SimpleNamespace()}
    context = SimpleNamespace(static_forward_context=layers)
    found.vllm_config = SimpleNamespace(compilation_config=context)
    found.build(0, COMMON)
    assert found.aot_schedule == (scheduled is not None)
    assert found.aot_sliding_window == (scheduled or (-1, -1))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("version", FIELDS)
def test_plain_steps_are_split(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.arange(100, 100 + TOKENS, dtype=torch.int32)
    made = metadata_of(version, lengths)
    found = builder(monkeypatch, made).build(0, COMMON)
    parts = [block.of(found) for block in found.row_blocks]
    assert [part.num_actual_tokens for part in parts] == [4, 4]
    assert torch.equal(torch.cat([part.seq_lens for part in parts]), lengths)
    assert all(part.max_num_splits == 0 and part.causal for part in parts)
    for name in others(version):
        assert all(getattr(part, name) == getattr(made, name) for part in parts)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(("version", "name"), [(version, name) for version in FIELDS for name in others(version)])
def test_steps_with_additional_metadata_are_not_split(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each block, such fields would describe the requests or tokens of the whole step."""
    value: Any = 1 if name in NUMBERS else torch.zeros(TOKENS, dtype=torch.int32)
    made = metadata_of(version, STARTS[1:], **{name: True if name == "use_cascade" else value})
    assert not hasattr(builder(monkeypatch, made).build(0, COMMON), "row_blocks")


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("causal", [False, torch.ones(TOKENS, dtype=torch.int32)], ids=["not", "per request"])
def test_steps_that_are_not_entirely_causal_are_not_split(causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention computes both as vLLM requests them."""
    made = metadata_of("0.33.0", STARTS[1:], causal=causal)
    assert not hasattr(builder(monkeypatch, made).build(0, COMMON), "row_blocks")


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("version", FIELDS)
def test_a_captured_graph_reads_what_a_later_step_writes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have separate lengths, which would stay those of the capture."""
    lengths = torch.ones(TOKENS, dtype=torch.int32)
    captured = builder(monkeypatch, metadata_of(version, lengths)).build_for_cudagraph_capture(COMMON)
    lengths.copy_(torch.tensor([300, 17, 599, 40, 5, 6, 7, 8]))
    blocks = getattr(captured, "row_blocks", None) or []
    for block in blocks:
        assert torch.equal(block.lengths, lengths[block.first : block.last])
    assert torch.equal(captured.seq_lens, lengths)
    assert not blocks


def test_the_installed_versions_fields_are_known() -> None:
    """A new field must be recorded here. If it does not describe requests or tokens, it also belongs in ``ALIKE``."""
    installed = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    assert installed in [set(fields.split()) for fields in FIELDS.values()], "FIELDS must contain this version"
    assert {*CUT, *ALIKE} <= installed
