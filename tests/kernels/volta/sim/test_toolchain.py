"""From source to program: compiler, cubin, disassembly, parser, and the error message of each."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from kernels.volta import nvrtc
from kernels.volta.nvrtc import CompileError, compile_cuda
from kernels.volta.sim import Cubin, Simulation, SimulationError, disassembly, pack_parameters
from kernels.volta.sim.library import library
from tests.kernels.volta.machine import Listing

ADD = """extern "C" __global__ void add(int* x, int n) { x[threadIdx.x] += n * FACTOR; }
extern "C" __global__ void add_twice(int* x, int n) { x[threadIdx.x] += 2 * n; }"""


# --- compiler ---------------------------------------------------------------------------------------------------------


def test_the_compiler_release_supports_the_v100() -> None:
    assert nvrtc.version() == (12, 9)


def test_defines_and_options_reach_the_compiler() -> None:
    compiled = compile_cuda(ADD, defines={"FACTOR": 3}, options=["--ptxas-options=-v"])
    assert set(Cubin(compiled.binary).kernels) == {"add", "add_twice"}
    assert "registers" in compiled.log
    simulation = Simulation(Cubin(compiled.binary), "add")
    x = numpy.arange(32, dtype=numpy.int32)
    simulation.launch((1, 1, 1), (32, 1, 1), pack_parameters(numpy.uint64(simulation.map(x)), numpy.int32(5)))
    simulation.execute(0)
    numpy.testing.assert_array_equal(x, numpy.arange(32) + 15)


def test_ptx_for_newer_gpus() -> None:
    compiled = compile_cuda(ADD, architecture="compute_70", defines={"FACTOR": 1})
    assert b".target sm_70" in compiled.binary
    assert compiled.log == ""


def test_a_compiler_error_contains_the_log() -> None:
    said = r"(?s)twice\.cu does not compile for sm_70:.*twice\.cu\(2\): error.*undefined_thing"
    with pytest.raises(CompileError, match=said):
        compile_cuda("\n__global__ void f() { undefined_thing(); }", name="twice.cu")
    with pytest.raises(CompileError, match="does not compile for sm_20"):
        compile_cuda(ADD, architecture="sm_20")


def test_a_missing_header_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "factor.h").write_text("#define FACTOR 4\n")
    source = '#include "factor.h"\n' + ADD
    with pytest.raises(CompileError, match=r"factor\.h"):
        compile_cuda(source)
    assert compile_cuda(source, include=[tmp_path]).binary


def test_the_compiler_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVRTC_LIBRARY", raising=False)
    monkeypatch.setattr(nvrtc, "PACKAGE", "no-such-package")
    with pytest.raises(
        CompileError, match="no-such-package is not installed; run `make setup-dev`, or set NVRTC_LIBRARY"
    ):
        nvrtc._path()


def test_the_disassembler_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVDISASM", raising=False)
    monkeypatch.setattr(disassembly, "PACKAGE", "no-such-package")
    disassembly._program.cache_clear()
    with pytest.raises(
        SimulationError, match="no-such-package is not installed; run `make setup-dev`, or set NVDISASM"
    ):
        disassembly._program()


# --- cubins -----------------------------------------------------------------------------------------------------------


def test_files_that_are_not_cubins_for_the_v100_are_refused() -> None:
    with pytest.raises(SimulationError, match="not a cubin: it is not a 64-bit ELF file"):
        Cubin(b"PTX text")
    with pytest.raises(SimulationError, match="not a cubin for sm_70"):
        Cubin(compile_cuda(ADD, architecture="sm_80", defines={"FACTOR": 1}).binary)


def test_missing_and_ambiguous_kernels_are_refused() -> None:
    cubin = Cubin(compile_cuda(ADD, defines={"FACTOR": 1}).binary)
    assert cubin.kernel("add").name == "add"
    assert cubin.kernel("twice").name == "add_twice"
    assert cubin.kernel("add").parameter_bytes == 12
    for name in ("subtract", "ad"):
        with pytest.raises(SimulationError, match=f"'{name}' is not one of the kernels of this cubin: .*add_twice"):
            cubin.kernel(name)


def test_global_variables_are_refused() -> None:
    source = """__device__ int counter; extern "C" __global__ void count(int* x) { counter = x[0]; }"""
    simulation = Simulation(Cubin(compile_cuda(source).binary), "count")
    x = simulation.map(numpy.zeros(1, numpy.int32))
    simulation.launch((1, 1, 1), (1, 1, 1), pack_parameters(numpy.uint64(x)))
    with pytest.raises(SimulationError, match=r"c\[0x4\].*variables in global memory are not implemented"):
        simulation.execute(0)


# --- instructions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DFMA R0, R2, R4, R6", "opcode DFMA is not implemented"),
        ("RED.E.ADD.STRONG.GPU [R2], R4", "opcode RED is not implemented"),
        ("ATOMG.E.ADD PT, R0, [R2], R4", "opcode ATOMG is not implemented"),
        ("LD.E.SYS R0, [R2]", "global address 0x0 .* is not mapped"),
        ("HFMA2.SAT R0, R1, R2, R3", "HFMA2 with .SAT is not implemented"),
        ("LDG.SYS R0, [R2]", "global addresses of 32 bits are not implemented"),
        ("IMAD R0, R1, R2, R3.H0_NEW", "H0_NEW at an operand is not known"),
        ("MOV R0, UR4", "operand UR4 is not known"),
        ("MOV R0, R255", "operand R255 is not known"),
        ("MOV R0, c[0x0][0x160]", r"constant c\[0x0\]\[0x160\] lies outside of the bank's 0 bytes"),
        ("MOV R0, c[0x9][0x0]", "there is no constant bank 9"),
        ("MOV R0", "operand 1 is missing"),
        ("MOV PT, R0", "operand 0 is not a register"),
        ("S2R R0, SR_CLOCKLO", "SR_CLOCKLO is not modelled"),
        ("CS2R R0, SR_CLOCKLO", "SR_CLOCKLO is not modelled"),
        ("BRA 0x1000", "warp 0 jumps to 0x1000, where there is no code"),
        ("BRA 0x8", "warp 0 jumps to 0x8, where there is no code"),
        ("NOP", "warp 0 jumps to 0x10, where there is no code"),
        ("CALL.ABS.NOINC 0x0", "calls to other functions are not implemented"),
        ("BAR.RED.POPC.DEFER_BLOCKING 0x0", "BAR with .RED is not implemented"),
        ("HMMA.1688.F32 R0, R2, R4, R6", "HMMA with .1688 is not implemented"),
        ("HMMA.884.F32.F16.STEP0 R0, R2, R4, R6", "C and D of a matrix product must have the same type"),
        ("LDS.128 R253, [RZ]", "operand 0 reaches beyond the last register"),
        ("LDS.64 R0, [0x4]", "shared address 0x4 .* is not a multiple of the access's size"),
        ("BAR.SYNC 0x1, 0x21", "waits for 33 threads, which is not a multiple of 32"),
    ],
)
def test_unsupported_instructions_are_errors(text: str, said: str) -> None:
    """The error has the instruction's text and a reason. It is raised when the instruction is reached, not earlier."""
    with pytest.raises(SimulationError, match=said):
        Listing(text).run()
    Listing(f"@!PT {text}", "EXIT").run()


def test_a_matrix_product_by_a_part_of_the_warp() -> None:
    product = "@P0 HMMA.884.F32.F32.STEP0 R0, R2, R4, R6"
    with pytest.raises(SimulationError, match="must be executed by all lanes of the warp"):
        Listing("S2R R1, SR_LANEID", "ISETP.GT.AND P0, PT, R1, 0x3, PT", product).run()


def test_lanes_that_wait_forever_are_an_error() -> None:
    said = "warp 0 is deadlocked at 0x0030: lanes 0x0000000f wait for lanes 0xfffffff0, which never arrive"
    with pytest.raises(SimulationError, match=said):
        Listing(
            "S2R R1, SR_LANEID",
            "ISETP.GT.AND P0, PT, R1, 0x3, PT",
            "@P0 BRA 0x50",
            "WARPSYNC 0xffffffff",
            "EXIT",
            "WARPSYNC 0xffffffff",
            "EXIT",
        ).run()


def test_a_listing_that_does_not_fit_the_code() -> None:
    listing = Listing("EXIT")
    for text, code in (("/*0010*/ EXIT ;", bytes(16)), ("/*0000*/ EXIT ;", bytes(32)), ("", bytes(16))):
        with pytest.raises(SimulationError, match="the disassembly"):
            listing.check(library().fa_sim_load(listing.handle, text.encode(), code, len(code)))
