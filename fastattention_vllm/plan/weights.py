"""Bytes of a quantised weight, as a model's config.json describes its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PLAIN = 2.0
"""Bytes of a weight in fp16 or bf16."""
SCALE_BYTES = 4
"""Of a group of integers: scale and zero point in the V100 kernels' layout. Files have up to 1.5 bytes less."""
OUTSIDE = ("lm_head", "embed", "visual", "vision", "norm", "mtp")
"""Parts of the names of modules that are not among the layers' matrices."""


def bytes_per_weight(config: Mapping[str, Any]) -> float | None:
    """Bytes of each weight of the layers' matrices, with its share of the scales.

    ``config``: ``quantization_config`` of AWQ, GPTQ, compressed-tensors or FP8. ``None`` if it is another method, or if
    the layers' matrices do not all have the same format.
    """
    method = config.get("quant_method")
    if method in ("awq", "gptq"):
        excluded = [*(config.get("modules_to_not_convert") or ()), *(config.get("dynamic") or ())]
        if config.get("lm_head") or not _outside(excluded):
            return None
        return _integers(config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size")))
    if method == "fp8":
        excluded = [*(config.get("ignored_layers") or ()), *(config.get("modules_to_not_convert") or ())]
        return 1.0 if _outside(excluded) else None
    if method == "compressed-tensors":
        return _compressed(config)
    return None


def _compressed(config: Mapping[str, Any]) -> float | None:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"] or not _outside(config.get("ignore") or ()):
        return None
    weights = groups[0].get("weights") or {}
    if weights.get("type") == "float":
        return 1.0 if weights.get("num_bits") == 8 else None
    return _integers(weights.get("num_bits"), weights.get("group_size"))


def _integers(bits: object, group: object) -> float | None:
    if not isinstance(bits, int) or bits not in (4, 8):
        return None
    if not isinstance(group, int) or group <= 0:
        return bits / 8  # a scale of a whole column is negligible
    return bits / 8 + SCALE_BYTES / group


def _outside(names: Iterable[str]) -> bool:
    return all(any(part in str(name) for part in OUTSIDE) for name in names)
