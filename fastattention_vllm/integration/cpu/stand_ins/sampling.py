"""Seeded sampling of prompts that take several steps.

Why: while a prompt is computed in chunks, vLLM samples a token after each chunk, discards it, and rewinds the request's
random generator (``_bookkeeping_sync``: ``set_offset``). Torch's CPU generator cannot be rewound and raises an error,
which ends the engine and all requests. Seen in 0.32.0; the code has been the same since 0.19.1.
Remove when: vLLM checks whether a generator can be rewound.
"""

from __future__ import annotations

from typing import Any

import numpy


def spare_generators_of_unfinished_prompts() -> None:
    """Hide the generators of requests whose token will be discarded from the sampling step. Idempotent."""
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
