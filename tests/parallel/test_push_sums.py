"""Sums by push: every rank a process, with the kernel's source on the emulator; and for which sizes they are used."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta.images import ImageError
from fastattention_vllm.attention.volta.launch import layout
from fastattention_vllm.parallel import push_launch, push_sums
from fastattention_vllm.parallel.push_launch import CTAS, STRUCTURES, layout_of
from fastattention_vllm.parallel.push_sums import GAIN, NAMES, PushSums, Timed, limit
from kernels.volta import push_variants
from kernels.volta.manifest import SOURCES, structures
from tests.parallel import tasks
from tests.parallel.ranks import Ranks

MAX_BYTES = 2048


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


@pytest.mark.parametrize("dtype", NAMES)
def test_sums_are_those_in_the_order_of_ranks(dtype: torch.dtype, ranks: Ranks) -> None:
    lengths = [4, MAX_BYTES // dtype.itemsize, 64, 4]
    works, sums, given = zip(*ranks.run(tasks.pushed_sums, lengths, dtype, MAX_BYTES, False), strict=True)
    assert all(works)
    for call in range(len(lengths)):
        expected = functools.reduce(torch.add, (of_rank[call].float() for of_rank in given)).to(dtype)
        for of_rank in sums:
            assert torch.equal(of_rank[call], expected)


class One(PushSums):
    """The only rank."""

    device = "cpu"

    def __init__(self, wrong: bool = False, late: int = 0) -> None:
        self.rank, self.ranks, self.max_bytes, self.wrong = 0, 1, 64, wrong
        self._late = torch.tensor([late])

    def sum(self, x: torch.Tensor, looks: int = 0) -> torch.Tensor:
        assert looks > 0
        return x + 1 if self.wrong else x


def test_the_test_passes_if_all_ranks_are_right() -> None:
    assert One().works(torch.float16, lambda value: [value])
    assert not One().works(torch.float16, lambda value: [value, False])
    assert not One(wrong=True).works(torch.float16, lambda value: [value])
    assert not One(late=1).works(torch.float16, lambda value: [value])


def test_a_rank_that_is_not_reached_fails_the_test_on_all(ranks: Ranks) -> None:
    answers = ranks.run(tasks.pushed_sums, [4], torch.float16, MAX_BYTES, True)
    assert [works for works, *_ in answers] == [False] * 3


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (torch.zeros(4, 1024).half(), True),
        (torch.zeros(2).float(), True),
        (torch.zeros(4, 1025).half()[:, :1024], False),
        (torch.zeros(push_sums.MAX_BYTES // 2).half(), True),
        (torch.zeros(push_sums.MAX_BYTES // 2 + 4).half(), False),
        (torch.zeros(0, 8).half(), False),
        (torch.zeros(3).half(), False),
        (torch.zeros(9).half()[1:], False),
        (torch.zeros(8).double(), False),
        (torch.zeros(8, dtype=torch.int32), False),
    ],
    ids=["rows", "one chunk", "not contiguous", "largest", "too large", "empty", "no whole chunk", "not aligned",
         "float64", "integers"],
)  # fmt: skip
def test_what_can_be_summed(x: torch.Tensor, fits: bool) -> None:
    sums = PushSums.__new__(PushSums)
    sums.max_bytes = push_sums.MAX_BYTES
    assert sums.can_sum(x) == fits


@pytest.mark.parametrize(
    ("ours", "expected"),
    [([5, 6, 9, 19], 4096), ([5, 6, 9, 30], 2048), ([20, 6, 9, 19], 0), ([5, 20, 9, 19], 512), ([20 * GAIN] * 4, 4096)],
)
def test_the_limit_is_the_last_size_up_to_which_all_are_faster(ours: list[float], expected: int) -> None:
    sizes = (512, 1024, 2048, 4096)
    assert limit([Timed(size, one, 20.0) for size, one in zip(sizes, ours, strict=True)]) == expected


def test_the_launcher_agrees_with_the_kernel() -> None:
    (push,) = STRUCTURES
    compiled = structures((SOURCES / "push.h").read_text())
    assert list(compiled) == [push.__name__]
    assert layout(push) == compiled["Push"]
    assert push_launch.CONSTANTS == push_variants.CONSTANTS
    assert {one.number for one in push_variants.ALL} == set(NAMES.values())
    fields = set(push_launch.Variant.__dataclass_fields__) - {"shared_bytes"}
    assert all(set(push_variants.describe(one)) == fields for one in push_variants.ALL)
    assert ctypes.sizeof(push) < 4096, "a kernel's parameters"


@pytest.mark.parametrize(("ranks", "max_bytes", "size"), [(2, 8, 64), (4, 100, 4 * 2 * 13 * 16), (8, 262144, 1 << 23)])
def test_a_board_has_two_halves_with_a_place_for_each_rank(ranks: int, max_bytes: int, size: int) -> None:
    assert layout_of(ranks, max_bytes).bytes == size
    assert CTAS * push_variants.ALL[0].threads * push_launch.CHUNK_BYTES >= 64 << 10, (
        "64 KiB in one turn of the threads"
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_learn_why_one_has_no_kernels(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_all() -> None:
        raise ImageError("The Volta kernels are not built: run `make volta`.")

    if failing == 0:
        monkeypatch.setattr(push_sums, "load_all", load_all)
    else:
        monkeypatch.setattr(push_sums, "load_all", dict)
    others = "" if failing == 0 else "The Volta kernels are not built: run `make volta`."
    found = push_sums.open_sums(0, 2, lambda value: [value, (others, None)], True)
    assert found == f"{'rank 1 cannot go on: ' * failing}The Volta kernels are not built: run `make volta`"


def test_images_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "IMAGES", tmp_path)
    with pytest.raises(ImageError, match="not built"):
        push_sums._load("fp16")


def test_all_ranks_learn_that_one_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last exchange with the others, who would go on without it."""

    def no_memory(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    told = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value, value]

    monkeypatch.setattr(push_sums, "load_all", dict)
    monkeypatch.setattr(push_sums.boards, "in_gpu_memory", lambda *given: [])
    monkeypatch.setattr(push_sums.torch, "zeros", no_memory)
    assert push_sums.open_sums(0, 2, exchange, True) == "CUDA out of memory"
    assert told == [("CUDA out of memory", None)]
