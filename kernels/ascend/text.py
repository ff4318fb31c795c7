"""Reads a program as the compiler prints it: MLIR text with scf, arith, affine, memref and hivm operations."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = r"%[\w\-]+(?:#\d+)?"
BYTES = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "i8": 1.0, "i1": 0.125, "i16": 2.0, "i32": 4.0, "i64": 8.0}
"""Per number."""


@dataclass(frozen=True)
class Operation:
    result: str
    """Empty if there is none."""
    name: str
    rest: str


@dataclass(frozen=True)
class Loop:
    result: str
    index: str
    bounds: tuple[str, str, str]
    """Begin, end and step."""
    carried: tuple[tuple[str, str], ...]
    """Names of the values that one iteration hands to the next, and of the first ones."""
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Branch:
    result: str
    condition: str
    body: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


Statement = Operation | Loop | Branch

_RESULT = rf"(?:({NAME}(?:, {NAME})*)(?::\d+)? = )?"
_LOOP = re.compile(rf"{_RESULT}scf\.for ({NAME}) = ({NAME}) to ({NAME}) step ({NAME})(?: iter_args\((.*?)\))?")
_BRANCH = re.compile(rf"{_RESULT}scf\.if ({NAME})")
_OPERATION = re.compile(rf"{_RESULT}([a-z_]+\.[\w.]+)(.*)")


def body_of(function: str) -> tuple[Statement, ...]:
    """The statements of a printed function.

    Raises:
        ValueError: a line is of no known form.
    """
    lines = iter(function.split("\n")[1:])
    return _block(lines)[0]


def _block(lines: Iterator[str]) -> tuple[tuple[Statement, ...], str]:
    """Statements up to the closing brace, and the line of the brace."""
    found: list[Statement] = []
    for line in lines:
        text = line.strip()
        if text.startswith("}"):
            return tuple(found), text
        if loop := _LOOP.match(text):
            result, index, begin, end, step, carried = loop.groups()
            pairs = tuple(re.findall(rf"({NAME}) = ({NAME})", carried or ""))
            found.append(Loop(result or "", index, (begin, end, step), pairs, _block(lines)[0]))
        elif branch := _BRANCH.match(text):
            body, closing = _block(lines)
            otherwise = _block(lines)[0] if "else" in closing else ()
            found.append(Branch(branch.group(1) or "", branch.group(2), body, otherwise))
        elif operation := _OPERATION.match(text):
            found.append(Operation(operation.group(1) or "", operation.group(2), operation.group(3)))
        elif text and text != "return":
            raise ValueError(f"the model does not know the line {text[:200]!r}.")
    return tuple(found), ""


@dataclass(frozen=True)
class Memory:
    """The type of a memory view. A dimension that is known only when the program runs is -1."""

    dims: tuple[int, ...]
    dtype: str
    space: str


@functools.cache
def memory(text: str) -> Memory:
    """Parse ``memref<...>``; other types raise ``ValueError``."""
    found = re.match(r"memref<((?:[\d?]+x)*)(\w+)", text.strip())
    if not found:
        raise ValueError(f"{text[:80]!r} is not the type of a memory view.")
    dims = tuple(-1 if one == "?" else int(one) for one in found.group(1).split("x") if one)
    space = re.search(r"address_space<(\w+)>", text)
    return Memory(dims, found.group(2), space.group(1) if space else "")


@functools.cache
def operands(rest: str) -> list[str]:
    """The names in an operation's text, before its types."""
    return re.findall(NAME, rest.split(" : ")[0])


def result_type(rest: str) -> Memory:
    """The type of what an operation returns, which is the last one of its text."""
    return memory(rest[rest.rindex("memref<") :])


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
