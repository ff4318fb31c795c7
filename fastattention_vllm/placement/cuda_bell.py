"""How a CUDA graph rings for a host layer: a kernel of one thread, which writes the call's number and polls the answer.

The driver's memory operations can do the same without a kernel, but poll less often (benchmarks/notes/host_layers.md).
The kernel keeps one multiprocessor awake while it waits, and the GPU has nothing else to do then.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.cuda_driver import DriverError, Kernel

# Everything before in the stream is visible when the number is, because kernels end before the next one begins.
PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry fa_ring(.param .align 8 .b8 arguments[24])
{
    .reg .pred %answered;
    .reg .b32 %call, %none, %found;
    .reg .b64 %bell, %answer;
    ld.param.u64 %bell, [arguments];
    ld.param.u64 %answer, [arguments+8];
    ld.param.u32 %call, [arguments+16];
    mov.u32 %none, 0;
    st.relaxed.sys.global.u32 [%answer], %none;
    fence.acq_rel.sys;
    st.release.sys.global.u32 [%bell], %call;
POLL:
    ld.acquire.sys.global.u32 %found, [%answer];
    setp.eq.u32 %answered, %found, %call;
    @%answered ret;
    nanosleep.u32 200;
    bra POLL;
}
"""

# The same, unless a word on the device says that there is nothing to answer.
PTX_UNLESS = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry fa_ring_unless(.param .align 8 .b8 arguments[32])
{
    .reg .pred %answered, %skips;
    .reg .b32 %call, %none, %found;
    .reg .b64 %bell, %answer, %unless;
    ld.param.u64 %bell, [arguments];
    ld.param.u64 %answer, [arguments+8];
    ld.param.u32 %call, [arguments+16];
    ld.param.u64 %unless, [arguments+24];
    mov.u32 %none, 0;
    ld.global.u32 %found, [%unless];
    setp.ne.u32 %skips, %found, 0;
    @%skips ret;
    st.relaxed.sys.global.u32 [%answer], %none;
    fence.acq_rel.sys;
    st.release.sys.global.u32 [%bell], %call;
POLL:
    ld.acquire.sys.global.u32 %found, [%answer];
    setp.eq.u32 %answered, %found, %call;
    @%answered ret;
    nanosleep.u32 200;
    bra POLL;
}
"""


class Arguments(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        ("rung", ctypes.c_uint64),
        ("answered", ctypes.c_uint64),
        ("call", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class ArgumentsUnless(ctypes.Structure):
    """The argument of the kernel that may skip."""

    _fields_ = (*Arguments._fields_, ("unless", ctypes.c_uint64))


class CudaBell:
    """The doorbell of an NVIDIA GPU of compute capability 7.0 or newer. Steps run on torch's current stream.

    Raises :class:`~fastattention_vllm.cuda_driver.DriverError` if the driver cannot compile the kernel.
    """

    def __init__(self) -> None:
        self.kernel = cuda_driver.load(PTX + b"\0", "fa_ring", 0)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        torch.cuda.synchronize()

    @functools.cached_property
    def kernel_unless(self) -> Kernel:
        """Not yet run on hardware."""
        return cuda_driver.load(PTX_UNLESS + b"\0", "fa_ring_unless", 0)

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if unless:
            arguments = ArgumentsUnless(rung, answered, call, 0, unless)
            self.kernel_unless.launch((1, 1, 1), (1, 1, 1), 0, arguments, stream)
        else:
            self.kernel.launch((1, 1, 1), (1, 1, 1), 0, Arguments(rung, answered, call), stream)


def create(skips: bool = False) -> CudaBell | str:
    """A doorbell, or why this GPU cannot have one, in one sentence without a full stop.

    ``skips``: whether it will ring with ``unless``.
    """
    torch.zeros(1, device="cuda")  # the kernel is loaded into torch's context
    try:
        bell = CudaBell()
        if skips:
            assert bell.kernel_unless  # loaded now, because it cannot be during a capture
        return bell
    except DriverError as error:
        return str(error).rstrip(".")
