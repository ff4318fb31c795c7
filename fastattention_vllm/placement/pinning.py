"""Pins existing host memory for a device, so that copies to and from it run asynchronously."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

ASCENDCL = "libascendcl.so"
ACL_HOST_REG_PINNED = 0x10000000
"""A constant of ``acl/acl_rt.h``."""


class Pinning(Protocol):
    """How one kind of device pins memory."""

    def register(self, address: int, size: int) -> None:
        """Pin ``size`` bytes at ``address``, which must be a multiple of the page size.

        Raises:
            MemoryError: the driver cannot pin them; one sentence.
        """

    def unregister(self, address: int) -> None: ...


class CudaPinning:
    """NVIDIA GPUs. Their kernels can also address pinned memory."""

    def register(self, address: int, size: int) -> None:
        status = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(status) != 0:
            raise MemoryError(
                f"CUDA could not pin {size / (1 << 30):.2f} GiB of host memory (error {int(status)}); raise the limit "
                "for locked memory (ulimit -l), or lower host_kv_gib"
            )

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class NpuPinning:
    """Ascend NPUs, through CANN's C interface: torch_npu has no call for memory that it did not allocate itself.

    torch's own ``pin_memory`` would round up to a power of two and choose pages and NUMA node itself. torch_npu asks
    CANN of every host address whether it is pinned (``aclrtPointerGetAttributes``), so copies from here are as
    asynchronous as those from its own memory; with memory that is not, it waits. Not yet run on hardware.
    """

    def register(self, address: int, size: int) -> None:
        status = _acl("aclrtHostRegisterV2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)(
            address, size, ACL_HOST_REG_PINNED
        )
        if status != 0:
            raise MemoryError(
                f"CANN could not pin {size / (1 << 30):.2f} GiB of host memory (aclrtHostRegisterV2: error {status}); "
                "install CANN 8.5, driver 25.5 and a Linux kernel newer than 5.10, or set host_kv_layers to 0"
            )

    def unregister(self, address: int) -> None:
        _acl("aclrtHostUnregister", ctypes.c_void_p)(address)


def _acl(name: str, *arguments: Any) -> Any:
    """A function of CANN's runtime that returns its error."""
    try:
        function = getattr(ctypes.CDLL(ASCENDCL), name)
    except (OSError, AttributeError) as error:
        raise MemoryError(
            f"this CANN has no {name} ({error}), which is needed to pin host memory; install CANN 8.5 or newer, or set "
            "host_kv_layers to 0"
        ) from error
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
