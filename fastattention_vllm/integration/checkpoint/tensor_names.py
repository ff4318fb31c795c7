"""Which tensor a checkpoint lacks, by the names of the others.

vLLM loads several tensors into one parameter, such as the projections of queries, keys and values. It counts the
parameter as loaded when the first of them has arrived, and serves what memory held in place of the rest. In quantised
models, it counts nothing at all.

Layers may differ on purpose, and to refuse a whole model is worse than to miss a damaged one. So a tensor is missing
only where all comparable layers have it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

KEYS = ("q_proj", "k_proj", "v_proj")
FUSED = (
    KEYS,
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Names of layers whose tensors vLLM loads into one parameter. Source: ``packed_modules_mapping`` of vLLM's models."""
WITHOUT_KEYS = ("num_kv_shared_layers", "attention_k_eq_v", "use_cla")
"""A model whose configuration has one of these leaves out keys or values of some layers on purpose."""
LATENT = "kv_a_proj_with_mqa"
"""A layer with latent attention has this one in place of keys and values. In Kimi-Linear, other layers have both."""
CHOSEN_BY_LAYER = ("block_configs",)
"""A model whose configuration has one of these may leave any part of any layer out (Nemotron-NAS)."""
OTHERS = 3
"""So many layers must have what one layer lacks."""
NEEDED = frozenset(
    {"weight", "qweight", "qzeros", "scales", "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv"}
)
"""Parameters that no quantised linear layer leaves out where it has others of its kind. Not among them are biases, and
scales of inputs and of the KV cache, which vLLM replaces by 1 if they are missing."""
UNQUANTISED = (frozenset({"weight"}), frozenset({"weight", "bias"}))
"""The parameters of a layer that a quantised checkpoint leaves as it was."""

_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.+)")
_LAYER = re.compile(r"\.\d+\.")
# The module ends before the first "weight": bitsandbytes has names such as q_proj.weight.absmax.
_STACKED = re.compile(r"(.*?)\.(\d+)\.(.+?)\.(weight(?:\..+)?|[^.]+)")


def missing_tensor(names: Collection[str], text_config: Any = None, *, whole: bool = True) -> str | None:
    """The first tensor that is missing, or None.

    Args:
        names: the names of all tensors of the checkpoint.
        text_config: the configuration of the model.
        whole: otherwise these may be a part of a checkpoint, and only parts of one parameter belong together.
    """
    leaves_keys_out = any(getattr(text_config, name, None) for name in WITHOUT_KEYS)
    found = sorted(_of_fused_layers(names, leaves_keys_out)) or sorted(_of_experts(names))
    if whole and not found and not any(getattr(text_config, name, None) for name in CHOSEN_BY_LAYER):
        found = sorted(name for name in _of_layers(names) if not (leaves_keys_out and any(key in name for key in KEYS)))
    return found[0] if found else None


def _of_fused_layers(names: Collection[str], leaves_keys_out: bool) -> Iterator[str]:
    """Names that are missing beside another of the same parameter, while other decoder layers have them."""
    known = set(names)
    in_layers = {_LAYER.sub(".N.", name) for name in names}
    latent = {name.partition(f".{LATENT}.")[0] for name in names if f".{LATENT}." in name}
    for name in names:
        module, _, parameter = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        for fused in FUSED:
            if layer not in fused or (fused == KEYS and (leaves_keys_out or parent in latent)):
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


def _of_layers(names: Collection[str]) -> Iterator[str]:
    """Tensors that one layer lacks, and that every other layer has which has all modules of this one."""
    stacks: dict[str, dict[int, dict[str, set[str]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for name in names:
        if (found := _STACKED.fullmatch(name)) and not _EXPERT.fullmatch(name):
            stack, number, module, parameter = found.groups()
            stacks[stack][int(number)][module].add(parameter)
    for stack, layers in stacks.items():
        for number, modules in layers.items():
            begin = f"{stack}.{number}."
            others = [other for other in layers.values() if other is not modules and other.keys() >= modules.keys()]
            if len(others) < OTHERS:
                continue
            for module, parameters in modules.items():
                common = frozenset.intersection(*(frozenset(other[module]) for other in others))
                if parameters < common and parameters not in UNQUANTISED:
                    yield from (f"{begin}{module}.{parameter}" for parameter in (common - parameters) & NEEDED)
            absent = frozenset.intersection(*(frozenset(other) for other in others)) - modules.keys()
            # The first and the last layer of a model may have no norm, for example. And where all modules below a
            # name are absent, the layer may do without that part.
            if number not in (min(layers), max(layers)) and {_parent(name) for name in absent} <= _parents(modules):
                yield from (f"{begin}{module}.{min(others[0][module])}" for module in absent)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _parents(modules: Collection[str]) -> set[str]:
    """The names above ``modules``, and that of the layer itself."""
    return {""} | {_parent(module) for module in modules}
