"""Runs vLLM's own Triton kernels in Triton's interpreter, and the stand-ins on the same numbers.

Run by test_state_copies.py in a process of its own, because Triton reads TRITON_INTERPRET when it is imported. Prints
one word for each comparison, and ends with an error at the first difference.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastattention_vllm.integration.cpu.stand_ins import drafting, state_copies

PAD = -1
Draw = Callable[..., int]


def interpreted(module: str, names: Sequence[str]) -> ModuleType:
    """The functions ``names`` of one of vLLM's modules, which is not imported, as Triton's interpreter runs them."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = Path(found.submodule_search_locations[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = file.read_text()
    parts = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    sources = [f"@triton.jit\n{ast.get_source_segment(text, parts[name])}" for name in names]
    path = Path(tempfile.mkdtemp()) / f"{module.rpartition('.')[2]}_kernels.py"
    path.write_text("\n\n\n".join(["import triton\nimport triton.language as tl", *sources]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    return kernels


def same(what: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], seed: int) -> None:
    for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if not torch.equal(one, two):
            sys.exit(f"{what} differs in tensor {number}, seed {seed}:\n{one}\n{two}")
    print(what)


class States:
    """States of two groups of layers, in memory of its own: inputs of a convolution, and a matrix for each block."""

    def __init__(self, seed: int, channels_first: bool, requests: int, columns: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks, tokens, channels = 2 * requests * columns, 5, 6
        shape = (blocks, channels, tokens) if channels_first else (blocks, tokens, channels)
        self.tensors, metadata = list[torch.Tensor](), list[tuple[int, ...]]()
        for group in range(2):
            for dtype in (torch.float32, torch.bfloat16):
                inputs = torch.randn(shape, generator=generator).to(dtype)
                # Pages are longer than the states in them.
                matrices = torch.randn((blocks, 40), generator=generator).to(dtype)
                self.tensors += [inputs, matrices]
                rows = (channels, inputs.stride(1) * inputs.element_size()) if channels_first else (0, 0)
                inner = inputs.stride(1) if not channels_first else 1
                for tensor, elements, kept, of_rows in (
                    (inputs, inner, tokens, rows),
                    (matrices, 32, 0, (0, 0)),
                ):
                    size = tensor.element_size()
                    metadata.append((tensor.data_ptr(), tensor.stride(0) * size, size, elements, kept, group, *of_rows))
        self.tables = [
            (torch.randperm(requests * columns, generator=generator) + group * requests * columns)
            .int()
            .view(requests, columns)
            for group in range(2)
        ]
        columns_of = list(zip(*metadata, strict=True))
        wide = {0, 1, 3, 7}
        self.arguments = (
            torch.tensor([table.data_ptr() for table in self.tables]),
            columns,
            *(
                torch.tensor(numbers, dtype=torch.int64 if place in wide else torch.int32)
                for place, numbers in enumerate(columns_of)
            ),
        )


def compare_copies(kernels: ModuleType, seed: int, draw: Draw) -> None:
    stand_ins: Any = state_copies  # arguments are passed in bulk
    channels_first, requests, columns, block_size = bool(seed % 2), 4 + draw(3), 8, 1 + draw(6)
    ours, theirs = (States(seed, channels_first, requests, columns) for _ in range(2))
    grid = (requests, len(ours.tensors), 2)
    constants: dict[str, Any] = {"COPY_BLOCK_SIZE": 16, "CONV_STATE_DIM_FIRST": channels_first}

    sources = torch.tensor([draw(5) - 1 for _ in range(requests)]).int()
    targets = torch.tensor([draw(5) for _ in range(requests)]).int()
    offsets = torch.tensor([draw(3) for _ in range(requests)]).int()
    first = (targets, sources, offsets)
    kernels.precopy_mamba_align_fused_kernel[grid](
        *first, *theirs.arguments, None, requests, HAS_IDX_MAPPING=False, TEMPORAL_TILES=2, **constants
    )
    stand_ins.move_on(*first, *ours.arguments, None, requests, HAS_IDX_MAPPING=False, TEMPORAL_TILES=2, **constants)
    same("move_on", ours.tensors, theirs.tensors, seed)

    steps = list[tuple[int, ...]]()
    for _ in range(requests):
        drafted, computed = draw(4), draw(3 * block_size)
        scheduled = drafted + 1 if draw(2) else 1 + draw(2 * block_size)
        drafted = min(drafted, scheduled - 1)
        accepted = 1 + max(draw(drafted + 1), draw(drafted + 1))
        if draw(2):  # the step ends with a block
            computed = (computed + scheduled) // block_size * block_size - scheduled
            computed += block_size if computed < 0 else 0
        column = min(columns - 4, -(-(computed + scheduled) // block_size) - 1)
        steps.append((accepted, column, scheduled, computed, drafted))
    numbers = [torch.tensor(one).int() for one in zip(*steps, strict=True)]
    after = [numbers[0].clone() for _ in range(2)]
    kernels.postprocess_mamba_fused_kernel[grid](
        *numbers, *theirs.arguments, after[1], None, requests, block_size=block_size, TEMPORAL_TILES=2, **constants
    )
    stand_ins.keep_at_borders(
        *numbers, *ours.arguments, after[0], None, requests, block_size=block_size, TEMPORAL_TILES=2, **constants
    )
    same("keep_at_borders", [*ours.tensors, after[0]], [*theirs.tensors, after[1]], seed)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def compare_preparations(kernels: ModuleType, seed: int, draw: Draw) -> None:
    """A step of several requests: some verify drafts, and others compute parts of their prompts."""
    stand_ins: Any = drafting  # arguments are passed in bulk
    requests, drafts, vocabulary, longest, block_size = 1 + draw(4), 3, 50, 40, 1 + draw(9)
    generator = torch.Generator().manual_seed(seed)

    sampled = torch.full((requests, drafts + 1), -1, dtype=torch.int32)
    for row in range(requests):
        valid = draw(drafts + 2)
        sampled[row, :valid] = torch.randint(vocabulary, (valid,), generator=generator).int()
    discarded, instead = torch.tensor([draw(3) == 0 for _ in range(requests)]), torch.arange(100, 100 + requests).int()
    ours, theirs = ([torch.zeros(requests).int() for _ in range(2)] for _ in range(2))
    sizes: tuple[int, ...] = (vocabulary, drafts + 1, requests, drafts + 1)
    kernels.eagle_prepare_next_token_padded_kernel[(requests,)](
        sampled, discarded, instead, *theirs, *sizes, BLOCK_SIZE_TOKENS=4
    )
    stand_ins.next_tokens(sampled, discarded, instead, *ours, *sizes, BLOCK_SIZE_TOKENS=4)
    same("next_tokens", ours, theirs, seed)

    drafted = [draw(drafts + 1) for _ in range(requests)]
    verified = int32(*(1 + draw(one + 1) for one in drafted))
    lengths = [one + 1 if one else 1 + draw(9) for one in drafted]
    starts = int32(0, *lengths).cumsum(0).int()
    cumulative = int32(*drafted).cumsum(0).int()
    rows, theirs = ([torch.zeros(requests).int() for _ in range(2)] for _ in range(2))
    kernels.eagle_prepare_inputs_padded_kernel[(requests,)](cumulative, verified, starts, *theirs, requests)
    stand_ins.rows_to_sample(cumulative, verified, starts, *rows, requests)
    same("rows_to_sample", rows, theirs, seed)

    padded, columns = requests + draw(3), -(-longest // block_size)
    positions = torch.tensor([draw(longest) for _ in range(requests)])
    table = torch.randperm(requests * columns, generator=generator).int().view(requests, columns)
    ours, theirs = ([(positions + 1).int(), torch.zeros(requests).long(), torch.zeros(padded).long()] for _ in range(2))
    sizes = (block_size, longest, columns, PAD, requests)
    kernels.eagle_step_slot_mapping_metadata_kernel[(padded,)](positions, table, columns, *theirs, *sizes)
    stand_ins.advance(positions, table, columns, *ours, *sizes)
    same("advance", ours, theirs, seed)

    total = int(starts[-1])
    tokens, places = torch.arange(total).int() + 100, torch.arange(total) + 7
    following = torch.arange(requests).int() + 1000
    numbers, outputs = (torch.int32, torch.int64, torch.bool, torch.bool), total + requests
    ours, theirs = ([torch.zeros(outputs, dtype=one) for one in numbers] for _ in range(2))
    new_rows, unused = ([torch.zeros(requests).int() for _ in range(2)], torch.zeros(total).int())
    ends = (starts[1:] - 1 - rows[1]).int()
    sizes = (0, -3, total, 1, 0)  # the interpreter takes no bool
    kernels.copy_and_expand_eagle_inputs_kernel[(requests, 4)](
        tokens, places, following, *theirs, new_rows[1], unused, starts, ends, *sizes, BLOCK_SIZE_TOKENS=4
    )
    stand_ins.inputs_of_draft_model(
        tokens, places, following, *ours, new_rows[0], unused, starts, ends, *sizes, BLOCK_SIZE_TOKENS=4
    )
    same("inputs_of_draft_model", [*ours, new_rows[0]], [*theirs, new_rows[1]], seed)


def main() -> None:
    preparations = interpreted(
        "vllm.v1.spec_decode.utils",
        (
            "eagle_prepare_next_token_padded_kernel",
            "eagle_prepare_inputs_padded_kernel",
            "eagle_step_slot_mapping_metadata_kernel",
            "copy_and_expand_eagle_inputs_kernel",
        ),
    )
    copies = interpreted(
        "vllm.v1.worker.mamba_utils",
        (
            "_memcpy_u64_tiled",
            "_copy_mamba_state_block",
            "postprocess_mamba_fused_kernel",
            "precopy_mamba_align_fused_kernel",
        ),
    )
    for seed in range(int(sys.argv[1])):
        generator = torch.Generator().manual_seed(seed)

        def draw(below: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(below, (), generator=generator))

        compare_preparations(preparations, seed, draw)
        compare_copies(copies, seed, draw)


if __name__ == "__main__":
    main()
