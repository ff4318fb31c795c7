"""The two entry points through which vLLM finds this package.

Both run in every process that vLLM starts (API server, engine core, workers, model inspection), in some more than once.
"""

from __future__ import annotations

import contextlib
import glob
import os
from importlib.metadata import entry_points

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.ascend import platform as ascend
from fastattention_vllm.integration.cpu import queue_waiting
from fastattention_vllm.integration.cpu.stand_ins import vision
from fastattention_vllm.integration.refusal import Refusal, install_excepthook
from fastattention_vllm.integration.serving import (
    engine_end,
    nan_logits,
    ray_cluster,
    server_end,
    server_start,
    shared_names,
)

NPU_DEVICES = ("/dev/davinci[0-9]*",)
PLATFORM_GROUP = "vllm.platform_plugins"
CPU_PLATFORM = "fastattention_vllm.integration.cpu.platform.FastAttentionCpuPlatform"


def register() -> None:
    """``vllm.general_plugins``: register the attention backend.

    Raises:
        Refusal: vLLM is outside the tested range, or VLLM_TARGET_DEVICE=cpu bypasses this plugin's platform.
    """
    install_excepthook()
    compat.check_vllm_version()
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        # With this setting, vLLM >= 0.28 skips platform plugins, and its own CPU platform uses CPU_ATTN whatever
        # --attention-backend says: a silent fallback to kernels that a pure-Python vLLM does not include.
        raise Refusal(
            "VLLM_TARGET_DEVICE=cpu is set, so vLLM ignores platform plugins and --attention-backend fastattention; "
            "unset VLLM_TARGET_DEVICE (only the installation of vLLM needs it), or set VLLM_PLUGINS='' to run a vLLM "
            "with its own CPU kernels and without fastattention."
        )
    compat.ensure_backend_member()
    if compat.backend_path() == compat.BACKENDS["cuda"]:
        from fastattention_vllm.integration.cuda import start

        start.install()
        ray_cluster.install()
    elif platform() == CPU_PLATFORM:
        queue_waiting.install()
    ascend.install()
    vision.spare_torchvision()
    nan_logits.install()
    server_end.install()
    engine_end.install()
    server_start.install()
    shared_names.install()


def platform() -> str | None:
    """``vllm.platform_plugins``: the CPU platform, only where there is no accelerator."""
    return None if has_accelerator() else CPU_PLATFORM


def has_accelerator() -> bool:
    """True if there is an NPU device, or an accelerator that vLLM or another platform plugin detects.

    vLLM fails at start if two platform plugins respond, so this one leaves the machine to the other one. It asks vLLM's
    built-in platforms, because a plugin has priority over them. Device nodes are not a reliable sign: WSL has none for
    its GPU, and some laptops have one for a GPU that vLLM cannot use.
    """
    if any(glob.glob(pattern) for pattern in NPU_DEVICES):
        return True
    from vllm import envs
    from vllm.platforms import builtin_platform_plugins

    for name, detect in builtin_platform_plugins.items():
        # Like vLLM, treat a failed probe (no driver, no library) as "not found".
        with contextlib.suppress(Exception):
            if name != "cpu" and detect() is not None:
                return True
    allowed = envs.VLLM_PLUGINS  # None allows all
    for entry in entry_points(group=PLATFORM_GROUP):
        if entry.value.partition(":")[0] == __name__ or (allowed is not None and entry.name not in allowed):
            continue
        with contextlib.suppress(Exception):
            if entry.load()() is not None:
                return True
    return False
