"""Requests for ``prompt_logprobs`` are refused by engines with LoRA adapters, and by no others of the process.

vLLM's layer for logits would get rows that its adapter indices do not cover, which ends the engine. vLLM's hook for
such refusals, ``Platform.validate_request``, is not told which engine a request is for.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from fastattention_vllm.integration.refusal import Refusal


def refuse_with_adapters() -> None:
    """From now on, every engine of this process checks its own configuration."""
    from vllm.v1.engine.input_processor import InputProcessor  # not at the top: it needs the platform

    process = InputProcessor.process_inputs
    if hasattr(process, "_fastattention"):
        return

    @wraps(process)
    def process_inputs(self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        asked = getattr(params, "prompt_logprobs", None)
        if asked is not None and self.vllm_config.lora_config is not None:
            # Not at the top: only the API server counts.
            from fastattention_vllm.integration.serving.metrics import refused_requests

            refused_requests.inc()
            raise Refusal(
                f"prompt_logprobs={asked} is not supported by a server with LoRA adapters; send the request without "
                "prompt_logprobs, or start the server without --enable-lora."
            )
        return process(self, request_id, prompt, params, *args, **kwargs)

    process_inputs._fastattention = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs
