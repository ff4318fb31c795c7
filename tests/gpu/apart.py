"""Runs an engine in a process of its own, because vLLM keeps state of CUDA graphs for as long as a process lives."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def apart(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """What ``function``, which a new process can import, returns there. Its exceptions are raised here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()
