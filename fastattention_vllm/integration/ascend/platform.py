"""``--attention-backend fastattention`` on Ascend NPUs: our classes where vllm-ascend chooses its own.

Why: vllm-ascend 0.23 chooses by the model alone and reads of the user's choice only FLASH_ATTN, so any other backend is
replaced in silence. Its attention module also registers itself under CUSTOM whenever it is imported; this package has a
member of its own and is not touched by that. Until vllm-ascend takes the class that a backend was registered with.
"""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm.logger import init_logger

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal

logger = init_logger("vllm.fastattention")

SUPPORTED_VLLM_ASCEND = SpecifierSet(">=0.23,<0.24")
BACKEND_PATH = "fastattention_vllm.integration.ascend.backend.FastAttentionAscendBackend"
DENSE_PATH = "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
"""What vllm-ascend answers for dense attention on the 910; everything else it answers is left to it."""


def install() -> None:
    """Let vllm-ascend's platform honour the choice. Does nothing on other platforms; safe to call again and again."""
    if importlib.util.find_spec("vllm_ascend") is None:
        return
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        return
    from vllm.v1.attention import selector
    from vllm_ascend.platform import NPUPlatform

    original = NPUPlatform.get_attn_backend_cls
    if getattr(original, "_fastattention", False):
        return
    NPUPlatform.get_attn_backend_cls = classmethod(_honouring(original.__func__))
    # A choice made before this would be remembered.
    selector._cached_get_attn_backend.cache_clear()


def _honouring(choose: Any) -> Any:
    """vllm-ascend's choice, but for dense attention where this backend is asked for."""

    @functools.wraps(choose)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        chosen: str = choose(cls, selected_backend, *args, **kwargs)
        if getattr(selected_backend, "name", None) != compat.BACKEND_NAME:
            return chosen
        check_version()
        # The runner asks before it makes the model's layers, and after vllm-ascend's own changes to vLLM.
        from fastattention_vllm.integration.ascend import row_parallel as ascend_row_parallel

        ascend_row_parallel.install()
        if chosen != DENSE_PATH:
            logger.info_once("These layers stay with vllm-ascend: %s is not dense attention on a 910.", chosen)
            return chosen
        logger.info_once("Attention by torch_npu's fused operator, its 2048 x 2048 mask for every length.")
        return BACKEND_PATH

    get_attn_backend_cls._fastattention = True  # type: ignore[attr-defined]
    return get_attn_backend_cls


def check_version() -> None:
    """Refuse a vllm-ascend that was not tested.

    Raises:
        Refusal: names the version found and the range.
    """
    installed = Version(metadata.version("vllm-ascend"))
    if not SUPPORTED_VLLM_ASCEND.contains(Version(installed.base_version), prereleases=True):
        raise Refusal(
            f"vllm-ascend {installed} is installed, but fastattention supports vllm-ascend{SUPPORTED_VLLM_ASCEND}; "
            "install a supported one with the vLLM of the same number, or remove --attention-backend fastattention."
        )
