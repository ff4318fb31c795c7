"""The CUDA driver through ctypes: launches kernels and copies between ranks, without a CUDA toolkit and with any torch.

Modules are loaded into the current context, which is torch's (the device's primary context). A launch uses the given
stream and can be captured in a CUDA graph. Loading cannot be captured, so :func:`load` everything first. Addresses and
streams are numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

SUCCESS = 0
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_WITHOUT_ASKING = 48 << 10

WAIT, WRITE = 1, 2
_EQUAL = 1
_LAZY_PEER_ACCESS = 1
_PORTABLE_AND_MAPPED = 3
HANDLE_BYTES = 64


class DriverError(RuntimeError):
    """One sentence: what was tried, and the driver's error."""


@dataclass(frozen=True)
class Kernel:
    name: str
    function: c_void_p
    module: c_void_p

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: ctypes.Structure,
        stream: int,
    ) -> None:
        """``parameters``: the kernel's only argument, passed by value. Returns at once."""
        if 0 in grid:
            return
        arguments = (c_void_p * 1)(ctypes.addressof(parameters))
        _check(
            _driver().cuLaunchKernel(
                self.function, *grid, *block, shared_bytes, c_void_p(stream), arguments, c_void_p(None)
            ),
            f"the launch of {self.name} with a grid of {grid}",
        )


def load(image: bytes, name: str, shared_bytes: int) -> Kernel:
    """The kernel ``name`` of a cubin, or of PTX, which the driver compiles; it may take ``shared_bytes`` per CTA.

    Raises :class:`DriverError`, for instance for a cubin of another architecture.
    """
    module, function = c_void_p(), c_void_p()
    driver = _driver()
    _check(driver.cuModuleLoadData(ctypes.byref(module), image), f"loading the module of {name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"looking up {name}")
    if shared_bytes > SHARED_WITHOUT_ASKING:
        _check(
            driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, shared_bytes),
            f"asking for {shared_bytes} bytes of shared memory for {name}",
        )
    return Kernel(name, function, module)


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
    """Shareable memory of the current GPU. It is not zeroed, and is freed when the process ends."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def clear(address: int, size: int) -> None:
    """Zero memory of the current GPU, before later work of any stream."""
    _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")


def handle_of(address: int) -> bytes:
    """The handle by which other processes of this machine open an allocation."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation, on any GPU, for the current GPU."""
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def register_host(address: int, size: int) -> int:
    """Pin host memory for all GPUs of this process, and return its address on the GPUs."""
    seen = ctypes.c_uint64()
    _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED))
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
    return seen.value


def copy(to: int, source: int, size: int, stream: int) -> None:
    """Copy in stream order. Host memory must be registered."""
    _check(_driver().cuMemcpyAsync(to, source, size, stream), "cuMemcpyAsync")


def operations(steps: Sequence[tuple[int, int, int]]) -> Operations:
    """(``WAIT`` or ``WRITE``, address, value), 32 bits each, for :func:`run`."""
    array = (_Operation * len(steps))()
    for at, (operation, address, value) in enumerate(steps):
        array[at] = _Operation(operation, address, value, _EQUAL if operation == WAIT else 0, 0, 0)
    return array


def run(steps: Operations, stream: int) -> None:
    """Run waits and writes in stream order. A write happens after all earlier work of the stream is visible. A wait
    ends when memory has the value."""
    _check(_driver().cuStreamBatchMemOp_v2(stream, len(steps), steps, 0), "cuStreamBatchMemOp")


def _call(name: str, *arguments: object) -> None:
    _check(getattr(_driver(), name)(*arguments), name)


def _check(status: int, what: str) -> None:
    if status != SUCCESS:
        text = c_char_p()
        known = _driver().cuGetErrorString(status, ctypes.byref(text)) == SUCCESS and text.value
        reason = text.value.decode() if known and text.value else "an unknown error"
        raise DriverError(f"{what} failed: {reason} (CUDA driver error {status}).")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no NVIDIA driver was found ({error}); install one.") from error
    driver.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    driver.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    driver.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    driver.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    driver.cuGetErrorString.argtypes = [c_int, c_void_p]
    driver.cuMemcpyAsync.argtypes = [c_uint64, c_uint64, c_size_t, c_void_p]
    driver.cuStreamBatchMemOp_v2.argtypes = [c_void_p, c_uint, c_void_p, c_uint]
    return driver
