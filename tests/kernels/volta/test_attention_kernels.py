"""The V100's attention kernels against float64, for every head size and feature, as machine code on the simulator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastattention_vllm.attention.volta.launch import (
    HEAD_SIZES,
    PART_KEYS,
    SMS,
    Divisor,
    decode_parts,
    floats_of_parts,
    min_parts,
    part_length,
    partial_floats,
    prefill_grid,
    prefill_parts,
)
from kernels.volta.variants import WIDE_ROWS, prefill
from tests.attention.oracle import Case
from tests.kernels.volta import attention
from tests.kernels.volta.machine import more

FP16 = torch.float16
SOON = {
    "prefill": ("causal", "window", "soft cap", "ALiBi", "sinks", "all of it", "no pages"),
    "decode": ("causal", "all of it", "no pages"),
    "decode_wide": ("causal", "all of it", "no pages"),
}
"""Features that `make test` checks, at head size 64. `make test-more` checks the others; each head size is compiled."""

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": (70, -1)},
    "window both ways": {"window": (50, 20), "causal": False},
    "soft cap": {"softcap": 2.0},
    "ALiBi": {"alibi": "shared"},
    "sinks": {"sinks": 0.0},
    "all of it": {"window": (90, -1), "softcap": 3.0, "alibi": "shared", "sinks": 1.0},
    "one page": {"page_size": 784},
    "pages of 32 tokens, K and V apart": {"page_size": 32, "layout": "NHD"},
    "no pages": {"page_size": 0},
}


def cases(kind: str) -> list[Any]:
    """All features at one head size, a few at every other one."""
    found = []
    for head_size in HEAD_SIZES:
        for name, changes in FEATURES.items():
            if head_size == 64 or name in ("causal", "all of it"):
                marks = [] if head_size == 64 and name in SOON[kind] else [pytest.mark.more]
                found.append(pytest.param(head_size, changes, marks=marks, id=f"{kind}-{head_size}-{name}"))
    return found


@pytest.mark.parametrize(("head_size", "changes"), cases("prefill"))
def test_prefill(head_size: int, changes: dict[str, Any]) -> None:
    """A prompt, a chunk after a context, a few tokens, and one token.

    With fewer keys than queries, some rows see no key.
    """
    shape = {"num_heads": 6, "num_kv_heads": 2, "padding": 2}
    problem = Case((70, 40, 3, 1), (70, 200, 33, 1), head_size=head_size, dtype=FP16, **(shape | changes)).build()
    attention.check(problem, attention.prefill(problem))


@pytest.mark.parametrize(("head_size", "changes"), cases("decode"))
def test_decode(head_size: int, changes: dict[str, Any]) -> None:
    shape = {"num_heads": 8, "num_kv_heads": 2, "padding": 1}
    problem = Case((2, 1, 1), (300, 1, 129), head_size=head_size, dtype=FP16, **(shape | changes)).build()
    attention.check(problem, attention.decode(problem))


@pytest.mark.parametrize(("head_size", "changes"), cases("decode_wide"))
def test_decode_of_many_rows(head_size: int, changes: dict[str, Any]) -> None:
    """Speculation: five tokens of six heads, which fill all parts that there is room for, and one beside them; one key
    for three tokens, two of which see nothing."""
    shape = {"num_heads": 12, "num_kv_heads": 2, "padding": 1}
    problem = Case((5, 1, 3, 4), (300, 129, 1, 4), head_size=head_size, dtype=FP16, **(shape | changes)).build()
    attention.check(problem, attention.decode(problem))


@pytest.mark.parametrize(("tokens", "group"), [(1, 9), (32, 1), (2, 16)])
def test_rows_of_the_wide_kernel(tokens: int, group: int) -> None:
    """From the fewest to the most, of one token or many."""
    problem = Case((tokens,), (150,), group, 1, 64, dtype=FP16).build()
    attention.check(problem, attention.decode(problem))


IN_PARTS = ("causal", "window", "sinks")


@pytest.mark.parametrize("feature", [name if name in IN_PARTS else more(name) for name in FEATURES])
def test_prefill_in_parts(feature: str) -> None:
    """Some of the 3 parts are empty, or end within the keys that only some rows see."""
    shape = {"num_heads": 6, "num_kv_heads": 2, "padding": 2}
    problem = Case((70, 3, 30), (270, 200, 30), head_size=64, dtype=FP16, **(shape | FEATURES[feature])).build()
    attention.check(problem, attention.prefill(problem, count=3))


@pytest.mark.parametrize("head_size", [more(size) for size in HEAD_SIZES if size != 64])
def test_prefill_in_parts_of_every_head_size(head_size: int) -> None:
    problem = Case((70, 3), (270, 200), 6, 2, head_size, dtype=FP16, padding=2).build()
    attention.check(problem, attention.prefill(problem, count=3))


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_that_see_nothing(parts: int) -> None:
    """With more queries than keys, the first rows are zero and their log-sum-exp is -inf."""
    problem = Case((40,), (25,), head_size=64, dtype=FP16).build()
    attention.check(problem, attention.prefill(problem, count=parts))


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode_wide"])
@pytest.mark.parametrize("head_size", [size if size == 64 else more(size) for size in HEAD_SIZES])
def test_tiles_are_read_and_written_without_bank_conflicts(kind: str, head_size: int) -> None:
    """Checks tiles of queries, keys and values. Outputs are not checked: they pass once, 4 bytes at a time.

    In the wide decode kernel they are read 16 bytes at a time, after the last matmul.
    """
    launch = attention.launch_prefill if kind == "prefill" else attention.launch_decode
    heads = 12 if kind == "decode_wide" else 4
    simulation = launch(Case((2,), (300,), heads, 1, head_size, dtype=FP16).build())[0]
    trace = simulation.trace(0)
    wide = [i for i, facts in enumerate(simulation.instructions) if facts.access.startswith("shared")]
    wide = [i for i in wide if simulation.instructions[i].width == 16]
    if kind == "decode_wide":
        matmuls = (i for i, facts in enumerate(simulation.instructions) if "HMMA" in facts.text and trace.executions[i])
        last = max(matmuls)
        outputs = [i for i in wide if i > last and "load" in simulation.instructions[i].access]
        assert sum(int(trace.executions[i]) for i in outputs) <= WIDE_ROWS
        wide = [i for i in wide if i not in outputs]
    assert sum(int(trace.executions[i]) for i in wide) > 100
    assert all(trace.transactions[i] <= 4 * trace.executions[i] for i in wide)


@pytest.mark.parametrize("head_size", [64, more(80), more(256)])
def test_new_keys_and_values_go_to_their_slots(head_size: int) -> None:
    """Both layouts of vLLM. Negative slots are skipped, and nothing else is touched."""
    random = torch.Generator().manual_seed(0)
    slots = torch.tensor([37, 0, -1, 63, 16], dtype=torch.int64)
    for layout in ("HND", "NHD"):
        wide = torch.randn(6, 9, head_size, generator=random).half()
        key, value = wide[:, 2:5], wide[:, 5:8].clone()  # compiled models pass values with different strides
        if layout == "HND":
            cache = torch.full((4, 3, 16, 2 * head_size), 7.0, dtype=FP16)
            key_cache, value_cache = cache.transpose(1, 2).split(head_size, dim=-1)
        else:
            cache = torch.full((4, 2, 16, 3, head_size), 7.0, dtype=FP16)
            key_cache, value_cache = cache.unbind(1)
        expected = cache.clone()
        expected_key, expected_value = (
            torch.as_strided(expected, view.shape, view.stride(), view.storage_offset())
            for view in (key_cache, value_cache)
        )
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected_key[slot // 16, slot % 16] = key[token]
                expected_value[slot // 16, slot % 16] = value[token]
        attention.write_kv(key, value, key_cache, value_cache, slots)
        assert torch.equal(cache, expected)


@given(st.integers(1, 1 << 30), st.integers(0, (1 << 31) - 1))
def test_division(divisor: int, number: int) -> None:
    assert Divisor.by(divisor)(number) == number // divisor
    for near in (number // divisor * divisor - 1, number // divisor * divisor):
        if near >= 0:
            assert Divisor.by(divisor)(near) == near // divisor


LAUNCHES = st.tuples(
    st.sampled_from(HEAD_SIZES), st.integers(1, 4096), st.integers(1, 8), st.integers(1, 9), st.integers(1, 1 << 18)
)


@given(LAUNCHES)
@example((128, 3840, 4, 1, 1 << 18))  # exactly one and a half: two parts would take three waves of half the time
def test_prompts_are_split_if_there_are_few_ctas(launch: tuple[int, int, int, int, int]) -> None:
    """Never if they fill the GPU one and a half times, and never into more parts than workspace and work allow."""
    head_size, tokens, group, seqs, longest = launch
    variant = prefill(head_size)
    grid = prefill_grid(variant, tokens * group, 2, seqs)
    parts, waves = prefill_parts(variant, grid, longest), math.prod(grid) / (SMS * variant.ctas_per_sm)
    assert 1 <= parts <= max(1, longest // PART_KEYS)
    if waves >= 1.5:
        assert parts == 1
    elif waves <= 0.5 and longest >= 4096:
        assert parts > 1
    if parts > 1:
        rows = 2 * seqs * parts * tokens * group
        assert floats_of_parts(head_size, rows) <= partial_floats(prefill(head_size), group, 2, seqs, longest)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 128))
def test_no_sequence_has_more_parts_than_the_workspace_holds(length: int, longest: int, kv_heads: int) -> None:
    least = min_parts(kv_heads)
    for kv_len in (min(length, longest), min(8192, longest), longest):
        parts = -(-kv_len // part_length(kv_len, least))
        assert parts <= decode_parts(longest, least) <= 64
        assert parts >= min(15 * least / 16, 32, -(-kv_len // 192)), "the workspace must not hold twice as many parts"


@pytest.mark.parametrize(
    ("kv_heads", "keys", "length"),
    [
        (4, 2688, 128),
        (4, 2689, 192),
        (4, 3000, 192),
        (4, 3840, 192),
        (4, 3841, 128),
        (4, 4096, 256),
        (8, 4096, 512),
        (8, 3000, 384),
    ],
)
def test_parts_half_as_long_again(kv_heads: int, keys: int, length: int) -> None:
    """If a sequence then has 60 to 80 CTAs."""
    assert part_length(keys, min_parts(kv_heads)) == length
