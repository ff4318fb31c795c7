"""Every option of vLLM, from vllm_options.toml: it runs, does not concern attention or the KV cache, or is refused.

Used by: scripts/docs.py, which writes docs/supported.md from it, and tests/scripts/test_vllm_options.py, which
compares the table with the options of every recorded version (scripts/vllm_surface.py): a new version cannot bring one
in silence.
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

Answer = Literal["runs", "vLLM's own", "refused", "no effect", "untested"]


class Concerned(BaseModel):
    """Options that touch attention or the KV cache, with the same answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["engine", "sampling", "pooling", "attention_config", "environment"]
    names: tuple[str, ...]
    cpu: Answer
    gpu: Answer
    """On compute capability 8.0 and newer, where vLLM's FlashAttention computes."""
    volta: Answer
    ascend: Answer
    host_layers: Answer
    test: str = ""
    """A pytest node that shows what runs."""
    note: str = ""
    """What the refusal is called, or when the option matters."""

    @model_validator(mode="after")
    def _what_runs_is_tested(self) -> Concerned:
        if "runs" in (self.cpu, self.volta, self.host_layers) and not self.test:
            raise ValueError(f"{', '.join(self.names)}: what runs names a test")
        if "refused" in (self.cpu, self.host_layers) and not (self.note or self.test):
            raise ValueError(f"{', '.join(self.names)}: what is refused names the refusal")
        return self


class NoConcern(BaseModel):
    """Options that touch neither attention nor the KV cache, for one reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str
    engine: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ()
    attention_config: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


class Table(BaseModel):
    """The whole of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    concerned: tuple[Concerned, ...]
    no_concern: tuple[NoConcern, ...]

    def names(self, kind: str) -> Iterator[str]:
        """All names of a kind, as often as they stand there."""
        for row in self.concerned:
            if row.kind == kind:
                yield from row.names
        for group in self.no_concern:
            yield from getattr(group, kind)


def read() -> Table:
    """
    Raises:
        pydantic.ValidationError: an entry has another form.
    """
    return Table.model_validate(tomllib.loads(TABLE.read_text()))


def flag(kind: str, name: str) -> str:
    """As a user writes it."""
    return f"--{name.replace('_', '-')}" if kind == "engine" else name
