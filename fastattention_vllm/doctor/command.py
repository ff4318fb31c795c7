"""`fastattention doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from fastattention_vllm.doctor.basics import basics
from fastattention_vllm.doctor.tensor_parallel import LLAMA_8B, Order, examine, kinds_of


def doctor(
    tp: Annotated[
        int | None, typer.Option(min=2, help="Ranks of tensor parallelism to try here; none: say what this machine is.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder with the config.json; none: an 8B Llama's layers.")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="--max-num-batched-tokens of the server.")] = 8192,
    min_tokens: Annotated[int, typer.Option(min=2, help="tiling_min_tokens of the server.")] = 2048,
    limit: Annotated[float, typer.Option(min=1, help="Seconds, after which it is ended.")] = 300.0,
) -> None:
    """What this machine is, or with --tp what tiling_all_reduce "auto" would do for a model's row-parallel layers on
    it, and what that gains."""
    if tp is None:
        for line in basics():
            typer.echo(line)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kinds = kinds_of(model) if model else LLAMA_8B
        complete = examine(Order(kinds, tp, device, min(min_tokens, tokens), tokens), limit, typer.echo)
    except ValueError as error:
        typer.echo(f"fastattention doctor: {error}", err=True)
        raise typer.Exit(2) from None
    if not complete:
        reason = f"a rank failed, and its own message is above, or not all was measured within --limit {limit:g} s."
        typer.echo(f"fastattention doctor: {reason}", err=True)
        raise typer.Exit(1)
