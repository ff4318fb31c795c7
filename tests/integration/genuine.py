"""The attributes of vLLM's own classes, for what stands in for them in tests."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

WRITERS = {"register_buffer", "register_parameter", "setattr"}


@functools.cache
def attributes_of(path: str) -> frozenset[str]:
    """The names of ``module:Class``: those of the class, of its fields, and those that its own code gives an object.

    Functions of the class's module that take a ``layer`` give it names, too.
    """
    module, _, name = path.partition(":")
    genuine: Any = getattr(importlib.import_module(module), name)
    found = set(dir(genuine))
    for base in inspect.getmro(genuine):
        found |= set(inspect.get_annotations(base))
        if base.__module__.startswith("vllm"):
            found |= set(_given("self", ast.parse(textwrap.dedent(inspect.getsource(base)))))
            found |= set(_given("layer", ast.parse(inspect.getsource(importlib.import_module(base.__module__)))))
    return frozenset(found)


def _given(owner: str, tree: ast.AST) -> Iterator[str]:
    """The attributes that the code gives ``owner``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is(node.value, owner):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in WRITERS:
            of_owner = _is(node.args[0], owner) or _is(getattr(node.func, "value", None), owner) if node.args else False
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from names[:1] if of_owner or _is(node.func, "register_buffer") else []


def _is(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
