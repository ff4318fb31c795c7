"""Memory placement: applied where the kernel allows it, contents are preserved, failures are clear sentences."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu import memory as cpu_memory

HUGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def why_no_huge_pages() -> str | None:
    if not SETTING.exists():
        return "this kernel has no transparent huge pages"
    return f"{SETTING} says never" if "[never]" in SETTING.read_text() else None


needs_huge_pages = pytest.mark.skipif(why_no_huge_pages() is not None, reason=str(why_no_huge_pages()))


def huge_bytes(address: int, size: int) -> int:
    """``AnonHugePages`` of the mappings that overlap the range."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin < address + size and address < end
        elif inside and name == "AnonHugePages:":
            total += int(rest[0]) << 10
    return total


def whole_pages(address: int, size: int) -> int:
    return max(0, (address + size) // HUGE - -(-address // HUGE)) * HUGE


def scratch(size: int) -> torch.Tensor:
    """Touched memory that is never zero, in small pages unless the kernel gives huge pages unasked."""
    return torch.full((size,), 7, dtype=torch.uint8)


@needs_huge_pages
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("restore_threads")
def test_discarded_memory_comes_back_zero_and_in_huge_pages(threads: int) -> None:
    cpu.set_num_threads(threads)
    buffer = scratch(32 * HUGE)
    for _ in range(50):  # on a busy machine, the kernel may have no free huge page for a moment
        achieved = cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes, discard=True)
        assert not buffer.any()
        if not achieved.reason:
            break
        time.sleep(0.1)
        buffer.fill_(7)
    whole = whole_pages(buffer.data_ptr(), buffer.nbytes)
    assert achieved.huge_bytes == whole, achieved.reason
    assert huge_bytes(buffer.data_ptr(), buffer.nbytes) >= whole
    assert achieved.reason == ""
    assert achieved.num_nodes == 0


@needs_huge_pages
def test_kept_memory_keeps_its_contents_and_moves_into_huge_pages() -> None:
    buffer = torch.arange(4 * HUGE, dtype=torch.int32)
    before = huge_bytes(buffer.data_ptr(), buffer.nbytes)
    for _ in range(50):  # on a busy machine, the kernel may have no free huge page for a moment
        achieved = cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes)
        assert torch.equal(buffer, torch.arange(4 * HUGE, dtype=torch.int32))
        if not achieved.reason:
            break
        time.sleep(0.1)
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 1):
        pytest.skip("before Linux 6.1 only the kernel decides when existing pages become huge pages")
    assert achieved.huge_bytes == whole_pages(buffer.data_ptr(), buffer.nbytes), (before, achieved.reason)


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, HUGE - 1])
@pytest.mark.parametrize("size", [0, 1, 4097, HUGE - 1, HUGE, 2 * HUGE + 1, 5 * HUGE - 3])
def test_odd_addresses_and_sizes_touch_nothing_else(size: int, offset: int, discard: bool) -> None:
    buffer = scratch(8 * HUGE)
    aligned = -buffer.data_ptr() % HUGE
    begin = aligned + offset
    achieved = cpu_memory.place_memory(buffer.data_ptr() + begin, size, discard=discard)
    assert (buffer[begin : begin + size] == (0 if discard else 7)).all()
    assert (buffer[:begin] == 7).all()
    assert (buffer[begin + size :] == 7).all()
    if whole_pages(begin - aligned, size) == 0:
        assert achieved == cpu_memory.MemoryPlacement(0, 0, "The range does not contain a whole huge page.")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([0, 1000], "NUMA node 1000 has no memory for this process."),
        ([1000, 1001], "Memory could not be assigned to NUMA nodes: Invalid argument."),
        ([0, 5000], "There is no NUMA node 5000."),
        ([-1], "There is no NUMA node -1."),
    ],
)
@pytest.mark.parametrize("discard", [True, False])
def test_missing_nodes_are_reported_without_an_error(nodes: list[int], reason: str, discard: bool) -> None:
    if "1000" in reason or "Invalid" in reason:
        skip_without_mbind()
    buffer = scratch(4 * HUGE)
    achieved = cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes, nodes, discard=discard)
    assert reason in achieved.reason
    assert achieved.num_nodes == (1 if 1000 in nodes and 0 in nodes else 0)
    assert (buffer == (0 if discard else 7)).all()


def test_memory_is_placed_on_an_existing_node() -> None:
    skip_without_mbind()
    buffer = scratch(4 * HUGE)
    achieved = cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes, [0], discard=True)
    assert achieved.num_nodes == 1
    assert "node" not in achieved.reason


def skip_without_mbind() -> None:
    buffer = scratch(4 * HUGE)
    achieved = cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes, [0])
    for refusal in ("Operation not permitted", "Function not implemented"):
        if refusal in achieved.reason:
            pytest.skip(f"this container or kernel does not allow assigning memory to NUMA nodes: {achieved.reason}")


def test_invalid_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="address and achieved must not be null pointers"):
        cpu_memory.place_memory(0, HUGE)
    with pytest.raises(ValueError, match="bytes must not be negative, but is -1"):
        cpu_memory.place_memory(HUGE, -1)


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.usefixtures("restore_threads")
def test_a_forked_child_places_only_its_own_memory() -> None:
    cpu.set_num_threads(3)
    buffer = scratch(4 * HUGE)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        status = 1
        try:
            cpu_memory.place_memory(buffer.data_ptr(), buffer.nbytes, discard=True)
            own = scratch(2 * HUGE)
            own.fill_(1)
            cpu_memory.place_memory(own.data_ptr(), own.nbytes, discard=True)
            status = int(buffer.numpy().any() or own.numpy().any())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (buffer == 7).all()
