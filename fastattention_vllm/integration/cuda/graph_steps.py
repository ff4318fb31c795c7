"""Which steps of vLLM's model runners for NVIDIA GPUs are one CUDA graph, as host layers decide."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any


def choose_whole_steps(find: Callable[[Any], Any]) -> None:
    """Let host layers choose between one CUDA graph and pieces for each step of vLLM's model runners for NVIDIA GPUs.

    All versions: vLLM chooses by the number of tokens, not by the length of contexts. The first model runner asks a
    dispatcher which modes are excluded, the second one passes the tokens per request if all have the same, and whole
    graphs need that. Not every step goes through vLLM's worker: Ray's compiled graphs, as in 0.19, call the runner.
    Remove it when a backend can exclude whole graphs for a step.
    """
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    if hasattr(CudagraphDispatcher, "_fastattention_step"):
        return
    step = CudagraphDispatcher._fastattention_step = types.SimpleNamespace(whole=True, runner=None, has_grammars=False)
    first, second = CudagraphDispatcher.dispatch, CudaGraphManager.dispatch

    def noting_the_step(execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def execute_model(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
            if named.get("dummy_run"):  # the second runner's captures and profiling
                return execute(self, scheduler_output, *more, **named)
            host_layers = find(self.vllm_config)
            step.runner = weakref.ref(self)
            step.has_grammars = getattr(scheduler_output, "has_structured_output_requests", False)
            step.whole = host_layers is None or host_layers.allows_whole_step(tokens_in_cache(scheduler_output))
            try:
                return execute(self, scheduler_output, *more, **named)
            finally:
                step.whole = True

        return execute_model

    @functools.wraps(first)
    def dispatch(self: Any, *arguments: Any, **named: Any) -> Any:
        if not step.whole:
            from vllm.config import CUDAGraphMode

            given = inspect.signature(first).bind(self, *arguments, **named).arguments
            named["invalid_modes"] = {CUDAGraphMode.FULL} | set(given.get("invalid_modes") or ())
        return first(self, *arguments, **named)

    @functools.wraps(second)
    def dispatch_second(self: Any, *arguments: Any, **named: Any) -> Any:
        if step.whole:
            return second(self, *arguments, **named)
        given = inspect.signature(second).bind(self, *arguments, **named)
        given.arguments["uniform_token_count"] = None
        return second(*given.args, **given.kwargs)

    for runner in gpu_model_runners():
        runner.execute_model = noting_the_step(runner.execute_model)
    CudagraphDispatcher.dispatch = dispatch
    CudaGraphManager.dispatch = dispatch_second


def may_be_whole_step() -> bool:
    """Whether :func:`choose_whole_steps` allows one CUDA graph for the step that is being prepared."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    step = getattr(CudagraphDispatcher, "_fastattention_step", None)
    return step is None or bool(step.whole)


def fill_ngram_drafts(find: Callable[[Any], Any]) -> None:
    """Let host layers ask n-gram drafting for as many tokens as graphs of whole steps hold, if it finds fewer.

    All versions: these graphs are captured for 1 + num_speculative_tokens tokens of each request, and all other decode
    steps run in pieces. A request's last token is repeated; verification decides as with any other draft. Not with
    grammars, which cut most of these drafts, and not with seeds, of which vLLM takes more random numbers for a draft.
    The drafter knows neither these nor the configuration, so :func:`choose_whole_steps` notes the runner of each step.
    Remove it when vLLM captures steps with fewer drafts, too.
    """
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose = NgramProposer.batch_propose
    if hasattr(propose, "_fastattention"):
        return

    @functools.wraps(propose)
    def batch_propose(
        self: Any, num_requests: int, drafting: list[int], lengths: Any, tokens: Any, *more: int
    ) -> list[list[int]]:
        drafts: list[list[int]] = propose(self, num_requests, drafting, lengths, tokens, *more)
        (most,) = more or (self.k,)  # <= 0.23 drafts num_speculative_tokens in each step
        step = CudagraphDispatcher._fastattention_step
        runner = step.runner() if step.runner else None
        # A request that does not draft, such as one whose prompt is not finished, keeps the step from being one graph.
        if not 0 < num_requests == len(drafting) or runner is None or step.has_grammars:
            return drafts
        contexts = lengths[drafting]
        host_layers = find(runner.vllm_config)
        if (
            host_layers
            and host_layers.fills_drafts(int(contexts.sum()), num_requests * (1 + most))
            and int(contexts.max()) + most < self.max_model_len
            and not runner.input_batch.generators
        ):
            for request in drafting:
                drafts[request] += [int(tokens[request, lengths[request] - 1])] * (most - len(drafts[request]))
        return drafts

    batch_propose._fastattention = True  # type: ignore[attr-defined]
    NgramProposer.batch_propose = batch_propose


def gpu_model_runners() -> tuple[type[Any], type[Any]]:
    """vLLM's first and second model runner for NVIDIA GPUs."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner, SecondRunner


def tokens_in_cache(scheduler_output: Any) -> int:
    """Tokens that a step's requests have in the cache, all requests together."""
    new = [request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs]
    contexts: list[int] = [*new, *scheduler_output.scheduled_cached_reqs.num_computed_tokens]
    return sum(contexts)
