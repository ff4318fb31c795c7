"""Programs are compiled at start: all that a launch asks for, under the same keys."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention_vllm.attention.ascend_triton import compilation, kernels, specializations
from fastattention_vllm.attention.ascend_triton.masks import PAGE
from fastattention_vllm.attention.ascend_triton.specializations import Specialization
from tests.attention.oracle import Case

HAS_TRITON = importlib.util.find_spec("ascendnpuir") is not None
"""Installed together with triton-ascend, unlike the package triton, which also comes with torch."""


def test_every_program_belongs_to_some_layer() -> None:
    dtypes = (torch.float16, torch.bfloat16)
    found = {
        one for dtype in dtypes for size in specializations.PREFILL_ROWS for one in compilation.programs(dtype, size, 1)
    }
    assert found == set(specializations.every())


@pytest.mark.parametrize(("group", "rows"), [(20, [32, 64]), (16, [16, 32, 64]), (64, [64])])
def test_rows_that_hold_no_token_are_not_compiled(group: int, rows: list[int]) -> None:
    assert [one.rows for one in compilation.programs(torch.float16, 64, group) if one.program == "decode"] == rows


def test_progress_and_the_name_of_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Specialization] = []

    def fail_at_the_third(one: Specialization) -> None:
        compiled.append(one)
        if len(compiled) == 3:
            raise KeyError("no compiler")

    monkeypatch.setattr(compilation, "compile_program", fail_at_the_third)
    lines: list[str] = []
    with pytest.raises(RuntimeError, match=r"decode bf16 D128 rows 32 could not be compiled \(KeyError: 'no compiler'"):
        compilation.compile_programs(torch.bfloat16, 128, 4, lines.append)
    assert lines[0] == "compiling NPU kernel 1 of 5: prefill bf16 D128 rows 128"
    assert len(lines) == 3


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton-ascend: `make test-ascend` installs it")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_launch_after_the_start_compiles_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if not isinstance(kernels.program_of("prefill"), JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    asked: list[tuple[Any, ...]] = []
    launched: list[str] = []

    def pretend_to_compile(source: Any, target: Any, options: dict[str, Any]) -> Any:
        name = source.fn.__name__
        asked.append((name, tuple(source.signature.items()), tuple(source.constants.items())))
        return SimpleNamespace(
            launch_metadata=lambda *arguments: None,
            _init_handles=lambda: None,
            run=lambda *arguments: launched.append(name),
            function=None,
            packed_metadata=None,
        )

    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("npu", "Ascend910B1", 0),
    )
    monkeypatch.setattr(driver, "active", device)
    monkeypatch.setattr(triton.compiler, "compile", pretend_to_compile)
    for name in ("prefill", "decode", "combine"):
        function = kernels.program_of(name)
        monkeypatch.setattr(function, "binder", None)  # which holds the compiler
        monkeypatch.setattr(function, "cache", defaultdict(dict))
    compilation.compile_programs(dtype, 64, 2, lambda line: None)
    at_start = list(asked)
    assert len(set(at_start)) == 5
    assert not launched
    case = Case((1, 40, 8, 12), (300, 148, 9, 12), 4, 2, head_size=64, dtype=dtype, layout="NHD", page_size=PAGE)
    kernels.run(case.build())
    assert set(launched) == {"prefill", "decode", "combine"}
    assert asked == at_start
