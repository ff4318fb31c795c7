"""How a CUDA graph rings for a host layer: a kernel of one thread, which writes the call's number and polls the answer.

The driver's memory operations can do the same without a kernel, but poll less often (benchmarks/notes/host_layers.md).
The kernel keeps one multiprocessor awake while it waits, and the GPU has nothing else to do then.
"""

from __future__ import annotations

import ctypes

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.cuda_driver import DriverError

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


class Arguments(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        ("rung", ctypes.c_uint64),
        ("answered", ctypes.c_uint64),
        ("call", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


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

    def ring(self, rung: int, answered: int, call: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch((1, 1, 1), (1, 1, 1), 0, Arguments(rung, answered, call), stream)


def create() -> CudaBell | str:
    """A doorbell, or why this GPU cannot have one, in one sentence without a full stop."""
    torch.zeros(1, device="cuda")  # the kernel is loaded into torch's context
    try:
        return CudaBell()
    except DriverError as error:
        return str(error).rstrip(".")
