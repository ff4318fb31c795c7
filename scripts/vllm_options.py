"""Reads vllm_options.toml: for every option of vLLM, whether it runs, is refused, or does not concern attention.

Used by: scripts/docs.py, which writes docs/supported.md from it, and tests/scripts/test_vllm_options.py, which
compares the table with the options of every recorded version (scripts/vllm_surface.py), so that no option of a new
version is overlooked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

TABLE = Path(__file__).with_suffix(".toml")
KINDS = ("engine", "sampling", "pooling", "attention_config", "environment")
"""The parts of vLLM's surface that users set."""

Answer = Literal["runs", "vLLM's own", "refused", "no effect"]


class Concerned(BaseModel):
    """Options that touch attention or the KV cache and behave the same on each device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["engine", "sampling", "pooling", "attention_config", "environment"]
    names: tuple[str, ...]
    cpu: Answer
    gpu: Answer
    """GPUs of compute capability 8.0 and newer, which use vLLM's FlashAttention."""
    volta: Answer
    ascend: Answer
    host_layers: Answer
    test: str = ""
    """The pytest node that shows that the option runs."""
    note: str = ""
    """The name of the refusal, or the condition under which the option matters."""

    @model_validator(mode="after")
    def _what_runs_is_tested(self) -> Concerned:
        if "runs" in (self.cpu, self.volta, self.host_layers) and not self.test:
            raise ValueError(f"{', '.join(self.names)}: an option that runs needs a test")
        if "refused" in (self.cpu, self.host_layers) and not (self.note or self.test):
            raise ValueError(
                f"{', '.join(self.names)}: an option that is refused needs the name of the refusal in note"
            )
        return self


class NoConcern(BaseModel):
    """Options that concern neither attention nor the KV cache, with one common reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str
    engine: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ()
    attention_config: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


class Table(BaseModel):
    """The whole table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    concerned: tuple[Concerned, ...]
    no_concern: tuple[NoConcern, ...]

    def names(self, kind: str) -> Iterator[str]:
        """All names of one kind, duplicates included."""
        for row in self.concerned:
            if row.kind == kind:
                yield from row.names
        for group in self.no_concern:
            yield from getattr(group, kind)


def read() -> Table:
    """
    Raises:
        pydantic.ValidationError: an entry is malformed.
    """
    return Table.model_validate(tomllib.loads(TABLE.read_text()))


def flag(kind: str, name: str) -> str:
    """The option as users write it."""
    return f"--{name.replace('_', '-')}" if kind == "engine" else name
