"""Run by the Python of an environment with the installed wheel. Prints as JSON what works there.

Takes the folder of a checkout, from which nothing may be imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import torch

import fastattention_vllm
from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention.ascend_triton import compilation
from fastattention_vllm.attention.ascend_triton.kernels import program_of
from fastattention_vllm.attention.cpu import kernels, library
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta.images import IMAGES
from fastattention_vllm.linear.volta import kernels as linear


def worst_error(dtype: torch.dtype) -> float:
    """Error of causal grouped-query attention, against PyTorch in float64."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 65, heads, 64).to(dtype) for heads in (8, 2, 2))
    out = fast_attn_func(query, key, value, causal=True)
    lengths = torch.tensor([0, 65, 130], dtype=torch.int32)
    flat = fast_attn_varlen_func(
        *(tensor.flatten(0, 1) for tensor in (query, key, value)), lengths, lengths, 65, 65, causal=True
    )
    assert isinstance(out, torch.Tensor)
    assert isinstance(flat, torch.Tensor)
    assert torch.equal(out.flatten(0, 1), flat)
    wide = [tensor.double().transpose(1, 2) for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    return (out.double() - expected.transpose(1, 2)).abs().max().item()


def npu_programs() -> list[str]:
    """The Triton programs for the NPU, read by the Triton that comes with torch. It reads their sources."""
    programs = {one.program for one in compilation.programs(torch.float16, 128, 4)}
    return sorted(name for name in programs if f"def {name}(" in program_of(name).src)


def main() -> None:
    checkout = Path(sys.argv[1]).resolve()
    package = Path(fastattention_vllm.__file__).resolve()
    assert checkout / "fastattention_vllm" not in package.parents, f"{package} must not come from the checkout"
    assert package.parent in library.library_path().resolve().parents
    variants = [*images.variants(IMAGES).values(), *linear.variants(IMAGES)]
    for variant in variants:
        for suffix in ("cubin", "ptx"):
            images.read(IMAGES, variant, suffix)
    entry_points = {
        group: [entry.value for entry in importlib.metadata.entry_points(group=group) if entry.name == "fastattention"]
        for group in ("console_scripts", "vllm.general_plugins", "vllm.platform_plugins")
    }
    print(
        json.dumps(
            {
                "version": importlib.metadata.version("fastattention-vllm"),
                "torch": torch.__version__,
                "isas": kernels.usable_isas(),
                "errors": {str(dtype): worst_error(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
                "volta": sorted({variant.architecture for variant in variants}),
                "npu_programs": npu_programs(),
                "entry_points": entry_points,
            }
        )
    )


if __name__ == "__main__":
    main()
