"""The registry of kernel families, and that no family ignores a part of the problem."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fastattention_vllm.attention import ascend, flash, kernels
from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import kernels as volta

FAMILIES: tuple[ModuleType, ...] = (cpu, volta, flash, ascend)
FIELDS = {field.name for field in dataclasses.fields(AttentionProblem)}
OF_FP8 = {"key_scale", "value_scale"}
NOT_READ = {flash: OF_FP8}
"""Factors of fp8 keys and values, which a check of dtypes refuses already."""


def read_by(source: str) -> set[str]:
    """Fields of a problem that a module names: as an attribute, or as a string for ``getattr``."""
    tree = ast.parse(source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (attributes | strings) & FIELDS


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.removesuffix(".kernels"))
def test_every_field_is_read_or_refused(family: ModuleType) -> None:
    """A field that a family never names is computed as if it were not there: a wrong answer without a message."""
    source = Path(str(family.__file__)).read_text()
    assert FIELDS - read_by(source) == NOT_READ.get(family, set())


def test_a_field_that_is_forgotten_is_noticed() -> None:
    source = Path(str(ascend.__file__)).read_text()
    assert FIELDS - read_by(source.replace("problem.sinks is not None", "False")) == {"sinks"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.removesuffix(".kernels"))
@pytest.mark.parametrize("function", ["can_run", "run"])
def test_every_family_has_the_functions_of_the_protocol(family: ModuleType, function: str) -> None:
    """mypy compares the types; the protocol's parameters are there, and what a family has beyond them is optional."""
    wanted = list(inspect.signature(getattr(kernels.Kernels, function)).parameters)[1:]
    found = inspect.signature(getattr(family, function)).parameters
    assert set(wanted) <= set(found)
    assert all(parameter.default is not inspect.Parameter.empty for name, parameter in found.items()
               if name not in wanted)  # fmt: skip


def test_flash_attention_refuses_gaps_between_contiguous_keys() -> None:
    """It is told lengths alone, so it would read the gaps as keys."""
    with FakeTensorMode():
        query = torch.empty(3, 4, 64, dtype=torch.float16, device="cuda")
        key = torch.empty(20, 2, 64, dtype=torch.float16, device="cuda")
    starts, lengths = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
    problem = AttentionProblem(query, key, key, starts, lengths, 1.0, True)
    for first, refused in (([0, 5], False), ([0, 8], True), ([2, 7], True)):
        reason = flash.can_run(dataclasses.replace(problem, kv_start_loc=torch.tensor(first, dtype=torch.int32)))
        assert (reason is not None) == refused, first
    assert "[0, 5]" in str(reason)
