"""Two requests that end vLLM's engine, and all other requests with it, on CPUs.

A seeded one whose prompt takes several steps: vLLM samples a token after each chunk of a prompt, discards it, and
rewinds the request's random generator (``_bookkeeping_sync``: ``set_offset``). Torch's CPU generator cannot be rewound
and raises an error. Seen in 0.32.0; the code has been the same since 0.19.1.
Remove when: vLLM checks whether a generator can be rewound.

One with ``top_k`` alone beside speculation: in a step in which no request has draft tokens, vLLM's rejection sampler
asks for the largest ``top_k`` of no rows. On GPUs it sorts, or Triton's kernel returns at once. Seen in 0.32.0; the
code has been the same since 0.23.
Remove when: vLLM's ``apply_top_k_only`` takes 0 rows.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch


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


def let_steps_without_drafts_pass() -> None:
    """Let vLLM's sampling by ``top_k`` alone return where there is nothing to sample. Idempotent."""
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.apply_top_k_only
    if original.__module__ == __name__:
        return

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """``logits [rows, vocab]`` with -inf in all but the ``k [rows]`` largest of each row."""
        return original(logits, k) if len(logits) else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only
