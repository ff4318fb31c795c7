"""Compiles the programs of a model before its first request. Triton's cache keeps them for the next start."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastattention_vllm.attention.ascend_triton.kernels import DTYPES, program_of
from fastattention_vllm.attention.ascend_triton.specializations import (
    COMBINE_ROWS,
    DECODE_ROWS,
    PREFILL_ROWS,
    Specialization,
)

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "i32": torch.int32}


def programs(dtype: torch.dtype, head_size: int, group: int) -> Iterator[Specialization]:
    """What steps of a layer with ``group`` query heads per KV head can launch."""
    name = DTYPES[dtype]
    yield Specialization("prefill", name, head_size, PREFILL_ROWS[head_size])
    for rows in DECODE_ROWS:
        # Fewer rows than query heads never suffice for a token.
        if rows >= group:
            yield Specialization("decode", name, head_size, rows)
    yield Specialization("combine", name, head_size, COMBINE_ROWS)


def compile_programs(dtype: torch.dtype, head_size: int, group: int, say: Callable[[str], object]) -> None:
    """Compile :func:`programs` for this process's NPU. ``say`` is called with a line of text before each.

    Raises:
        RuntimeError: Triton cannot compile one; the text names it and has Triton's message.
    """
    every = list(programs(dtype, head_size, group))
    for number, one in enumerate(every, 1):
        say(f"compiling NPU kernel {number} of {len(every)}: {one.name}")
        try:
            compile_program(one)
        except Exception as error:  # of many types, by stage of the compiler
            raise RuntimeError(f"{one.name} could not be compiled ({type(error).__name__}: {error})") from error


def compile_program(one: Specialization) -> None:
    """Does nothing under Triton's interpreter, which compiles nothing."""
    triton: Any = importlib.import_module("triton")
    function = program_of(one.program)
    if isinstance(function, triton.runtime.JITFunction):
        stand_ins = {name: stand_in(type_) for name, type_ in one.signature(function.arg_names).items()}
        arguments = [stand_ins[name] for name in function.arg_names if name in stand_ins]
        function.warmup(*arguments, grid=(1,), **one.constants, **one.options)


def stand_in(type_: str) -> Any:
    """What Triton accepts in place of an argument of this type: a dtype for a tensor, or a number."""
    if type_.startswith("*"):
        return TYPES[type_[1:]]
    return 1.0 if type_ == "fp32" else 1
