"""The C++ part of the simulator, built when it is first needed.

Reads:  VOLTA_SIM_LIBRARY (a built libvolta_sim.so, instead of building one), CXX (C++ compiler).
Writes: build/volta-sim/ in the checkout.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from ctypes import POINTER, c_char_p, c_double, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from kernels.volta.sim.failure import SimulationError

SOURCE = Path(__file__).resolve().parent
BUILD = SOURCE.parents[2] / "build" / "volta-sim"
NUM_PIPES = 7


class Timing(ctypes.Structure):
    """Parameters of the model of one SM, in cycles unless the name says otherwise: fa_sim_timing in volta_sim.h."""

    _fields_ = (
        ("shared_load_latency", c_int32),
        ("shuffle_latency", c_int32),
        ("special_function_latency", c_int32),
        ("l1_latency", c_int32),
        ("l2_latency", c_int32),
        ("constant_load_latency", c_int32),
        ("special_register_latency", c_int32),
        ("barrier_latency", c_int32),
        ("branch_latency", c_int32),
        ("memory_queue", c_int32),
        ("special_function_occupancy", c_int32),
        ("conversion_occupancy", c_int32),
        ("memory_occupancy", c_int32),
        ("tensor_occupancy", c_int32),
        ("l1_kib", c_int32),
        ("l1_bytes_per_cycle", c_int32),
        ("store_bytes_per_cycle", c_int32),
        ("reserved", c_int32),
        ("l2_bytes_per_cycle", c_double),
    )


class SmTimeFields(ctypes.Structure):
    """fa_sim_time in volta_sim.h."""

    _fields_ = (
        ("cycles", c_double),
        ("issued", c_double),
        ("pipe_busy", c_double * NUM_PIPES),
        ("shared_busy", c_double),
        ("l2_bytes", c_double),
        ("l1_hits", c_double),
        ("l1_misses", c_double),
        ("idle_slots", c_double),
        ("wait_scoreboard", c_double),
        ("wait_pipe", c_double * NUM_PIPES),
        ("wait_queue", c_double),
    )


class InstructionInfo(ctypes.Structure):
    """fa_sim_instruction_info in volta_sim.h."""

    _fields_ = (("pipe", c_int32), ("occupancy", c_int32), ("access", c_int32), ("width", c_int32))


@functools.cache
def library() -> ctypes.CDLL:
    path = os.environ.get("VOLTA_SIM_LIBRARY") or str(_build())
    loaded = ctypes.CDLL(path)
    loaded.fa_sim_create.restype = c_void_p
    loaded.fa_sim_error.restype = c_char_p
    loaded.fa_sim_instruction_text.restype = c_char_p
    loaded.fa_sim_pipe_name.restype = c_char_p
    loaded.fa_sim_pipe_name.argtypes = [c_int32]
    loaded.fa_sim_default_timing.argtypes = [POINTER(Timing)]
    three, counts = POINTER(c_uint32), c_void_p
    arguments: dict[str, list[Any]] = {
        "destroy": [],
        "error": [],
        "load": [c_char_p, c_char_p, c_uint64],
        "num_instructions": [],
        "instruction_text": [c_int32],
        "instruction": [c_int32, POINTER(InstructionInfo)],
        "set_constants": [c_int32, c_char_p, c_uint64],
        "map": [c_uint64, c_uint64, c_void_p, c_int32],
        "unmap_all": [],
        "set_instruction_limit": [c_uint64],
        "set_launch": [three, three, c_uint32, c_uint32],
        "run": [c_uint32, c_uint32, c_uint32, POINTER(c_int32)],
        "drop_traces": [],
        "executions": [c_int32, counts],
        "transactions": [c_int32, counts],
        "time_sm": [POINTER(c_int32), c_int32, c_int32, POINTER(Timing), POINTER(SmTimeFields), counts],
    }
    for name, types in arguments.items():
        getattr(loaded, f"fa_sim_{name}").argtypes = [c_void_p, *types]
    return loaded


def _build() -> Path:
    """Compiles changed files. Several processes may do this at the same time."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        raise SimulationError("the simulator needs cmake, which was not found; run `make setup-dev`.")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run([cmake, "-S", str(SOURCE), "-B", str(BUILD), "-G", "Unix Makefiles"])
        _run([cmake, "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)])
    return BUILD / "libvolta_sim.so"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SimulationError(f"the simulator does not build: {done.stdout}{done.stderr}")
