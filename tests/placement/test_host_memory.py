"""Memory is allocated in slices: the whole amount, or nothing and an error message."""

from __future__ import annotations

import concurrent.futures
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from fastattention_vllm.placement import host_memory
from fastattention_vllm.placement.host_memory import GIB, HUGE_PAGE
from tests.attention.cpu.test_memory import huge_bytes, needs_huge_pages
from tests.placement.scenario import Pins

MIB = 1 << 20


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLICE", 4 * MIB)
    monkeypatch.setattr(host_memory, "KEEP", 0)
    monkeypatch.setattr(host_memory, "PATIENCE", 0.0)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("size", [1, HUGE_PAGE - 1, HUGE_PAGE, 9 * MIB + 5, 16 * MIB])
def test_all_memory_is_allocated_and_zero(size: int) -> None:
    gc.collect()
    before = resident()
    memory, placements = host_memory.commit(size)
    assert memory.shape == (size,)
    assert memory.dtype == torch.uint8
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert resident() - before > size - MIB, "must already be touched, so that a lack of memory shows here"
    assert not memory.any()
    memory.fill_(255)
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    assert len(placements) == -(-whole // (4 * MIB))


@needs_huge_pages
@pytest.mark.usefixtures("small_slices")
def test_the_memory_is_in_huge_pages() -> None:
    memory, placements = host_memory.commit(10 * MIB)
    assert sum(placement.huge_bytes or 0 for placement in placements) == 10 * MIB
    assert huge_bytes(memory.data_ptr(), memory.nbytes) >= 10 * MIB


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("pin", [None, Pins()], ids=["not pinned", "pinned"])
def test_pinned_memory_is_not_copied_by_a_fork(pin: Pins | None) -> None:
    """A write after a fork could move the page, and the device would go on with the old one."""
    memory, _ = host_memory.commit(4 * MIB, pin=pin)
    mappings = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    ends = [[int(end, 16) for end in mapping.split(maxsplit=1)[0].split("-")] for mapping in mappings]
    ours = next(one for one, (begin, end) in zip(mappings, ends, strict=True) if begin <= memory.data_ptr() < end)
    found = re.search(r"^VmFlags:(.*)$", ours, flags=re.MULTILINE)
    assert found
    assert ("dc" in found[1].split()) == (pin is not None)


@pytest.mark.usefixtures("small_slices")
def test_the_memory_is_freed_with_the_last_view() -> None:
    memory, _ = host_memory.commit(64 * MIB)
    view = memory[-10:].view(torch.int16)
    address = memory.data_ptr()
    del memory
    gc.collect()
    view.fill_(3)
    assert is_mapped(address)
    held = resident()
    del view
    gc.collect()
    assert held - resident() > 60 * MIB


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


def shrinking(steps: list[int]) -> Callable[[], int]:
    """Available memory at each check; the last number repeats."""
    return lambda: steps.pop(0) if len(steps) > 1 else steps[0]


@pytest.mark.usefixtures("small_slices")
def test_too_little_memory_is_an_error_with_the_amount_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", shrinking([100 * MIB, 96 * MIB, 3 * MIB]))
    gc.collect()
    before = resident()
    with pytest.raises(MemoryError, match=r"^only 0\.01 of 0\.06 GiB could be allocated$"):
        host_memory.commit(64 * MIB)
    gc.collect()
    assert resident() - before < 4 * MIB


@pytest.mark.usefixtures("small_slices")
def test_a_reserve_is_kept_for_the_rest_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "KEEP", 10 * MIB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 14 * MIB)
    host_memory.commit(4 * MIB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 14 * MIB - 1)
    with pytest.raises(MemoryError, match=r"only 0\.00 of"):
        host_memory.commit(4 * MIB)


@pytest.mark.usefixtures("small_slices")
def test_memory_that_appears_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PATIENCE", 30.0)
    looks = [MIB, MIB, 100 * MIB, MIB, 100 * MIB]
    monkeypatch.setattr(host_memory, "available_bytes", shrinking(looks))
    memory, _ = host_memory.commit(8 * MIB)
    assert memory.nbytes == 8 * MIB
    assert looks == [100 * MIB]


@pytest.mark.usefixtures("small_slices")
def test_ranks_check_and_allocate_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks at once, and memory for three and a half: the last one must fail instead of starting with a half."""
    left = [14 * MIB]
    place_memory = host_memory.cpu_memory.place_memory

    def slow_place(address: int, size: int, *rest: object, **named: object) -> object:
        time.sleep(0.05)  # memory that was checked is not allocated yet
        left[0] -= size
        return place_memory(address, size, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(host_memory.cpu_memory, "place_memory", slow_place)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: left[0])

    def rank(_: int) -> object:
        try:
            return host_memory.commit(4 * MIB)
        except MemoryError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as ranks:
        got = list(ranks.map(rank, range(4)))
    assert left[0] == 2 * MIB, "must never exceed the available memory"
    assert sum(isinstance(one, str) for one in got) == 1


@pytest.mark.usefixtures("small_slices")
def test_a_long_allocation_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "GIB", 4 * MIB)
    said: list[str] = []
    host_memory.commit(16 * MIB, say=said.append)
    assert said == [], "three seconds have not passed"
    monkeypatch.setattr(host_memory, "SAY_EVERY", -1.0)
    host_memory.commit(16 * MIB, say=said.append)
    assert said == [f"{done}.0 of 4.0 GiB are allocated" for done in range(4)]


def test_no_address_space_is_an_error_too() -> None:
    for size in (1 << 60, 1 << 70):
        with pytest.raises(
            MemoryError, match=re.escape(f"{size / GIB:.2f} GiB of address space could not be reserved")
        ):
            host_memory.commit(size)


def test_memory_limits_apply_without_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    unlimited = host_memory.available_bytes()
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() > 0
    (tmp_path / "memory.max").write_text(f"{1000 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{900 << 20}\n")
    assert host_memory.available_bytes() == 100 << 20
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {200 << 20}\nactive_file 2\n")
    assert host_memory.available_bytes() == 300 << 20
    (tmp_path / "memory.current").write_text(f"{5000 << 20}\n")
    assert host_memory.available_bytes() == 0
