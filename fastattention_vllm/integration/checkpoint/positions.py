"""No request may be longer than the model's table of positions.

With VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, or with a YaRN configuration that promises more than its factor gives, vLLM
accepts a longer --max-model-len. A GPU then reads behind the table, and a CPU stops at the first token beyond it. With
dynamic NTK and a factor, vLLM itself chooses a length beyond its table, if the user gives none.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

SCALED_FROM_ORIGINAL = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Their table has ``original_max_position_embeddings`` x ``factor`` rows, whatever ``max_position_embeddings`` says."""
IMAGE_POSITIONS = 4
"""vLLM makes the tables of rotary embeddings with image positions so many times as long."""
OTHER_NAMES = {
    "cohere": "model_max_length",
    "cohere2": "model_max_length",
    "cohere2_moe": "model_max_length",
    "chatglm": "seq_length",
    "dbrx": "max_seq_len",
    "step3_text": "max_position_embedding",
    "moondream3_text": "max_context",
}
"""By model type: the attribute that goes before ``max_position_embeddings``. Command-R has both, and they differ."""


def check_positions(vllm_config: VllmConfig) -> None:
    """Compare the longest request with the positions that the model's table will have.

    A length that vLLM chose is lowered. This has to happen where vLLM makes its configuration, before processes copy
    it.

    Raises:
        Refusal: the user's --max-model-len is longer. The sentence has a shorter length and, with rotary embeddings, a
            longer table.
    """
    model: Any = vllm_config.model_config
    if model is None:
        return
    text, wanted = model.hf_text_config, model.max_model_len
    tables = positions_of(text)
    if not tables or wanted <= min(tables):
        return
    longest = min(tables)
    if model.original_max_model_len in (None, -1):
        logger.info(
            "Requests are limited to %d tokens, the length of this model's table of positions. vLLM chose %d.",
            longest,
            wanted,
        )
        compat.set_max_model_len(vllm_config, longest)
        return
    fix = f"pass --max-model-len {longest} or less"
    parameters = [] if getattr(text, "model_type", None) in OTHER_NAMES else rope_parameters(text)
    if len(parameters) == 1 and parameters[0].get("rope_type", "default") in ("default", "yarn"):
        longer = _where_vllm_looks(model, extended(text, parameters[0], wanted))
        if longer is not None:
            fix += f", or extend the positions with --hf-overrides '{json.dumps(longer)}'"
    raise Refusal(f"--max-model-len {wanted} is longer than the {longest} positions of this model; {fix}.")


def positions_of(text: Any) -> list[int]:
    """The length of each table of positions that vLLM will make for a model with this configuration.

    Empty if it has none, or one that this package does not know. Source: vLLM's ``get_rope``.
    """
    positions = _positions(text)
    if positions is None or getattr(text, "alibi", False):
        return []
    return [_rows(parameters, positions) for parameters in rope_parameters(text)] or [positions]


def _positions(text: Any) -> int | None:
    """What vLLM's model passes to ``get_rope`` as ``max_position``. A test lists the forms of all models."""
    kind, of_bert = getattr(text, "model_type", None), getattr(text, "rotary_kwargs", None)
    if isinstance(of_bert, dict) and isinstance(of_bert.get("max_position"), int):
        return int(of_bert["max_position"])
    own = getattr(text, OTHER_NAMES[kind], None) if kind in OTHER_NAMES else None
    found = own or getattr(text, "max_position_embeddings", None)
    if not isinstance(found, int):
        return None
    longer = getattr(text, "max_model_len", None) if kind == "minimax_m2" else None
    return max(found, longer) if isinstance(longer, int) else found


def rope_parameters(text: Any) -> list[dict[str, Any]]:
    """The parameters of each rotary embedding. Some models have one for each kind of layers."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [entry for entry in found.values() if isinstance(entry, dict)]
    return nested or ([found] if found else [])


def _rows(parameters: dict[str, Any], positions: int) -> int:
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    if kind in SCALED_FROM_ORIGINAL:
        positions = int(parameters.get("original_max_position_embeddings", positions) * factor)
    elif kind == "linear" or (kind == "dynamic" and compat.dynamic_tables_are_scaled()):
        positions = int(positions * factor)
    return positions * (IMAGE_POSITIONS if "mrope_section" in parameters else 1)


def extended(text: Any, parameters: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The configuration with which YaRN extends a rotary embedding to ``wanted`` positions.

    ``IMAGE_POSITIONS`` does not make the factor smaller: vLLM accepts requests of original x factor tokens, and a text
    of so many tokens has so many positions.
    """
    original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
    factor = float(math.ceil(wanted / original))
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_parameters": parameters | yarn, "max_position_embeddings": int(original * factor)}


def _where_vllm_looks(model: Any, overrides: dict[str, Any]) -> dict[str, Any] | None:
    """``overrides`` of the text model's configuration as --hf-overrides; None if it is somewhere unknown."""
    whole, text = model.hf_config, model.hf_text_config
    if text is whole:
        return overrides
    return {"text_config": overrides} if getattr(whole, "text_config", None) is text else None
