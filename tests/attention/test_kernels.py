"""The registry of kernel families, and that no family ignores a part of the problem."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastattention_vllm
from fastattention_vllm.attention import ascend, flash, kernels
from fastattention_vllm.attention.problem import AttentionProblem
from tests.test_arrows import imports

PACKAGE = Path(str(fastattention_vllm.__file__)).parent
FIELDS = {field.name for field in dataclasses.fields(AttentionProblem)}
NOT_READ = {"fastattention_vllm.attention.flash": {"key_scale", "value_scale"}}
"""Factors of fp8 keys and values, which a check of dtypes refuses already."""


def families() -> Iterator[str]:
    """Every module of attention/ that has the functions of the protocol."""
    for path in sorted((PACKAGE / "attention").rglob("*.py")):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        if {"can_run", "run"} <= functions:
            yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


FAMILIES = tuple(families())


def read_by(code: str) -> set[str]:
    """Fields of a problem that a module names: as an attribute, or as a string for ``getattr``."""
    tree = ast.parse(code)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (attributes | strings) & FIELDS


def source(family: str) -> str:
    return (PACKAGE.parent / family.replace(".", "/")).with_suffix(".py").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_in_the_registry(family: str) -> None:
    assert family in set(imports(Path(str(kernels.__file__)).read_text(), kernels.__name__.rpartition(".")[0]))
    assert len(FAMILIES) >= len(kernels.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_read_or_refused(family: str) -> None:
    """A field that a family never names is computed as if it were not there: a wrong answer without a message."""
    assert FIELDS - read_by(source(family)) == NOT_READ.get(family, set())


def test_a_field_that_is_forgotten_is_noticed() -> None:
    assert FIELDS - read_by(source(ascend.__name__).replace("problem.sinks is not None", "False")) == {"sinks"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("function", ["can_run", "run"])
def test_every_family_has_the_functions_of_the_protocol(family: str, function: str) -> None:
    """mypy compares the types; the protocol's parameters are there, and what a family has beyond them is optional."""
    wanted = list(inspect.signature(getattr(kernels.Kernels, function)).parameters)[1:]
    found = inspect.signature(getattr(importlib.import_module(family), function)).parameters
    assert set(wanted) <= set(found)
    more = [parameter for name, parameter in found.items() if name not in wanted]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in more)


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
