"""bf16 in Triton's interpreter, whose version 3.2 multiplies the bit patterns and cuts digits off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def teach_bf16(patch: pytest.MonkeyPatch) -> None:
    """Products of bf16 numbers, and conversions to bf16 that round to the nearest, as on the NPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "cast_impl", cast_impl)
