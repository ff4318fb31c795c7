"""What tiling-AllReduce would do for a model's row-parallel layers here, and what that gains, as measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.bench import ranks
from fastattention_vllm.parallel import calibrate
from fastattention_vllm.parallel.choice import Trial
from fastattention_vllm.parallel.named_collectives import DEFAULT_COLLECTIVES


@dataclass(frozen=True)
class LayerKind:
    """A row-parallel layer of all ranks together."""

    name: str
    inputs: int
    outputs: int


LLAMA_8B = [LayerKind("o_proj", 4096, 4096), LayerKind("down_proj", 14336, 4096)]


def kinds_of(config: Path) -> list[LayerKind]:
    """Those of a model, by the config.json in its folder (or that file).

    Raises:
        ValueError: there is none, or it does not say how large its layers are.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {config}: no config.json that can be read there ({error}).") from error
    try:
        found = found.get("text_config", found)
        hidden, heads, wide = (int(found[key]) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
        size = int(found.get("head_dim") or hidden // heads)
        if min(hidden, heads, wide, size) < 1:
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"--model {path} has no hidden_size, num_attention_heads and intermediate_size above 0; name another model."
        ) from error
    return [LayerKind("o_proj", heads * size, hidden), LayerKind("down_proj", wide, hidden)]


@dataclass(frozen=True)
class Order:
    """What the ranks are told."""

    kinds: list[LayerKind]
    ranks: int
    device: str
    min_tokens: int
    max_tokens: int


def examine(order: Order, limit: float, say: Callable[[str], object]) -> bool:
    """Measure, and say a line for each thing that is known; whether all of it was measured.

    Raises:
        ValueError: layers that do not divide among the ranks, or fewer GPUs than ranks.
    """
    for kind in order.kinds:
        if kind.inputs % order.ranks:
            raise ValueError(f"{kind.name} has {kind.inputs} inputs, which are not a multiple of --tp {order.ranks}.")
    if order.device == "cuda" and torch.cuda.device_count() < order.ranks:
        raise ValueError(f"--tp {order.ranks} needs as many GPUs; there are {torch.cuda.device_count()}.")
    return ranks.run(_rank, order.ranks, order, {}, limit, lambda row: say(row["line"]))


def _rank(rank: int, folder: str, order: Order) -> None:
    here = ranks.join(
        rank, folder, order.ranks, order.device, DEFAULT_COLLECTIVES[order.device], lambda sentence: {"line": sentence}
    )
    here.tell({"line": _ranks_line(order, list(here.collectives))})
    dtype = torch.float16 if order.device == "cuda" else torch.float32
    for kind in order.kinds:
        weight = torch.empty(kind.outputs, kind.inputs // order.ranks, dtype=dtype, device=order.device)
        choice = calibrate.measure(
            here.collectives, ranks.plain_layer, weight.uniform_(-1, 1), order.min_tokens, order.max_tokens
        )
        for trial in choice.trials:
            here.tell({"line": line(kind, trial)})
    ranks.leave(here)


def _ranks_line(order: Order, collectives: list[str]) -> str:
    what = torch.cuda.get_device_name() if order.device == "cuda" else "CPU, one thread each"
    return f"{order.ranks} ranks ({what}); sums by {', '.join(collectives)}"


def line(kind: LayerKind, trial: Trial) -> str:
    """Plan and measured gain of one layer at one number of tokens."""
    start = f"{kind.name} {kind.inputs}x{kind.outputs}, {trial.rows} tokens: {1e3 * trial.plain_seconds:.3f} ms plain"
    if len(trial.blocks) == 1:
        return f"{start}; left as it is, no cut that was timed is enough faster"
    blocks = " + ".join(map(str, trial.blocks))
    return (
        f"{start}, {1e3 * trial.seconds:.3f} ms in blocks of {blocks} by {trial.collective}: "
        f"{trial.plain_seconds / trial.seconds:.2f}x, {100 * trial.hidden:.0f} % of {1e3 * trial.hideable_seconds:.3f} "
        "ms that can be hidden"
    )
