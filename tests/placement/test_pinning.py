"""Calls of CANN's runtime that pin memory, recorded by a stand-in library of the same name."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastattention_vllm.placement import host_memory, pinning
from fastattention_vllm.placement.pinning import NpuPinning

STAND_IN = """
#include <stdint.h>
typedef int aclError;
void *pointer; uint64_t bytes; uint32_t how; int status, registered;
aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag)
{ pointer = ptr; bytes = size; how = flag; registered += status == 0; return status; }
aclError aclrtHostUnregister(void *ptr) { registered -= ptr == pointer; return 0; }
"""


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    path = tmp_path / "libascendcl.so"
    source = tmp_path / "stand_in.c"
    source.write_text(STAND_IN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    monkeypatch.setattr(pinning, "ASCENDCL", str(path))
    monkeypatch.setattr(host_memory, "KEEP", 0)
    return ctypes.CDLL(str(path))


def number(library: ctypes.CDLL, name: str, kind: type[ctypes._SimpleCData[int]] = ctypes.c_int) -> int:
    return kind.in_dll(library, name).value


def test_memory_is_registered_as_a_whole_and_released_with_its_last_view(cann: ctypes.CDLL) -> None:
    memory, _ = host_memory.commit((4 << 20) - 5, pin=NpuPinning())
    assert ctypes.c_void_p.in_dll(cann, "pointer").value == memory.data_ptr()
    assert number(cann, "bytes", ctypes.c_uint64) == 4 << 20
    assert number(cann, "how", ctypes.c_uint32) == 0x10000000
    view = memory[7:]
    del memory
    gc.collect()
    assert number(cann, "registered") == 1
    del view
    gc.collect()
    assert number(cann, "registered") == 0


def test_sizes_and_addresses_above_32_bits_are_passed_correctly(cann: ctypes.CDLL) -> None:
    NpuPinning().register(0x7F00_1234_5000, 300 << 30)
    assert ctypes.c_void_p.in_dll(cann, "pointer").value == 0x7F00_1234_5000
    assert number(cann, "bytes", ctypes.c_uint64) == 300 << 30


def test_an_error_is_one_sentence_that_keeps_nothing(cann: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(cann, "status").value = 207001
    with pytest.raises(MemoryError, match=r"CANN could not pin 0\.00 GiB.*error 207001.*CANN 8\.5, driver 25\.5"):
        host_memory.commit(2 << 20, pin=NpuPinning())
    gc.collect()
    assert number(cann, "registered") == 0


def test_a_cann_without_the_call_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "ASCENDCL", str(tmp_path / "absent.so"))
    with pytest.raises(MemoryError, match=r"no aclrtHostRegisterV2.*install CANN 8\.5"):
        NpuPinning().register(4096, 4096)
    monkeypatch.setattr(pinning, "ASCENDCL", "libc.so.6")
    with pytest.raises(MemoryError, match=r"no aclrtHostRegisterV2.*install CANN 8\.5"):
        NpuPinning().register(4096, 4096)
