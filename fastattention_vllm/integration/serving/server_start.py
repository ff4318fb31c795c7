"""Adds this package's metrics and routes to vLLM's server when it starts.

Endpoint plugins of vLLM (0.26 and newer) would need VLLM_PLUGINS to name them, and ``--middleware`` is the user's. The
application is complete when uvicorn starts it, and serves nothing yet: in every version, it can be extended there.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.serving.once_imported import once_imported
from fastattention_vllm.integration.serving.worker_stats import add_method

logger = init_logger("vllm.fastattention")


def install() -> None:
    """Change the modules in this process as soon as it imports them. Repeated calls are safe."""
    once_imported("vllm.v1.worker.worker_base", add_method)
    once_imported("uvicorn.server", attach_at_start)


def attach_at_start(module: Any) -> None:
    """Extend the application of vLLM's servers. Other servers are not changed."""
    original = module.Server.startup
    if hasattr(original, "_fastattention"):
        return

    @functools.wraps(original)
    async def startup(self: Any, *args: Any, **kwargs: Any) -> None:
        if computes_attention(self.config.app):
            add_routes(self.config)
        await original(self, *args, **kwargs)

    startup._fastattention = True  # type: ignore[attr-defined]
    module.Server.startup = startup


def add_routes(config: Any) -> None:
    """Serve the status too. A vLLM that lacks a name of this needs no status to answer requests."""
    try:
        from fastattention_vllm.integration.serving.page import PAGE
        from fastattention_vllm.integration.serving.routes import STATUS, attach

        # The application has built its middleware by now, so it is wrapped from outside.
        config.loaded_app = attach(config.app, config.loaded_app)
    except (ImportError, AttributeError) as error:
        logger.warning("This vLLM lacks a name that the status page and the metrics need: %s. There are none.", error)
        return
    logger.info("Status of this backend: %s (page), %s (JSON), /metrics (fastattention:...).", PAGE, STATUS)


def computes_attention(app: Any) -> bool:
    """Whether ``app`` is vLLM's, and its engine computes attention with this backend."""
    engine_client = getattr(getattr(app, "state", None), "engine_client", None)
    config = getattr(engine_client, "vllm_config", None)
    return config is not None and compat.uses_this_backend(config)
