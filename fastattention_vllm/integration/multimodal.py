"""Which models with images run on CPUs, and with which inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IMAGE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Model types whose answers to images were compared with Hugging Face's. Their text attention is causal."""
TEXT_OF_IMAGE_MODELS = ("gemma3",)
"""Model types that were compared with Hugging Face on text alone. Their images need attention in both directions."""
TEXT_ONLY = """--limit-mm-per-prompt '{"image": 0}'"""


def two_way_images(config: VllmConfig) -> object:
    """The model's type if the tokens of an image attend to each other in both directions, and images may come."""
    model: Any = config.model_config
    return model.is_multimodal_model and model.is_mm_prefix_lm and model.hf_config.model_type


def untested_model(config: VllmConfig) -> object:
    """The model's type if its encoder is untested, and its inputs may need it."""
    model: Any = config.model_config
    if not model.is_multimodal_model or model.hf_config.model_type in IMAGE_MODELS:
        return False
    kind = model.hf_config.model_type
    return kind if kind not in TEXT_OF_IMAGE_MODELS or takes_images(config) else False


def takes_images(config: VllmConfig) -> bool:
    return config.model_config.is_multimodal_model and _limit(config, "image") > 0


def other_inputs(config: VllmConfig) -> object:
    """The inputs that the user expects beside images."""
    if not config.model_config.is_multimodal_model:
        return False
    asked: Any = config.model_config.multimodal_config.limit_per_prompt
    named = [f"{kind}: {asked[kind].count}" for kind in sorted(asked) if kind != "image" and asked[kind].count]
    return ", ".join(named)


def encoder_options(config: VllmConfig) -> object:
    """The option that changes how the encoder computes."""
    if not config.model_config.is_multimodal_model:
        return False
    asked: Any = config.model_config.multimodal_config
    backend = asked.mm_encoder_attn_backend
    options = {
        "--mm-encoder-attn-backend": backend is not None and backend.name != "TORCH_SDPA",
        "--mm-encoder-attn-dtype": getattr(asked, "mm_encoder_attn_dtype", None),
        "--mm-encoder-only": getattr(asked, "mm_encoder_only", False),
        "--mm-encoder-tp-mode": asked.mm_encoder_tp_mode != "weights",
    }
    return next((name for name, value in options.items() if value), False)


def allow_images_only(config: VllmConfig) -> None:
    """Set the limit of videos to 0, so that a request with a video is refused by vLLM, with the limit in its message.

    Without a limit, vLLM would accept them, and reserve memory for the longest one.
    """
    from vllm.config.multimodal import VideoDummyOptions
    from vllm.logger import init_logger

    if not config.model_config.is_multimodal_model:
        return
    limits: Any = config.model_config.multimodal_config.limit_per_prompt
    if "video" not in limits:
        limits["video"] = VideoDummyOptions(count=0)
    if takes_images(config):
        init_logger("vllm.fastattention").info_once(
            "Images: vLLM's encoder computes them with torch's attention. Videos are off, because they are untested."
        )


def _limit(config: VllmConfig, kind: str) -> int:
    count: int = config.model_config.multimodal_config.get_limit_per_prompt(kind)
    return count
