"""Which tensor a checkpoint lacks, by the names of the others.

vLLM loads several tensors into one parameter, such as the projections of queries, keys and values. It counts the
parameter as loaded when the first of them has arrived, and serves what memory held in place of the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Names of layers whose tensors vLLM loads into one parameter. Source: ``packed_modules_mapping`` of vLLM's models."""
WITHOUT_KEYS = ("num_kv_shared_layers", "attention_k_eq_v")
"""A model whose configuration has one of these leaves out keys or values of some layers on purpose."""

_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.+)")
_LAYER = re.compile(r"\.\d+\.")


def missing_tensor(names: Collection[str], text_config: Any = None) -> str | None:
    """The first tensor that is missing, or None.

    Args:
        names: the names of all tensors of the checkpoint.
        text_config: the configuration of the model.
    """
    leaves_keys_out = any(getattr(text_config, name, None) for name in WITHOUT_KEYS)
    found = sorted(_of_fused_layers(names, leaves_keys_out)) or sorted(_of_experts(names))
    return found[0] if found else None


def _of_fused_layers(names: Collection[str], leaves_keys_out: bool) -> Iterator[str]:
    """Names that are missing beside another of the same parameter, while other decoder layers have them."""
    known = set(names)
    in_layers = {_LAYER.sub(".N.", name) for name in names}
    for name in names:
        module, _, parameter = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        for fused in FUSED:
            if layer not in fused or (leaves_keys_out and "q_proj" in fused):
                continue
            for sibling in fused:
                wanted = f"{parent}.{sibling}.{parameter}"
                if wanted not in known and _LAYER.sub(".N.", wanted) in in_layers:
                    yield wanted


def _of_experts(names: Collection[str]) -> Iterator[str]:
    """Tensors of experts that other experts of the same layer have, and experts that other layers have."""
    layers: dict[str, set[str]] = defaultdict(set)
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := _EXPERT.fullmatch(name):
            layers[found["experts"]].add(found["rest"])
            numbers[_LAYER.sub(".N.", found["experts"])].add(found["number"])
    known = set(names)
    for experts, tensors in layers.items():
        for number in numbers[_LAYER.sub(".N.", experts)]:
            for tensor in tensors:
                if (wanted := f"{experts}.{number}.{tensor}") not in known:
                    yield wanted
