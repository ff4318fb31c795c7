"""Kernels of ours on an NVIDIA GPU, through the CUDA driver: no CUDA toolkit, no compiler, any version of torch.

Modules are loaded into the current context, which is torch's (the device's primary context). A launch goes to the
stream that it is given and can be captured in a CUDA graph; loading cannot, so :func:`load` everything before.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass

SUCCESS = 0
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_WITHOUT_ASKING = 48 << 10


class DriverError(RuntimeError):
    """One sentence: what was tried, and what the driver says."""


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
        raise DriverError(f"there is no NVIDIA driver here ({error}).") from error
    driver.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    driver.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    driver.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    driver.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    driver.cuGetErrorString.argtypes = [c_int, c_void_p]
    return driver
