"""Compiles the NPU's Triton programs for the 910B, as far as possible without CANN.

Used by: tests/scripts/test_ascend_compile.py.
Needs: triton-ascend and ascendnpu-ir (`scripts/ascend.py` installs them).

Stages: Triton to TTIR (triton-ascend), to linalg (its triton-adapter-opt), to HIVM (bishengir-compile: split into cube
and vector programs, tiling, memory plan, flags). The last stage, HIVM to machine code (hivmc), is a closed part of CANN
and cannot be had here. "Accepted" means that everything before it passed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4")
ADAPTER_PASSES = (
    "--discrete-mask-access-conversion=compile-on-910-95=False force-simt-template=False",
    "--triton-to-annotation",
    "--triton-to-unstructure=compile-on-910-95=False force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False enable-select-analysis=False "
    "compile-on-910-95=False",
)
"""What triton-ascend 3.2.0 runs for a 910B."""
FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
}
"""triton-ascend's options, and bishengir-compile's."""
DEFAULTS: dict[str, Any] = {"multibuffer": True, "enable_auto_bind_sub_block": True}
LAST_PASS = "hivm-graph-sync-solver"
"""The last pass after which whole functions can be printed: all flags are in place."""
NO_LAST_STAGE = "find hivmc"
"""In the compiler's output if it came as far as the last stage."""
NOT_OURS = ("hivmc", "cannot find", "failed to execute", "failed to run", "bisheng")
"""Parts of messages about the missing last stage."""
BYTES = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "i8": 1.0, "i1": 0.125, "i16": 2.0, "i32": 4.0, "i64": 8.0}
SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
SECONDS = 300


@dataclass(frozen=True)
class Core:
    """One of the two programs: "AIC" for the cube unit, "AIV" for each of the two vector cores."""

    text: str
    memory: dict[str, int]
    """Bytes used of UB, L1 and L0C."""
    run_ahead: int
    """Loops in which this core works on several blocks before it waits for the other core."""
    on_both: bool
    """AIV: whether the two vector cores share the rows."""


@dataclass(frozen=True)
class Compiled:
    refusal: str
    """The compiler's words, or empty."""
    cores: dict[str, Core]


def linalg_of(function: Any, signature: dict[str, str], constants: dict[str, int]) -> str:
    """The program as triton-ascend hands it to the compiler.

    Raises:
        RuntimeError: triton-adapter-opt refuses the program.
    """
    import triton
    from triton._C.libtriton import ir, passes
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    context = ir.context()
    ir.load_dialects(context)
    backend = AscendBackend(GPUTarget("npu", "Ascend910B2", 0))
    backend.load_dialects(context)
    source = ASTSource(function, signature, constants=constants)
    module = source.make_ir(backend.parse_options({}), backend.get_codegen_implementation(), {}, context)
    manager = ir.pass_manager(module.context)
    for add in (
        passes.common.add_inliner,
        passes.ttir.add_combine,
        passes.common.add_canonicalizer,
        passes.ttir.add_reorder_broadcast,
        passes.common.add_cse,
        passes.common.add_licm,
        passes.common.add_symbol_dce,
        passes.ttir.add_loop_unroll,
    ):
        add(manager)
    manager.run(module)
    tool = Path(triton.__file__).parent / "backends" / "ascend" / "triton-adapter-opt"
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "program.ttir"), Path(folder, "program.linalg")
        before.write_text(str(module))
        done = _run([str(tool), str(before), *ADAPTER_PASSES, "-o", str(after)], folder)
        if not after.exists():
            raise RuntimeError("; ".join(re.findall(r"error: (.*)", done)) or done[-400:])
        return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", after.read_text())


def compile_for(chip: str, linalg: str, options: dict[str, Any]) -> Compiled:
    """Compile for one chip with triton-ascend's ``options``."""
    import ascendnpuir

    tool = Path(next(iter(ascendnpuir.__path__)), "bin", "bishengir-compile")
    flags = [f"--{FLAGS[name]}={str(value).lower()}" for name, value in (DEFAULTS | options).items()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.mlir")
        source.write_text(linalg)
        text = _run(
            [
                str(tool),
                str(source),
                f"--target={chip}",
                "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true",
                *flags,
                f"--mlir-print-ir-after={LAST_PASS}",
                "-o",
                str(Path(folder, "program.out")),
            ],
            folder,
        )
    errors = [one for one in re.findall(r"error: (.*)", text) if not any(word in one.lower() for word in NOT_OURS)]
    cores = {}
    # A function is printed more than once; the last one counts.
    for dump in re.split(r"^// -----// IR Dump After [^\n]*\n", text, flags=re.M)[1:]:
        for part in re.split(r"^(?=module|func\.func)", dump, flags=re.M):
            kind = re.match(r"func\.func @\w+[^\n]*func_core_type<(\w+)>", part)
            if kind:
                cores[kind.group(1)] = _core(part)
    refusal = "; ".join(dict.fromkeys(errors))[:600]
    if not refusal and (not cores or NO_LAST_STAGE not in text):
        refusal = f"the compiler stopped early: {text[-300:]}"
    return Compiled(refusal, cores)


def _run(command: list[str], folder: str) -> str:
    Path(command[0]).chmod(0o755)  # pip does not keep the mode
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout + done.stderr


def _core(text: str) -> Core:
    run_ahead = text.count("multibuffer_unroll_factor")
    return Core(text, _memory(text), run_ahead, "get_sub_block_idx" in text)


def _memory(text: str) -> dict[str, int]:
    """Bytes up to the highest planned address of each memory."""
    constants = {name: int(value) for name, value in re.findall(r"(%[\w#]+) = arith\.constant (-?\d+) : i64", text)}
    top: dict[str, float] = {}
    planned = r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: memref<((?:\d+x)*)(\w+)[^\n]*?#hivm\.address_space<(\w+)>>"
    for places, shape, dtype, space in re.findall(planned, text):
        size = BYTES.get(dtype, 0.0)
        for dimension in filter(None, shape.split("x")):
            size *= int(dimension)
        known = [constants[place.strip()] for place in places.split("[")[0].split(",") if place.strip() in constants]
        top[space] = max([top.get(space, 0.0), *(place + size for place in known)])
    return {SPACES[space]: int(size) for space, size in top.items() if space in SPACES}
