"""What the scalar unit of a core computes: numbers, and which memory a name stands for."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from kernels.ascend.text import BYTES, NAME, Operation, operands, result_type, split

WORKSPACE = "workspace"
"""The memory in which cube and vector cores exchange blocks. It stays in the L2 cache."""
Numbers = Callable[[int], int]
"""What a program finds at an index of an array in global memory."""


@dataclass(frozen=True)
class View:
    dims: tuple[int, ...]
    dtype: str
    root: str
    """The name of the argument or allocation, or ``WORKSPACE``."""
    offset: int = 0

    @property
    def bytes(self) -> float:
        return math.prod(self.dims) * BYTES[self.dtype]


def _quotient(a: int, b: int) -> int:
    return int(math.copysign(abs(a) // abs(b), a * b)) if a else 0


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": _quotient,
    "remsi": lambda a, b: a - b * _quotient(a, b),
    "minsi": min,
    "maxsi": max,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "addf": lambda a, b: a + b,
    "mulf": lambda a, b: a * b,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}
CASTS = ("index_cast", "extsi", "extui", "trunci")


class Values:
    """The names of one core's program, and what they stand for."""

    def __init__(self, arguments: Mapping[str, int], arrays: Mapping[str, Numbers]) -> None:
        """``arguments``: numbers by name; ``arrays``: contents of arrays from which the program loads numbers."""
        self.names: dict[str, Any] = dict(arguments)
        self.arrays = arrays

    def number(self, text: str) -> Any:
        """The value of a name, or of a number in the text. An argument without a value is 0."""
        text = text.strip()
        return self.names.get(text, 0) if text.startswith("%") else int(text)

    def view(self, name: str) -> View:
        found = self.names.get(name)
        # An argument of the program: only its address is known.
        return found if isinstance(found, View) else View((), "i8", name)

    def bind(self, result: str, values: list[Any]) -> None:
        if result and values:
            self.names[result] = values[0]
            self.names.update((f"{result}#{number}", value) for number, value in enumerate(values))

    def compute(self, operation: Operation) -> None:
        """Run an arith, affine or memref operation.

        Raises:
            ValueError: the operation is not known.
        """
        group, _, kind = operation.name.partition(".")
        names = self.names
        if group == "arith":
            names[operation.result] = self._arithmetic(kind, operation.rest)
        elif group == "affine":
            names[operation.result] = self._affine(kind, operation.rest)
        elif kind == "load":
            name, index = _match(rf" ({NAME})\[(.*?)\]", operation.rest).groups()
            view = self.view(name)
            names[operation.result] = self.arrays[view.root](view.offset + self.number(index))
        elif group in ("memref", "memref_ext"):
            names[operation.result] = self._view(kind, operation.rest)
        else:
            raise ValueError(f"the model does not know the operation {operation.name}.")

    def _arithmetic(self, kind: str, rest: str) -> Any:
        if kind == "constant":
            return _constant(rest)
        if kind == "cmpi":
            how, a, b = _match(rf" (\w+), ({NAME}), ({NAME})", rest).groups()
            return COMPARISONS[how](self.number(a), self.number(b))
        given = operands(rest)
        if kind == "select":
            return self.names.get(given[1 if self.number(given[0]) else 2], 0)
        if kind in CASTS:
            return self.number(given[0])
        if kind not in ARITHMETIC:
            raise ValueError(f"the model does not know the operation arith.{kind}.")
        return ARITHMETIC[kind](self.number(given[0]), self.number(given[1]))

    def _affine(self, kind: str, rest: str) -> int:
        names, given, results = _affine_map(rest)
        values = dict(zip(names, (self.number(each) for each in given), strict=True))
        found = [int(eval(result, {"__builtins__": {}}, values)) for result in results]
        return {"apply": lambda: found[0], "min": lambda: min(found), "max": lambda: max(found)}[kind]()

    def _view(self, kind: str, rest: str) -> View:
        of = result_type(rest)
        base = self.view(operands(rest)[0])
        here = View(of.dims, of.dtype, WORKSPACE if kind == "alloc_workspace" else base.root, base.offset)
        if kind == "reinterpret_cast":
            offset, sizes = _match(r".*? to offset: \[(.*?)\], sizes: \[(.*?)\]", rest).groups()
            return replace(here, offset=self.number(offset), dims=tuple(map(self.number, sizes.split(","))))
        if kind == "subview":
            sizes = _match(r".*?\[.*?\] \[(.*?)\] \[", rest).group(1).split(",")
            return replace(here, dims=tuple(map(self.number, sizes))[len(sizes) - len(of.dims) :])
        if -1 in here.dims:
            known = math.prod(one for one in here.dims if one > 0)
            rows = math.prod(base.dims) // known
            one_unknown = here.dims.count(-1) == 1
            dims = tuple(rows if one < 0 else one for one in here.dims) if one_unknown else base.dims
            return replace(here, dims=dims)
        return here


def _match(pattern: str, text: str) -> re.Match[str]:
    found = re.match(pattern, text)
    if not found:
        raise ValueError(f"the model does not know the form of {text[:200]!r}.")
    return found


@functools.cache
def _operands(rest: str) -> list[str]:
    return re.findall(NAME, rest)


@functools.cache
def _constant(rest: str) -> float | int:
    text = _match(r" (?:dense<)?(-?[\w.+]+(?:e-\d+)?)", rest).group(1)
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else 0.0


@functools.cache
def _affine_map(rest: str) -> tuple[list[str], list[str], list[CodeType]]:
    """Names of dimensions and symbols, the values given for them, and the results as code."""
    dims, symbols, results, *given = _match(
        r" affine_map<\((.*?)\)(?:\[(.*?)\])? -> \((.*)\)>\((.*?)\)(?:\[(.*?)\])?", rest
    ).groups()
    names, values = (split(",".join(filter(None, pair))) for pair in ((dims, symbols), given))
    return names, values, [_expression(result) for result in split(results)]


class _RoundUp(ast.NodeTransformer):
    """``a @ b``, which stands for a ceildiv b, as Python computes it."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        negative = ast.UnaryOp(ast.USub(), node.left)
        return ast.UnaryOp(ast.USub(), ast.BinOp(negative, ast.FloorDiv(), node.right))


def _expression(text: str) -> CodeType:
    python = text.replace("floordiv", "//").replace("ceildiv", "@").replace(" mod ", " % ")
    tree = ast.fix_missing_locations(_RoundUp().visit(ast.parse(python, mode="eval")))
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load, ast.Constant)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise ValueError(f"the model does not know the expression {text!r}.")
    return compile(tree, "affine", "eval")
