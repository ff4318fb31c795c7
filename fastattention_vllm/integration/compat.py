"""Every difference between vLLM versions, found by feature test, each with the versions it serves."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fastattention_vllm.integration.refusal import Refusal

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.33")
"""Tested range. Widened, never narrowed, and only together with the tests that prove it."""

BACKEND_NAME = "FASTATTENTION"
BACKEND_PATH = "fastattention_vllm.integration.backend.FastAttentionBackend"


def check_vllm_version() -> None:
    """Refuse a vLLM outside the tested range.

    Raises:
        Refusal: names the version found, the range, and the command that installs a fitting one.
    """
    installed = Version(metadata.version("vllm"))
    if not SUPPORTED_VLLM.contains(Version(installed.base_version), prereleases=True):
        raise Refusal(
            f"vLLM {installed} is installed, but this version of fastattention-vllm supports "
            f"vllm{SUPPORTED_VLLM}; install a supported one (`make serve` does) or uninstall fastattention-vllm."
        )


def ensure_backend_member() -> Any:
    """Make ``FASTATTENTION`` a member of vLLM's ``AttentionBackendEnum``; safe to call again and again.

    The member must survive pickling: ``vllm serve`` spawns its engine and worker processes, and Ray ships the config
    to actors; both unpickle the config *before* plugins are loaded there. A plain enum member pickles as a look-up by
    value, which fails in the fresh process, so the member carries a ``__reduce_ex__`` that registers it on arrival.
    """
    from vllm.v1.attention.backends import registry

    members: Any = registry.AttentionBackendEnum
    if BACKEND_NAME not in members.__members__:
        # vLLM >= 0.32 takes a new name.
        registry.register_backend(BACKEND_NAME, BACKEND_PATH)
    member = members[BACKEND_NAME]
    member.__reduce_ex__ = _reduce
    return member


def _reduce(protocol: int) -> tuple[Callable[[], Any], tuple[()]]:
    return ensure_backend_member, ()
