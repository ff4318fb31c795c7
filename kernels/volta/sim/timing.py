"""Parameters of the simulated SM, and the breakdown of its time. All times are simulated cycles of one SM."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.volta.sim.library import NUM_PIPES, SmTimeFields, Timing, library

__all__ = ["HotSpot", "SmTime", "Timing", "default_timing", "pipe_names"]

SUB_CORES = 4


def pipe_names() -> list[str]:
    """FMA, ALU, FP16, XU (special functions and conversions), TENSOR, MIO (memory), CBU (branches)."""
    return [library().fa_sim_pipe_name(i).decode() for i in range(NUM_PIPES)]


def default_timing(**changes: float) -> Timing:
    """The validated parameters with some of them changed, like ``l2_latency=450``."""
    timing = Timing()
    library().fa_sim_default_timing(timing)
    for name, value in changes.items():
        if not hasattr(timing, name):
            raise TypeError(f"{name} is not a parameter of the timing: {', '.join(n for n, _ in Timing._fields_)}.")
        setattr(timing, name, value)
    return timing


@dataclass(frozen=True, slots=True)
class HotSpot:
    """One instruction: how often warps executed it, and for how many warp cycles they waited to issue it."""

    address: int
    text: str
    executions: int
    waited: int


@dataclass(frozen=True, slots=True)
class SmTime:
    cycles: int
    issued: int
    """Warp instructions."""
    pipe_busy: dict[str, float]
    """Cycles that each pipe was busy, mean of the 4 sub-cores."""
    shared_busy: float
    """Busy cycles of the single path to shared memory and L1."""
    l2_bytes: float
    l1_hits: int
    """Sectors of 32 bytes."""
    l1_misses: int
    waits: dict[str, float]
    """Warp cycles that instructions waited, by reason. ``idle``: issue slots without an instruction."""
    hot_spots: tuple[HotSpot, ...]
    """All executed instructions, those with the longest waits first."""

    @classmethod
    def of(cls, fields: SmTimeFields, hot_spots: tuple[HotSpot, ...]) -> SmTime:
        names = pipe_names()
        waits = {name: fields.wait_pipe[i] for i, name in enumerate(names)}
        waits |= {"scoreboard": fields.wait_scoreboard, "queue": fields.wait_queue, "idle": fields.idle_slots}
        return cls(
            cycles=int(fields.cycles),
            issued=int(fields.issued),
            pipe_busy={name: fields.pipe_busy[i] / SUB_CORES for i, name in enumerate(names)},
            shared_busy=fields.shared_busy,
            l2_bytes=fields.l2_bytes,
            l1_hits=int(fields.l1_hits),
            l1_misses=int(fields.l1_misses),
            waits=waits,
            hot_spots=hot_spots,
        )
