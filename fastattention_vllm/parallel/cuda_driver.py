"""The calls of CUDA's driver that copies between ranks need and torch has not. Addresses and streams are numbers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

WAIT, WRITE = 1, 2
_EQUAL = 1
_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 3
HANDLE_BYTES = 64


class DriverError(RuntimeError):
    """A call failed; says which and why."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a wait or a write of 32 bits: both have the same fields."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


Operations = ctypes.Array[_Operation]


def allocate(size: int) -> int:
    """Memory of the current GPU that may be shared; zeroed by nobody, freed with the process."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def handle_of(address: int) -> bytes:
    """By which other processes of this machine open an allocation."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Another process's allocation, on whichever GPU, for the current one."""
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def register_host(address: int, size: int) -> int:
    """Lock host memory in place, for all GPUs of this process; returns where they see it."""
    seen = ctypes.c_uint64()
    _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED))
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
    return seen.value


def copy(to: int, source: int, size: int, stream: int) -> None:
    """In the stream's order; host memory must be registered."""
    status = _copy()(to, source, size, stream)
    if status:
        raise _error("cuMemcpyAsync", status)


def operations(steps: Sequence[tuple[int, int, int]]) -> Operations:
    """(``WAIT`` or ``WRITE``, address, value), 32 bits each, for :func:`run`."""
    array = (_Operation * len(steps))()
    for at, (operation, address, value) in enumerate(steps):
        array[at] = _Operation(operation, address, value, _EQUAL if operation == WAIT else 0, 0, 0)
    return array


def run(steps: Operations, stream: int) -> None:
    """In the stream's order. A write comes when all see what the stream has done before; a wait ends when the value is
    there."""
    status = _run()(stream, len(steps), steps, 0)
    if status:
        raise _error("cuStreamBatchMemOp", status)


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise _error(name, status)


def _error(name: str, status: int) -> DriverError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return DriverError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status}).")


@functools.cache
def _copy() -> Any:
    function = _driver().cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


@functools.cache
def _run() -> Any:
    function = _driver().cuStreamBatchMemOp_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    return function


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
