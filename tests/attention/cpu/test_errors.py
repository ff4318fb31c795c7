"""Problems that cannot be computed are refused in one sentence that names the value, from Python and the C ABI."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.cpu import library as cpu_library
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention.isa import set_isa
from tests.attention.oracle import Case

PAGED = Case((2, 3), (20, 30)).build()
CONTIGUOUS = Case((2, 3), (20, 30), page_size=0).build()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = Case((2, 3), (20, 30), kv_dtype=E4M3).build()
assert PAGED.block_table is not None


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("problem", "change", "message"),
    [
        (PAGED, {"query": torch.zeros(5, 4, 64).double()}, "query has dtype torch.float64"),
        (PAGED, {"key": torch.zeros(4, 16, 2, 64, device="meta")}, "key is on meta"),
        (
            PAGED,
            {"query": torch.zeros(5, 4, 60)},
            "head_size is 60, but the CPU kernels support multiples of 8 up to 256",
        ),
        (PAGED, {"query": torch.zeros(5, 4, 264)}, "head_size is 264"),
        (
            PAGED,
            {"query": torch.zeros(5, 4 * 64)},
            r"query must be \[num_tokens, num_heads, head_size\], not \[5, 256\]",
        ),
        (PAGED, {"query": torch.zeros(5, 4, 72)}, "key has head_size 64, but query has 72"),
        (
            PAGED,
            {"query": torch.zeros(5, 3, 64)},
            r"num_heads must be a positive multiple of num_kv_heads \(2\), not 3",
        ),
        (PAGED, {"query": torch.zeros(5, 64, 4).transpose(1, 2)}, "query must be contiguous in its last dimension"),
        (PAGED, {"query": torch.zeros(4, 4, 64)}, "query_start_loc ends at 5, but there are only 4 query tokens"),
        (PAGED, {"value": CONTIGUOUS.value}, "key and value must match"),
        (PAGED, {"key": CONTIGUOUS.key, "value": CONTIGUOUS.value}, "with a block_table, key must be"),
        (PAGED, {"block_table": None}, "without a block_table, key must be"),
        (CONTIGUOUS, {"kv_start_loc": None}, "kv_start_loc is missing; pass it, or a block_table"),
        (CONTIGUOUS, {"kv_start_loc": i32(0, 40)}, r"sequence 1 uses key rows \[40, 70\), but there are only 59 rows"),
        (CONTIGUOUS, {"kv_start_loc": i32(-1, 40)}, r"sequence 0 uses key rows \[-1, 19\)"),
        (PAGED, {"query_start_loc": i32(0, 2)}, r"query_start_loc must be \[3\] int32 on cpu"),
        (PAGED, {"query_start_loc": torch.tensor([0, 2, 5])}, r"query_start_loc must be .* not \[3\] torch.int64"),
        (PAGED, {"query_start_loc": i32(1, 2, 5)}, "query_start_loc must begin with 0, not 1"),
        (PAGED, {"query_start_loc": i32(0, 5, 2)}, "never decrease, but sequence 1 goes from 5 to 2"),
        (PAGED, {"seq_lens": i32(20, -4)}, r"seq_lens\[1\] must not be negative, but is -4"),
        (
            PAGED,
            {"seq_lens": i32(20, 49)},
            "sequence 1 has 49 KV tokens, which take 4 pages of 16 tokens, but its block_table row has 3",
        ),
        (
            PAGED,
            {"block_table": i32(0, 1, 9, 1, 2, 0).view(2, 3), "seq_lens": i32(33, 3)},
            r"\[0\]\[2\] is 9, but page numbers",
        ),
        (
            PAGED,
            {"block_table": i32(0, len(PAGED.key), 1, 2).view(2, 2)},
            r"\[0\]\[1\] is 6, but page numbers go from 0 to 5",
        ),
        (
            PAGED,
            {"block_table": i32(0, -1, 2, 1, 2, 0).view(2, 3)},
            r"block_table\[0\]\[1\] is -1, but page numbers go from 0 to",
        ),
        (PAGED, {"block_table": i32(0, 1)}, r"block_table must be \[2, 2\] int32"),
        (PAGED, {"window": (-2, 0)}, "window_left must be -1 or more, not -2"),
        (PAGED, {"window": (0, -3)}, "window_right must be -1 or more, not -3"),
        (PAGED, {"query": torch.zeros(5, 4, 64).to(E4M3)}, "float8_e4m3fn, but the CPU kernels need .* or bfloat16\\."),
        (PAGED, {"query": torch.zeros(5, 4, 64).to(E5M2)}, "query has dtype torch.float8_e5m2, .* or bfloat16\\."),
        (PAGED, {"key": PAGED.key.double()}, "key has .* need .* bfloat16, float8_e4m3fn, float8_e5m2 or int8"),
        (FP8, {"value": FP8.value.view(E5M2)}, "key and value must match, .* torch.float8_e4m3fn and .*_e5m2"),
        (FP8, {"key_scale": 0.0}, "key_scale must be positive and finite, not 0"),
        (FP8, {"key_scale": -2.0}, "key_scale must be positive and finite, not -2"),
        (FP8, {"value_scale": math.nan}, "value_scale must be positive and finite, not nan"),
        (FP8, {"value_scale": math.inf}, "value_scale must be positive and finite, not inf"),
        (PAGED, {"key_scale": 2.0}, "key_scale must be 1 unless K and V are fp8, not 2"),
        (PAGED, {"value_scale": 0.5}, "value_scale must be 1 unless K and V are fp8, not 0.5"),
        (PAGED, {"softcap": -1.0}, "softcap must be 0 or more, not -1"),
        (PAGED, {"scale": math.nan}, "scale must be a number"),
        (PAGED, {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be \[4\] or \[2, 4\], not \[3\]"),
        (PAGED, {"alibi_slopes": torch.zeros(4).double()}, "alibi_slopes must be float32 on cpu"),
        (PAGED, {"sinks": torch.zeros(3)}, r"sinks must be \[4\] float32 on cpu, not \[3\] torch.float32 on cpu"),
        (PAGED, {"sinks": torch.zeros(2, 4)}, r"sinks must be \[4\] float32 on cpu, not \[2, 4\]"),
        (PAGED, {"sinks": torch.zeros(4).bfloat16()}, r"sinks must be .*, not \[4\] torch.bfloat16"),
        (PAGED, {"sinks": torch.zeros(4, device="meta")}, "sinks must be .* on meta"),
        (PAGED, {"sinks": torch.zeros(8)[::2]}, "sinks must be contiguous, but its stride is 2"),
    ],
)
def test_problems_that_do_not_fit(problem: AttentionProblem, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.run(replace(problem, **change))


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(5, 4, 32), None, r"out must be \[5, 4, 64\] torch.float32"),
        (torch.zeros(5, 4, 64).half(), None, "not .* torch.float16"),
        (torch.zeros(5, 64, 4).transpose(1, 2), None, "out must be contiguous in its last dimension"),
        (None, torch.zeros(4, 5), r"lse must be \[5, 4\] float32"),
        (None, torch.zeros(5, 4).half(), r"lse must be .* not \[5, 4\] torch.float16"),
    ],
)
def test_results_that_do_not_fit(out: torch.Tensor | None, lse: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.run(PAGED, out, lse)


def test_can_run_gives_the_reason() -> None:
    assert cpu.can_run(PAGED) is None
    assert cpu.can_run(CONTIGUOUS) is None
    assert "bfloat16" in str(cpu.can_run(replace(PAGED, query=PAGED.query.double())))
    assert "head_size is 20" in str(cpu.can_run(replace(PAGED, query=torch.zeros(1, 4, 20))))


def test_an_empty_batch_is_no_error() -> None:
    empty = replace(
        PAGED,
        query=torch.zeros(3, 4, 64),
        query_start_loc=i32(0),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 2, dtype=torch.int32),
    )
    out, lse = cpu.run(empty, return_lse=True)
    assert (out == 0).all()
    assert lse is not None
    assert (lse == 0).all()


def test_an_empty_cache_of_sequences_without_keys() -> None:
    problem = Case((2,), (0,), page_size=0).build()
    nothing = torch.zeros(0, 2, 64)
    out, _ = cpu.run(replace(problem, key=nothing, value=nothing, kv_start_loc=i32(0)))
    assert (out == 0).all()
    paged = Case((2,), (0,)).build()
    out, _ = cpu.run(replace(paged, block_table=torch.zeros(1, 0, dtype=torch.int32)))
    assert (out == 0).all()


class TestAbi:
    """Mistakes that only callers other than our wrapper can make."""

    FIELDS = ctypes.c_byte * ctypes.sizeof(cpu_library.AttentionArguments)

    def attempt(self, **fields: int) -> str:
        library = cpu_library.library()
        problem = cpu_library.AttentionArguments()
        valid = {"num_seqs": 1, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 16, "scale": 1.0}
        locations = {"query_start_loc": i32(0, 1), "seq_lens": i32(1), "block_table": i32(0)}
        scales = {"key_scale": 1.0, "value_scale": 1.0}
        sizes = {"num_tokens": 1, "num_blocks": 1, "block_table_width": 1}
        pointers = {name: tensor.data_ptr() for name, tensor in locations.items()}
        for name, value in (valid | scales | sizes | pointers | fields).items():
            setattr(problem, name, value)
        assert library.fa_cpu_attention(problem) == 1
        message: str = library.fa_cpu_last_error().decode()
        return message

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_kv_heads": 0}, "num_kv_heads must be positive, not 0."),
            ({"num_heads": 5}, "num_heads must be a positive multiple of num_kv_heads (2), not 5."),
            ({"num_heads": -2}, "num_heads must be a positive multiple of num_kv_heads (2), not -2."),
            ({"head_size": 12}, "head_size must be a multiple of 8 up to 256, not 12."),
            ({"dtype": 9}, "dtype must be 0 (fp32), 1 (fp16) or 2 (bf16), not 9."),
            ({"dtype": 3, "kv_dtype": 3}, "dtype must be 0 (fp32), 1 (fp16) or 2 (bf16), not 3."),
            (
                {"kv_dtype": -1},
                "kv_dtype must be 0 (fp32), 1 (fp16), 2 (bf16), 3 (fp8 e4m3), 4 (fp8 e5m2) or 5 (int8), not -1.",
            ),
            (
                {"kv_dtype": 6},
                "kv_dtype must be 0 (fp32), 1 (fp16), 2 (bf16), 3 (fp8 e4m3), 4 (fp8 e5m2) or 5 (int8), not 6.",
            ),
            ({"key_scale": 0}, "key_scale must be positive and finite, not 0."),
            ({"num_seqs": -1}, "num_seqs must not be negative, but is -1."),
            ({"num_tokens": -1}, "num_tokens must not be negative, but is -1."),
            ({"page_size": 0}, "page_size must be positive, not 0."),
            ({"query_start_loc": 0}, "query_start_loc must not be a null pointer."),
            ({"seq_lens": 0}, "seq_lens must not be a null pointer."),
            ({"block_table": 0}, "kv_start_loc must not be a null pointer."),
            ({}, "query must not be a null pointer."),
        ],
    )
    def test_arguments(self, fields: dict[str, int], message: str) -> None:
        assert self.attempt(**fields) == message

    def test_null_structs(self) -> None:
        library = cpu_library.library()
        assert library.fa_cpu_attention(None) == 1
        assert library.fa_cpu_last_error() == b"problem must not be a null pointer."
        assert library.fa_cpu_write_kv(None) == 1
        assert library.fa_cpu_last_error() == b"write must not be a null pointer."

    def test_the_structs_of_the_wrapper_are_those_of_the_header(self) -> None:
        """Same fields in the same order; ctypes and C agree on the layout of plain fields."""
        header = Path(__file__).parents[3] / "kernels/cpu/include/fastattention_cpu.h"
        text = header.read_text()
        for struct, name in (
            (cpu_library.AttentionArguments, "fa_attention_problem"),
            (cpu_library.WriteArguments, "fa_kv_write"),
        ):
            body = text[text.index(f"typedef struct {name} {{") : text.index(f"}} {name};")]
            declared = []
            for line in body.splitlines()[1:]:
                code = line.split("/*")[0].strip().rstrip(";")
                if code:
                    *kind, first = code.split(",")[0].split()
                    names = [first, *code.split(",")[1:]]
                    pointer = "*" in "".join(kind)
                    c_type = (
                        ctypes.c_void_p
                        if pointer
                        else {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}[kind[-1]]
                    )
                    declared += [(name.strip(), c_type) for name in names]
            assert struct._fields_ == declared


def test_unknown_instruction_sets_are_refused() -> None:
    before = cpu.isa()
    with pytest.raises(
        ValueError, match=r"instruction set sse9 is not usable on this machine; choose one of: .*scalar"
    ):
        set_isa("sse9")
    assert cpu.isa() == before


def test_instruction_sets_come_in_the_order_of_their_speed() -> None:
    """If the bf16 dot product is slower than fp32 multiply-adds, as on Intel, it comes after them."""
    described = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    vendor = next((value.strip() for key, value in described.items() if key.strip() == "vendor_id"), "")
    middle = ["avx512_bf16", "avx512"] if vendor == "AuthenticAMD" else ["avx512", "avx512_bf16"]
    order = ["amx", *middle, "avx2", "neon", "scalar"]
    usable = cpu.usable_isas()
    assert usable == [name for name in order if name in usable]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from fastattention_vllm.attention.cpu import kernels as cpu\n{code}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


class TestLibrary:
    @pytest.mark.parametrize("name", cpu.usable_isas())
    def test_the_instruction_set_can_be_forced(self, name: str) -> None:
        assert python("print(cpu.isa())", FASTATTENTION_CPU_ISA=name).stdout == f"{name}\n"

    def test_the_fastest_instruction_set_is_chosen(self) -> None:
        assert python("print(cpu.isa())", FASTATTENTION_CPU_ISA="").stdout == f"{cpu.usable_isas()[0]}\n"

    def test_an_unusable_instruction_set_stops_with_the_usable_ones(self) -> None:
        done = python("cpu.isa()", FASTATTENTION_CPU_ISA="avx1024")
        assert "RuntimeError: FASTATTENTION_CPU_ISA is 'avx1024', but this machine supports: " in done.stderr
        assert "scalar." in done.stderr

    def test_a_named_library_that_is_missing(self) -> None:
        done = python("cpu.isa()", FASTATTENTION_CPU_LIBRARY="/no/such/lib.so")
        assert "RuntimeError: FASTATTENTION_CPU_LIBRARY is /no/such/lib.so, but there is no such file;" in done.stderr

    def test_a_library_that_is_not_built(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("FASTATTENTION_CPU_LIBRARY", raising=False)
        monkeypatch.setattr(
            cpu_library, "__file__", str(tmp_path / "fastattention_vllm" / "attention" / "cpu" / "library.py")
        )
        monkeypatch.setattr(cpu_library.importlib.metadata, "distributions", lambda name: [])
        expected = "was not found at .*/lib/libfastattention_cpu.so; run `make build`"
        with pytest.raises(RuntimeError, match=expected):
            cpu_library.library_path()

    def test_a_checkout_finds_the_installed_library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A Ray worker imports from the source tree, which has no binary. The editable install has one."""
        site = tmp_path / "site-packages"
        library = site / "fastattention_vllm" / "lib" / "libfastattention_cpu.so"
        library.parent.mkdir(parents=True)
        shutil.copy(cpu_library.library_path(), library)
        info = site / "fastattention_vllm-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastattention-vllm\nVersion: 0.1.0\n")
        monkeypatch.delenv("FASTATTENTION_CPU_LIBRARY", raising=False)
        monkeypatch.setattr(cpu_library, "__file__", str(tmp_path / "checkout" / "attention" / "cpu" / "library.py"))
        monkeypatch.syspath_prepend(str(site))
        assert cpu_library.library_path() == library

    @pytest.mark.parametrize("kept", [0, 40, 0.3, 0.999])
    def test_a_library_that_is_cut_off(self, kept: float, tmp_path: Path) -> None:
        """Copying it was interrupted, or the disk was full. Linux ends a process that reads beyond a file's end."""
        whole = cpu_library.library_path().read_bytes()
        part = tmp_path / "part.so"
        part.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
        done = python("cpu.isa()", FASTATTENTION_CPU_LIBRARY=str(part))
        assert f"RuntimeError: {part} cannot be loaded as the CPU kernel library (" in done.stderr
        assert done.stderr.endswith("; run `make build`, or reinstall the wheel.\n")

    def test_a_library_of_something_else(self) -> None:
        other = importlib.util.find_spec("_ctypes")
        assert other is not None
        done = python("cpu.isa()", FASTATTENTION_CPU_LIBRARY=str(other.origin))
        assert "cannot be loaded as the CPU kernel library (" in done.stderr
        assert "undefined symbol: fa_cpu_abi_version" in done.stderr

    def test_a_library_of_another_version(self, tmp_path: Path) -> None:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler to build a library of another version")
        source = tmp_path / "other.cpp"
        source.write_text('extern "C" int fa_cpu_abi_version() { return 99; }\n')
        other = tmp_path / "other.so"
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
        done = python("cpu.isa()", FASTATTENTION_CPU_LIBRARY=str(other))
        assert (
            f"has version 99 of the CPU kernel interface, but this package needs version {cpu_library.ABI_VERSION}"
            in done.stderr
        )


def test_importing_attention_does_not_import_vllm() -> None:
    code = "import sys, fastattention_vllm.attention.functional; print('vllm' in sys.modules)"
    assert python(code).stdout == "False\n"
