"""``--attention-backend fastattention`` on Ascend NPUs: replaces the class that vllm-ascend would choose.

Why: vllm-ascend 0.23 chooses by the model alone and honours only FLASH_ATTN, so it silently replaces any other backend.
Its attention module also registers itself as CUSTOM when it is imported, which does not affect this package's own enum
member. Remove this when vllm-ascend uses the class that a backend was registered with.
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
from fastattention_vllm.integration.checkpoint import reload
from fastattention_vllm.integration.checkpoint.positions import check_positions
from fastattention_vllm.integration.checkpoint.weights import check_weights
from fastattention_vllm.integration.refusal import Refusal
from fastattention_vllm.integration.serving.once_imported import once_imported

logger = init_logger("vllm.fastattention")

SUPPORTED_VLLM_ASCEND = SpecifierSet(">=0.23,<0.24")
BACKEND_PATH = "fastattention_vllm.integration.ascend.backend.FastAttentionAscendBackend"
DENSE_PATH = "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
"""vllm-ascend's choice for dense attention on the 910. All of its other choices are left unchanged."""


def install() -> None:
    """Make vllm-ascend's platform honour the backend option. No effect on other platforms; repeated calls are safe."""
    if importlib.util.find_spec("vllm_ascend") is None:
        return
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        return
    from vllm.v1.attention import selector
    from vllm_ascend.platform import NPUPlatform

    once_imported("vllm_ascend.worker.worker", lambda module: reload.check_first(module.NPUWorker))
    check_model(NPUPlatform)
    original = NPUPlatform.get_attn_backend_cls
    if getattr(original, "_fastattention", False):
        return
    NPUPlatform.get_attn_backend_cls = classmethod(_honouring(original.__func__))
    # vLLM caches choices that were made before this.
    selector._cached_get_attn_backend.cache_clear()


def check_model(platform: Any) -> None:
    """Use the call in which vLLM's platforms set defaults to check a model's folder before any process starts."""
    before = platform.apply_config_platform_defaults
    if hasattr(before, "_fastattention"):
        return

    def apply_config_platform_defaults(cls: Any, vllm_config: Any) -> None:
        before(vllm_config)
        if getattr(vllm_config.attention_config.backend, "name", None) != compat.BACKEND_NAME:
            return
        model = vllm_config.model_config
        if model is not None and not model.use_mla:  # vllm-ascend has tables of its own for latent attention
            check_positions(vllm_config)
        check_weights(vllm_config)

    apply_config_platform_defaults._fastattention = True  # type: ignore[attr-defined]
    platform.apply_config_platform_defaults = classmethod(apply_config_platform_defaults)


def _honouring(choose: Any) -> Any:
    """vllm-ascend's choice, except for dense attention if this backend is selected."""

    @functools.wraps(choose)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        chosen: str = choose(cls, selected_backend, *args, **kwargs)
        if getattr(selected_backend, "name", None) != compat.BACKEND_NAME:
            return chosen
        check_version()
        if chosen == DENSE_PATH:
            check_features()
        # The runner calls this before it creates the model's layers, and after vllm-ascend has patched vLLM.
        from fastattention_vllm.integration.ascend import row_parallel as ascend_row_parallel

        ascend_row_parallel.install()
        if chosen != DENSE_PATH:
            logger.info_once("vllm-ascend's own backend runs these layers: %s is not dense attention on a 910.", chosen)
            return chosen
        return BACKEND_PATH

    get_attn_backend_cls._fastattention = True  # type: ignore[attr-defined]
    return get_attn_backend_cls


def check_version() -> None:
    """Refuse an untested version of vllm-ascend.

    Raises:
        Refusal: names the installed version and the range.
    """
    installed = Version(metadata.version("vllm-ascend"))
    if not SUPPORTED_VLLM_ASCEND.contains(Version(installed.base_version), prereleases=True):
        raise Refusal(
            f"vllm-ascend {installed} is installed, but fastattention supports vllm-ascend{SUPPORTED_VLLM_ASCEND}; "
            "install a supported version together with the vLLM of the same version, or remove --attention-backend "
            "fastattention."
        )


def check_features() -> None:
    """Refuse what was never tested with this backend on NPUs.

    Raises:
        Refusal: the feature, the reason, and the flag to change.
    """
    from vllm.config import get_current_vllm_config_or_none

    from fastattention_vllm.integration import support

    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is not None:
        support.check_supported(vllm_config, support.UNTESTED_ON_NPUS)
