"""The registry of kernel families, and a check that no family ignores a field of the problem."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastattention_vllm
from fastattention_vllm.attention import ascend, kernels
from fastattention_vllm.attention.problem import AttentionProblem
from tests.test_arrows import imports

PACKAGE = Path(str(fastattention_vllm.__file__)).parent
FIELDS = {field.name for field in dataclasses.fields(AttentionProblem)}
OF_FP8 = {"key_scale", "value_scale"}
"""Scales of fp8 keys and values. Families that refuse fp8 by its dtype need not read them."""
OF_INT8 = {"key_factors", "value_factors"}
"""The same for factors of int8 rows."""
NOT_READ = {
    "fastattention_vllm.attention.flash": OF_FP8 | OF_INT8,
    "fastattention_vllm.attention.torch_flash": OF_FP8 | OF_INT8,
    # The first belongs to contiguous keys only, which it refuses.
    "fastattention_vllm.attention.ascend_triton.kernels": {"kv_start_loc"} | OF_INT8,
}


def families() -> Iterator[str]:
    """All modules of attention/ that implement the protocol."""
    for path in sorted((PACKAGE / "attention").rglob("*.py")):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        if {"can_run", "run"} <= functions:
            yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


FAMILIES = tuple(families())


def read_by(code: str) -> set[str]:
    """Fields of a problem that a module names, as an attribute or as a string for ``getattr``."""
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
    """If a family never reads a field, it computes as if the field were not set: a wrong result without a message."""
    assert FIELDS - read_by(source(family)) == NOT_READ.get(family, set())


def test_an_unread_field_is_detected() -> None:
    assert FIELDS - read_by(source(ascend.__name__).replace("problem.sinks is not None", "False")) == {"sinks"}
