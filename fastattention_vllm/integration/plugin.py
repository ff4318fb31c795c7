"""The two entry points through which vLLM finds this package.

Both run in every process vLLM starts (API server, engine core, workers, model inspection), more than once in some.
"""

from __future__ import annotations

import glob
import os

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal, install_excepthook

ACCELERATOR_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/davinci[0-9]*", "/dev/accel/accel*")
CPU_PLATFORM = "fastattention_vllm.integration.platform_cpu.FastAttentionCpuPlatform"


def register() -> None:
    """``vllm.general_plugins``: register the attention backend.

    Raises:
        Refusal: vLLM is outside the tested range, or VLLM_TARGET_DEVICE=cpu bypasses this plugin's platform.
    """
    install_excepthook()
    compat.check_vllm_version()
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        # vLLM >= 0.28 then skips platform plugins, and its own CPU platform answers every --attention-backend with
        # CPU_ATTN: a silent fallback to kernels that a pure-Python vLLM does not even have.
        raise Refusal(
            "VLLM_TARGET_DEVICE=cpu is set, which makes vLLM ignore platform plugins and "
            "--attention-backend fastattention with them; unset VLLM_TARGET_DEVICE (it is needed at install time "
            "only), or set VLLM_PLUGINS='' to run vLLM without fastattention."
        )
    compat.ensure_backend_member()


def platform() -> str | None:
    """``vllm.platform_plugins``: the CPU platform, only where there is no accelerator."""
    if any(glob.glob(pattern) for pattern in ACCELERATOR_DEVICES):
        return None
    return CPU_PLATFORM
