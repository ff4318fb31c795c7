"""Takes one flag at a time out of a program. A model that orders pipes by their flags must notice each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernels.ascend.pipes import DeadlockError
from kernels.ascend.simulation import Bodies, Launch, simulate
from kernels.ascend.tables import Chip, Tables
from kernels.ascend.text import Branch, Operation, Statement

FLAGS = ("set_flag", "wait_flag", "sync_block_set", "sync_block_wait")


def without_each(programs: Bodies) -> Iterator[tuple[str, Bodies]]:
    """The programs without one flag, and which one it was."""
    for kind, body in programs.items():
        for flag, shorter in _shorter(body):
            yield f"{kind}: {flag.name}{flag.rest}", {**programs, kind: shorter}


def _shorter(body: tuple[Statement, ...]) -> Iterator[tuple[Operation, tuple[Statement, ...]]]:
    for place, one in enumerate(body):
        before, after = body[:place], body[place + 1 :]
        if isinstance(one, Operation):
            if one.name.removeprefix("hivm.hir.") in FLAGS:
                yield one, before + after
            continue
        for flag, inner in _shorter(one.body):
            yield flag, (*before, replace(one, body=inner), *after)
        if isinstance(one, Branch):
            for flag, inner in _shorter(one.otherwise):
                yield flag, (*before, replace(one, otherwise=inner), *after)


def noticed(programs: Bodies, launch: Launch, chip: Chip, tables: Tables) -> bool:
    """Whether the model sees that a flag is missing: a core waits for ever, or a flag is left over."""
    try:
        return simulate(programs, launch, chip, tables).left_over > 0
    except DeadlockError:
        return True
