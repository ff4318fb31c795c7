"""How many CTAs, launches and slices a product takes."""

from __future__ import annotations

import pytest

from fastattention_vllm.linear.volta import launch
from fastattention_vllm.linear.volta.launch import TILE, Variant
from kernels.volta.linear_variants import UNPACK, VARIANTS, describe

COMPILED = [Variant(**describe(one)) for one in VARIANTS]  # type: ignore[arg-type]
UNPACKING = [Variant(**describe(one)) for one in UNPACK]  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", COMPILED, ids=lambda one: one.name)
def test_a_launch_covers_all_tiles(variant: Variant) -> None:
    for k in (64, 1536, 4352, 5120, 17408):
        for columns in (8, 1024, 5120, 8704, 34816):
            units = -(-k // (128 if variant.weight == "int4" else 64))
            ctas, warps = launch.shape(columns, units, variant)
            assert -(-columns // TILE // ctas) <= variant.tiles
            assert 4 <= warps <= variant.warps
            assert warps * variant.shared_bytes_per_warp * variant.ctas_per_sm <= 96 * 1024


def test_variants() -> None:
    """Few rows take a kernel for few; more tiles are used where they save a wave."""
    fitting = [one for one in (*COMPILED, *UNPACKING) if one.weight == "int8"]
    for rows, columns, expected in ((1, 5120, (8, 4)), (8, 8704, (8, 7)), (9, 5120, (16, 4)), (16, 8704, (16, 7))):
        chosen = launch.variant_for(fitting, rows, columns)
        assert (chosen.rows, chosen.tiles) == expected
    assert launch.variant_for(fitting, 0, 5120).kernel == "fa_volta_unpack"


def test_turns() -> None:
    assert list(launch.turns(1)) == [(0, 1)]
    assert list(launch.turns(16)) == [(0, 16)]
    assert list(launch.turns(37)) == [(0, 16), (16, 16), (32, 5)]
    assert list(launch.turns(0)) == []


@pytest.mark.parametrize(("columns", "k"), [(8, 8), (34816, 5120), (5120, 17408), (152064, 8192)])
def test_slices_are_bounded_and_about_equal(columns: int, k: int) -> None:
    tiles = launch.slice_tiles(columns, k)
    assert 2 * tiles * TILE * k <= launch.SCRATCH_BYTES
    slices = -(-columns // TILE // tiles)
    assert slices == -(-2 * columns * k // launch.SCRATCH_BYTES)
    assert columns // TILE - (slices - 1) * tiles > tiles - slices, "the last one is not much smaller"


def test_a_slice_has_at_least_one_tile() -> None:
    assert launch.slice_tiles(64, launch.SCRATCH_BYTES) == 1
