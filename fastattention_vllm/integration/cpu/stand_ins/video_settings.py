"""What transformers loads as a video processor where torchvision is missing: its settings, and no code.

Why: a processor of images and text has a video processor too, and every one of transformers' needs torchvision. Images
themselves need only Pillow. vLLM reads settings of videos at start even if requests may not have any.
Remove when: transformers loads such a processor without its video part.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.video_processing_utils import VideoProcessorMixin

from fastattention_vllm.integration.refusal import Refusal


class VideoSettings(VideoProcessorMixin):
    """The entries of the checkpoint's file, as attributes."""

    # What vLLM reads at start. These are transformers' defaults, for checkpoints that leave them out.
    size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}  # noqa: RUF012
    temporal_patch_size = 2

    def preprocess(self, videos: Any, **kwargs: Any) -> NoReturn:
        raise Refusal("videos are not supported on CPUs: their processors need torchvision; send images instead.")
