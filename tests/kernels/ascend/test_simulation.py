"""The model of the 910B on two small programs, whose times are added up by hand."""

from __future__ import annotations

import re

import pytest

from kernels.ascend import removal
from kernels.ascend.pipes import DeadlockError
from kernels.ascend.simulation import Launch, Predicted, bodies, simulate
from kernels.ascend.tables import Chip
from tests.kernels.ascend.programs import CUBE, TABLES, VECTOR

CHIP = Chip("two cores", 2, 1000)


def launch(count: int, cached: bool = True) -> Launch:
    return Launch({}, {"%arg4": lambda _: count}, cached=cached)


def run(cube: str = CUBE, vector: str = VECTOR, count: int = 7, cached: bool = True) -> Predicted:
    return simulate(bodies({"AIC": cube, "AIV": vector}), launch(count, cached), CHIP, TABLES)


@pytest.mark.parametrize(("count", "rounds"), [(0, 1), (1, 1), (2, 2), (5, 3), (7, 4), (100, 4)])
def test_loops_run_as_often_as_the_loaded_number_says(count: int, rounds: int) -> None:
    found = run(count=count)
    assert found.counts["AIC mmadL1"] == found.counts["AIV vexp"] == rounds
    assert found.left_over == 0


def test_busy_cycles_and_bytes_of_each_pipe() -> None:
    found = run(count=1)
    assert found.busy == {
        "AIC MTE2": 512 / 64,
        "AIC MTE1": 512 / 256 + 512 / 128,
        "AIC M": 1,
        "AIC FIX": 1024 / 32 + 26,
        "AIV MTE2": 512 / 64,
        "AIV V": 4,
    }
    assert found.moved == {"to L1": 512, "L1 to L0": 1024, "from L0C": 1024, "to UB": 2 * 512}
    assert found.vector_cycles == {"vexp": 4}


def test_the_time_is_that_of_the_chain_from_the_first_copy_to_the_last_vector() -> None:
    # Six constants, one load, and five operations that compute numbers and places.
    scalar = 6 + 400 + 5
    copied = scalar + 6 + 512 / 64 + 200
    multiplied = copied + 6 + 20 + 1 + 20
    left = multiplied + 1024 / 32 + 26 + 200 + 280
    loaded = left + 6 + 512 / 64 + 200
    assert run(count=1).cycles == loaded + 4 + 24


def test_the_cube_waits_for_the_slower_vector_core() -> None:
    """The second vector core, number 1, runs one more instruction before it sets the flag."""
    expand = re.search(r"    hivm\.hir\.vexp .*\n", VECTOR)
    assert expand
    more = (
        "  %20 = hivm.hir.get_sub_block_idx -> i64\n"
        "  %21 = arith.index_cast %20 : i64 to index\n"
        "  scf.for %arg10 = %c0 to %21 step %c1 {\n" + expand[0] + "  }\n"
        "  hivm.hir.sync_block_set[<VECTOR>, <PIPE_V>, <PIPE_S>] flag = 2\n  return"
    )
    wait = "  hivm.hir.sync_block_wait[<CUBE>, <PIPE_V>, <PIPE_S>] flag = 2\n  return"
    found = run(CUBE.replace("  return", wait), VECTOR.replace("  return", more), count=1)
    assert found.left_over == 0
    # The two instructions, and the way of the flag to the cube. The first core runs one, with 24 cycles after it.
    assert found.cycles == run(count=1).cycles - 24 + 4 + 24 + 280


def test_keys_from_global_memory_share_its_bandwidth() -> None:
    assert run(count=1, cached=False).busy["AIC MTE2"] == 512 / min(16, 48 / CHIP.cores)
    assert simulate(
        bodies({"AIC": CUBE, "AIV": VECTOR}), launch(1, cached=False), Chip("eight cores", 8, 1000), TABLES
    ).busy["AIC MTE2"] == 512 / (48 / 8)


def test_every_flag_that_is_taken_out_is_noticed() -> None:
    programs = bodies({"AIC": CUBE, "AIV": VECTOR})
    assert not removal.noticed(programs, launch(7), CHIP, TABLES)
    taken = list(removal.without_each(programs))
    assert len(taken) == CUBE.count("_flag[") + VECTOR.count("_flag[") + 2
    assert all(removal.noticed(fewer, launch(7), CHIP, TABLES) for _, fewer in taken)


@pytest.mark.parametrize(
    ("cube", "vector", "who"),
    [
        (CUBE.replace("set_flag[<PIPE_M>", "wait_flag[<PIPE_M>"), VECTOR, "pipe FIX waits for flag 0 of pipe M"),
        (CUBE, VECTOR.replace("flag = 1", "flag = 2"), "AIV 0, AIV 1 wait for flags that none of them sets"),
    ],
)
def test_a_wait_without_end_says_who_waits(cube: str, vector: str, who: str) -> None:
    with pytest.raises(DeadlockError, match=who):
        run(cube, vector)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hivm.hir.vexp", "hivm.hir.vsinh", "the instruction vsinh"),
        ("arith.index_cast", "arith.shli", "arith.shli"),
        ("ceildiv 2", "or 2", "the expression"),
        ("scf.for", "while", "does not know the line 'while"),
    ],
)
def test_what_the_model_does_not_know_stops_it(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(vector=VECTOR.replace(old, new))
