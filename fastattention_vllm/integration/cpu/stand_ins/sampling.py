"""Seeded sampling of prompts that take several steps.

Why: while a prompt is computed in chunks, vLLM samples a token after each chunk and throws it away, then winds the
request's random generator back (``_bookkeeping_sync``: ``set_offset``). Torch's CPU generator cannot be wound back and
raises, which ends the engine and every request with it. Seen in 0.32.0, and the code is the same since 0.19.1.
Remove when: vLLM asks before it winds.
"""

from __future__ import annotations

from typing import Any

import numpy


def spare_generators_of_unfinished_prompts() -> None:
    """Hide the generators of requests whose token will be thrown away from the step that samples it. Idempotent."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.sample_tokens
    if getattr(original, "__module__", None) == __name__:
        return

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        unfinished = numpy.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        spared = {request: generators.pop(request) for request in unfinished if request in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(spared)

    CPUModelRunner.sample_tokens = sample_tokens
