"""How a CUDA graph rings for a host layer: a kernel of one thread writes the call's number, and one polls the answer.

The driver's memory operations can do the same without kernels, but poll less often (benchmarks/notes/host_layers.md).
"""

from __future__ import annotations

import ctypes

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.cuda_driver import DriverError, Kernel

# Everything before in the stream is visible when the number is, because kernels end before the next one begins.
PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry fa_ring(.param .align 8 .b8 arguments[32])
{
    .reg .pred %always, %skips;
    .reg .b32 %call, %none, %found;
    .reg .b64 %bell, %answer, %unless;
    ld.param.u64 %bell, [arguments];
    ld.param.u64 %answer, [arguments+8];
    ld.param.u64 %unless, [arguments+16];
    ld.param.u32 %call, [arguments+24];
    setp.eq.u64 %always, %unless, 0;
    @%always bra RING;
    ld.global.u32 %found, [%unless];
    setp.ne.u32 %skips, %found, 0;
    @%skips ret;
RING:
    mov.u32 %none, 0;
    st.relaxed.sys.global.u32 [%answer], %none;
    fence.acq_rel.sys;
    st.release.sys.global.u32 [%bell], %call;
    ret;
}

.visible .entry fa_wait(.param .align 8 .b8 arguments[32])
{
    .reg .pred %always, %skips, %answered;
    .reg .b32 %call, %found;
    .reg .b64 %answer, %unless;
    ld.param.u64 %answer, [arguments+8];
    ld.param.u64 %unless, [arguments+16];
    ld.param.u32 %call, [arguments+24];
    setp.eq.u64 %always, %unless, 0;
    @%always bra POLL;
    ld.global.u32 %found, [%unless];
    setp.ne.u32 %skips, %found, 0;
    @%skips ret;
POLL:
    ld.acquire.sys.global.u32 %found, [%answer];
    setp.eq.u32 %answered, %found, %call;
    @%answered ret;
    nanosleep.u32 200;
    bra POLL;
}
"""


class Arguments(ctypes.Structure):
    """The argument of both kernels."""

    _fields_ = (
        ("rung", ctypes.c_uint64),
        ("answered", ctypes.c_uint64),
        ("unless", ctypes.c_uint64),
        ("call", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class CudaBell:
    """The doorbell of an NVIDIA GPU of compute capability 7.0 or newer. Steps run on torch's current stream.

    Raises :class:`~fastattention_vllm.cuda_driver.DriverError` if the driver cannot compile the kernels.
    """

    def __init__(self) -> None:
        self.ringing, self.waiting = (cuda_driver.load(PTX + b"\0", name, 0) for name in ("fa_ring", "fa_wait"))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def ring(self, rung: int, answered: int, call: int, unless: int = 0) -> None:
        self._launch(self.ringing, Arguments(rung, answered, unless, call))

    def wait(self, answered: int, call: int, unless: int = 0) -> None:
        self._launch(self.waiting, Arguments(0, answered, unless, call))

    def _launch(self, kernel: Kernel, arguments: Arguments) -> None:
        kernel.launch((1, 1, 1), (1, 1, 1), 0, arguments, torch.cuda.current_stream().cuda_stream)


def create() -> CudaBell | str:
    """A doorbell, or why this GPU cannot have one, in one sentence without a full stop."""
    torch.zeros(1, device="cuda")  # the kernels are loaded into torch's context
    try:
        return CudaBell()
    except DriverError as error:
        return str(error).rstrip(".")
