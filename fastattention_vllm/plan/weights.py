"""How a checkpoint stores a matrix, as ``quantization_config`` in a model's config.json says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

PLAIN_BYTES = 2.0
"""Bytes of a weight in fp16 or bf16."""
SCALE_BYTES = 4
"""Of a group of integers: scale and zero point in the V100 kernels' layout. Files have up to 1.5 bytes less."""
PLAIN_BITS = 16
SPECIAL = set(r"*+?^$()[]{}|\\")
"""AutoRound's rules with one of these are regular expressions."""
LEFT_TO_VLLM = (2, 3)
"""Bits of GPTQ weights that run on kernels of vLLM 0.19."""


@dataclass(frozen=True)
class Stored:
    """The format of a matrix."""

    method: str = ""
    """The quant_method in vLLM's spelling; empty: not quantised."""
    kind: str = "int"
    """``int`` or ``float``."""
    bits: int = 0
    """Of a weight. 0: not known."""
    scales: str = "group"
    """What has a scale: group, channel, tensor, block, or another word of compressed-tensors."""
    group: int = 0
    """Inputs with a common scale, if ``scales`` is ``group``."""
    block: tuple[int, ...] = ()
    """Sizes of a block, if ``scales`` is ``block``."""
    form: str = ""
    """``format`` of compressed-tensors, ``version`` of AWQ."""
    zero_points: bool = False
    ordered: bool = False
    """Activation order: groups of inputs that do not follow each other."""
    activations: int = 0
    """Bits of quantised activations; 0: they are not quantised."""
    static: bool = True
    """Whether the weights' scales are in the checkpoint, and outputs are not quantised."""
    torn: bool = False
    """Whether a rule means this matrix, but not vLLM's merged layer with its own name, or the reverse."""
    transformed: bool = False
    """Whether the checkpoint has transforms or sparsity of compressed-tensors."""

    @property
    def bytes(self) -> float | None:
        """Of each weight, with its share of the scales. None: not known."""
        if not self.method:
            return PLAIN_BYTES
        if self.kind == "float":
            return 1.0 if self.bits == 8 else None
        if self.bits not in (4, 8):
            return None
        # A scale of a whole column is negligible.
        return self.bits / 8 + (SCALE_BYTES / self.group if self.group > 0 else 0)


@dataclass(frozen=True)
class CacheScheme:
    """The KV cache that a checkpoint asks for with --kv-cache-dtype auto."""

    dtype: str = ""
    """vLLM's name; empty: the checkpoint asks for none."""
    per_head: bool = False
    """Whether each KV head has scales of its own."""
    key: str = "kv_cache_scheme"
    """What asks for it in the checkpoint's quantization_config."""


NO_SCHEME = CacheScheme()
PLAIN = Stored()
UNKNOWN = Stored("unknown")


def method_of(config: Mapping[str, Any]) -> str:
    return str(config.get("quant_method", "")).lower().replace("_", "-")


def cache_scheme(config: Mapping[str, Any]) -> CacheScheme:
    """``kv_cache_scheme`` of compressed-tensors, or the same of ModelOpt."""
    method, scheme = method_of(config), config.get("kv_cache_scheme")
    if method == "compressed-tensors" and scheme:
        return CacheScheme("fp8", scheme.get("strategy") == "attn_head")
    if not method.startswith("modelopt"):
        return NO_SCHEME
    inner = config.get("quantization") or config
    named = inner.get("kv_cache_scheme") or scheme
    if isinstance(named, Mapping):
        named = f"{'nv' if named.get('num_bits') == 4 else ''}fp{named.get('num_bits')}"
    if named:
        return CacheScheme(str(named).lower())
    return CacheScheme(str(inner.get("kv_cache_quant_algo") or "").lower(), key="kv_cache_quant_algo")


def stored(
    config: Mapping[str, Any], names: Sequence[str], merged: Sequence[str] = (), *, is_head: bool = False
) -> Stored:
    """The format of a matrix.

    Args:
        config: ``quantization_config``.
        names: the names that the checkpoint may give to the matrix.
        merged: the names of vLLM's layer that merges it with others. Lists of unquantised layers may have them instead.
        is_head: whether it is the matrix of logits, which is seldom quantised.

    Returns:
        ``UNKNOWN`` if a rule is not a regular expression of Python's, or if vLLM's own kernels run.
    """
    try:
        match method := method_of(config):
            case "awq":
                return _awq(config, names, is_head)
            case "gptq":
                return _gptq(config, names, merged, is_head)
            case "fp8":
                return _fp8(config, [*names, *merged], is_head)
            case "compressed-tensors":
                return _compressed(config, names, merged, is_head)
            case "auto-round" | "inc":
                return _auto_round(config, names, is_head)
        return PLAIN if is_head else Stored(method or "an unnamed method")
    except re.error:
        return UNKNOWN


def _awq(config: Mapping[str, Any], names: Sequence[str], is_head: bool) -> Stored:
    if is_head and not config.get("lm_head"):
        return PLAIN
    if any(str(part) in name for part in config.get("modules_to_not_convert") or () for name in names):
        return PLAIN
    return _integers(
        "awq",
        config.get("bits", config.get("w_bit")),
        config.get("group_size", config.get("q_group_size")),
        form=str(config.get("version", "gemm")).lower(),
        zero_points=bool(config.get("zero_point", True)),
    )


def _gptq(config: Mapping[str, Any], names: Sequence[str], merged: Sequence[str], is_head: bool) -> Stored:
    if is_head and not config.get("lm_head"):
        return PLAIN
    if config.get("bits") in LEFT_TO_VLLM:
        return UNKNOWN
    changes = _changes(config, names)
    torn = bool(merged) and _changes(config, merged) != changes
    inside = list(_flat(config.get("modules_in_block_to_quantize") or ()))
    left_out = inside and not is_head and not any(part in name for part in inside for name in names)
    if changes is None or left_out:
        return replace(PLAIN, torn=torn)
    found = {**config, **changes}
    return _integers(
        "gptq",
        found.get("bits"),
        found.get("group_size"),
        zero_points=not found.get("sym", True),
        ordered=bool(found.get("desc_act")) and found.get("group_size") != -1,
        torn=torn,
    )


def _auto_round(config: Mapping[str, Any], names: Sequence[str], is_head: bool) -> Stored:
    """Weights in the words of GPTQ or AWQ, which vLLM tells from the packing or the backend."""
    words = f"{config.get('packing_format') or 'gptq'} {config.get('backend') or config.get('vllm_backend') or ''}"
    method = next((kind for kind in ("gptq", "awq") if kind in words), "auto-round")
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    inside = blocks.split(",") if isinstance(blocks, str) else list(_flat(blocks))
    quantised = any(name.startswith(part) for part in inside for name in names) if inside else not is_head
    changes = _exceptions(config.get("extra_config") or {}, names)
    found = {**config, **changes}
    bits = found.get("bits") if quantised or "bits" in changes else None
    if not isinstance(bits, int) or bits >= PLAIN_BITS:
        return PLAIN
    if method == "gptq" and config.get("bits") in LEFT_TO_VLLM:
        return UNKNOWN
    zero_points = method == "awq" or not found.get("sym", True)
    return _integers(
        method, bits, found.get("group_size"), form="gemm" if method == "awq" else "", zero_points=zero_points
    )


def _exceptions(rules: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, Any]:
    """Of AutoRound: the rule with a name, or else the first that is a regular expression found in one."""
    named = [rules[name] for name in names if name in rules]
    found = [changes for rule, changes in rules.items() if set(rule) & SPECIAL
             and any(re.search(rule, name) for name in names)]  # fmt: skip
    return next(iter([*named, *found]), {})


def _changes(config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any] | None:
    """What the first rule of ``dynamic`` that a name begins with changes. None: the layer is not quantised."""
    for rule, changes in (config.get("dynamic") or {}).items():
        if any(re.match(re.sub(r"^[-+]:", "", rule), name) for name in names):
            return None if rule.startswith("-:") else changes
    return {}


def _fp8(config: Mapping[str, Any], names: Sequence[str], is_head: bool) -> Stored:
    listed = {str(name) for name in config.get("ignored_layers") or config.get("modules_to_not_convert") or ()}
    if is_head or any(_is_listed(name, listed) for name in names):
        return PLAIN
    block = config.get("weight_block_size")
    scales = "tensor" if block is None else "block"
    return Stored("fp8", "float", 8, scales, block=_block(block))


def _compressed(config: Mapping[str, Any], names: Sequence[str], merged: Sequence[str], is_head: bool) -> Stored:
    ignored = [str(rule) for rule in config.get("ignore") or ()]
    if _matches(ignored, names) or {*merged} & {*ignored}:
        return PLAIN
    group = _group(config, names, is_head)
    weights = (group or {}).get("weights")
    if group is None or not weights:
        return PLAIN
    size, strategy = weights.get("group_size"), weights.get("strategy")
    scales = str(strategy or ("tensor" if size is None else "channel" if size == -1 else "group")).lower()
    return Stored(
        "compressed-tensors",
        str(weights.get("type", "int")).lower(),
        weights.get("num_bits", 8),
        scales,
        group=size if scales == "group" and isinstance(size, int) else 0,
        block=_block(weights.get("block_structure")),
        form=str(group.get("format") or config.get("format")),
        zero_points=not weights.get("symmetric", True),
        ordered=str(weights.get("actorder")).lower() in ("group", "dynamic"),
        activations=(group.get("input_activations") or {}).get("num_bits", 0),
        static=not weights.get("dynamic") and group.get("output_activations") is None,
        transformed=bool(config.get("transform_config") or (config.get("sparsity_config") or {}).get("targets")),
    )


def _group(config: Mapping[str, Any], names: Sequence[str], is_head: bool) -> Mapping[str, Any] | None:
    """The first group that names the layer, or else the first for all linear layers."""
    groups: list[Mapping[str, Any]] = list((config.get("config_groups") or {}).values())
    named = [group for group in groups if _matches(group.get("targets") or (), names)]
    # vLLM does not count the matrix of logits among linear layers.
    by_class = [group for group in groups if "Linear" in (group.get("targets") or ()) and not is_head]
    return next(iter([*named, *by_class]), None)


def _integers(method: str, bits: object, group: object, **others: Any) -> Stored:
    size = group if isinstance(group, int) and group > 0 else 0
    known = bits if isinstance(bits, int) else 0
    return Stored(method, "int", known, "group" if size else "channel", group=size, **others)


def _block(sizes: str | Sequence[Any] | None) -> tuple[int, ...]:
    """[128, 128], or "128x128"."""
    return tuple(int(size) for size in (sizes.split("x") if isinstance(sizes, str) else sizes or ()))


def _matches(rules: Iterable[str], names: Sequence[str]) -> bool:
    """Whether a rule of compressed-tensors is a name, or a regular expression that a name begins with."""
    return any(
        re.match(rule[3:], name) is not None if rule.startswith("re:") else rule == name
        for rule in rules
        for name in names
    )


def _is_listed(name: str, listed: set[str]) -> bool:
    """Whether a list has the name, or its first or last components."""
    parts = name.split(".")
    return any(
        ".".join(parts[:count]) in listed or ".".join(parts[-count:]) in listed for count in range(1, len(parts) + 1)
    )


def _flat(names: Iterable[Any]) -> Iterable[str]:
    for name in names:
        yield from [name] if isinstance(name, str) else _flat(name)
