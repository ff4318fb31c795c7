"""The whole GPU: how many CTAs fit on an SM, and how long a launch takes."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    """An SM's limits are those of compute capability 7.0 in the CUDA C++ Programming Guide."""

    sms: int = 80
    clock_hz: float = 1.38e9
    """The clock that a V100-SXM2 sustains under load. Its boost clock is 1.53e9."""
    registers: int = 65536
    register_unit: int = 256
    """Registers of a warp are allocated in multiples of this."""
    shared_bytes: int = 96 * 1024
    shared_unit: int = 256
    warps: int = 64
    ctas: int = 32
    sub_cores: int = 4
    data_kib: int = 128
    """Total of shared memory and L1."""
    carve_outs_kib: tuple[int, ...] = (0, 8, 16, 32, 64, 96)
    """Possible sizes of shared memory."""

    def l1_kib(self, shared_bytes: int) -> int:
        """Size of L1 in KiB if the resident CTAs together use ``shared_bytes`` of shared memory."""
        carve_out = next((kib for kib in self.carve_outs_kib if kib * 1024 >= shared_bytes), self.carve_outs_kib[-1])
        return self.data_kib - carve_out

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock_hz


V100 = Gpu()


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many CTAs fit on one SM, by each resource."""

    by_registers: int
    by_warps: int
    by_ctas: int
    by_shared: int

    @property
    def ctas(self) -> int:
        return min(self.by_registers, self.by_warps, self.by_ctas, self.by_shared)

    @classmethod
    def of(cls, gpu: Gpu, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
        """``registers``: per thread; ``shared_bytes``: per CTA, static and dynamic."""
        warps = -(-threads // WARP)
        per_warp = _round_up(max(registers, 1) * WARP, gpu.register_unit)
        # Each sub-core has its own quarter of the register file.
        warps_by_registers = gpu.registers // gpu.sub_cores // per_warp * gpu.sub_cores
        shared = _round_up(shared_bytes, gpu.shared_unit)
        return cls(
            by_registers=warps_by_registers // warps,
            by_warps=gpu.warps // warps,
            by_ctas=gpu.ctas,
            by_shared=gpu.shared_bytes // shared if shared else gpu.ctas,
        )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
