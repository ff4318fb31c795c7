"""The NEON build of the kernels against float64, cross-compiled and run in an emulator. Not run on hardware.

Needs `apt-get install g++-aarch64-linux-gnu qemu-user`; skipped otherwise.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention.oracle import Case, assert_matches, attention

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
KERNELS = Path(__file__).resolve().parents[3] / "kernels" / "cpu"
SOURCES = [
    "api",
    "api_error",
    "api_gated_delta",
    "engine",
    "gated_delta",
    "graph_calls",
    "isa",
    "memory",
    "plan",
    "sampling",
    "thread_pool",
    "roofline",
    "roofline_baseline",
    "waiting",
]
SOURCES += ["kernel_scalar", "kernel_neon"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),  # compiling takes half a minute of this on a quiet machine
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None or sys.byteorder != "little",
        reason=f"needs {COMPILER} and {EMULATOR}: apt-get install g++-aarch64-linux-gnu qemu-user",
    ),
]

FEATURES = {
    "causal": {},
    "window": {"window": (33, -1)},
    "soft cap and sinks": {"softcap": 5.0, "sinks": 0.5},
    "ALiBi": {"alibi": "shared"},
    "not causal": {"causal": False},
}
CASES = {
    f"{name}, {str(dtype).removeprefix('torch.')}, head size {size}": replace(
        Case((1, 1, 20, 3, 70), (70, 5, 33, 300, 90), 8, 2, size, dtype=dtype), **changes
    )
    for name, changes in FEATURES.items()
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for size in (8, 80, 128)
}
CASES |= {
    f"fp8 cache, {str(kv_dtype).removeprefix('torch.')}": Case(
        (1, 9, 40), (70, 300, 40), 4, 2, 64, dtype=torch.bfloat16, kv_dtype=kv_dtype, key_scale=0.5, value_scale=0.25
    )
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}
CASES |= {
    f"int8 cache, head size {size}": Case((1, 9, 40), (70, 300, 40), 4, 2, size, dtype=torch.float16, row_factors=True)
    for size in (8, 64)
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build with the flags of the shipped library, except for -O2."""
    built = tmp_path_factory.mktemp("neon") / "neon_runner"
    flags = ["-std=c++17", "-O2", "-DNDEBUG", "-fno-math-errno", "-ffp-contract=fast", "-static", "-pthread"]
    sources = [str(KERNELS / "src" / f"{name}.cpp") for name in SOURCES]
    sources.append(str(Path(__file__).with_name("neon_runner.cpp")))
    command = [COMPILER, *flags, "-I", str(KERNELS / "include"), *sources, "-o", str(built)]
    subprocess.run(command, check=True)
    return built


class Laid:
    """A problem in a file: the struct and everything it points to, as offsets.

    Both machines have the same struct layout.
    """

    def __init__(self, problem: AttentionProblem, path: Path) -> None:
        self.path = path
        self.out = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
        self.lse = torch.zeros(problem.query.shape[:2])
        struct, _, _ = cpu.attention_arguments(problem, self.out, self.lse, True)
        tensors = [getattr(problem, name) for name in AttentionProblem.__dataclass_fields__]
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (t.untyped_storage() for t in [*tensors, self.out, self.lse] if isinstance(t, torch.Tensor))
        }
        begins, offset = {}, 512
        for begin, size in storages.items():
            begins[begin] = offset
            offset += -(-size // 64) * 64
        self.begins = begins

        def moved(address: int) -> int:
            begin = next(begin for begin, size in storages.items() if begin <= address < begin + size)
            return begins[begin] + address - begin

        for name, kind in struct._fields_:
            if kind is ctypes.c_void_p and getattr(struct, name):
                setattr(struct, name, moved(getattr(struct, name)))
        memory = bytearray(offset)
        memory[: ctypes.sizeof(struct)] = bytes(struct)
        for begin, size in storages.items():
            memory[begins[begin] : begins[begin] + size] = ctypes.string_at(begin, size)
        path.write_bytes(memory)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self.begins[tensor.data_ptr()]
        raw = bytearray(self.path.read_bytes()[begin : begin + tensor.nbytes])
        return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def test_neon_equals_float64(runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {name: case.build() for name, case in CASES.items()}
    laid = [Laid(problem, tmp_path / f"{i}.bin") for i, problem in enumerate(problems.values())]
    command = [EMULATOR, str(runner), "neon", *(str(one.path) for one in laid)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == ["neon", "of", "neon,scalar"]
    monkeypatch.setattr(cpu, "isa", lambda: "neon")  # this one rounds nothing but the output
    for (name, problem), one in zip(problems.items(), laid, strict=True):
        try:
            assert_matches(problem, one.read(one.out), one.read(one.lse), attention(problem))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
