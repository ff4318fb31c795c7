"""Engines of host_layers.py: how they are started, asked and closed.

Used by: host_layers_ways.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.tokenizer import token_id

# the variants are switched in the worker, which is then this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

NEEDLES = {"alpha": "7319", "beta": "2046", "gamma": "90", "delta": "5", "omega": "318"}
DEPTHS = [0.0, 0.1, 0.5, 0.9, 1.0]
SHAPES = {
    "8b": {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    | {"min_hidden_size": 4096, "min_intermediate_size": 14336},
    "small": {"num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_size": 128},
}
GIB = 1 << 30


def engine(path: Path, options: argparse.Namespace, backend: str, length: int, gib: float | None, **more: Any) -> Any:
    from vllm import LLM

    if options.speculate:
        drafts = {"method": "ngram", "num_speculative_tokens": options.speculate}
        lookup = {"prompt_lookup_max": max(3, options.lookup), "prompt_lookup_min": options.lookup}
        more |= {"speculative_config": drafts | lookup, "disable_log_stats": False}
    return LLM(
        model=str(path),
        attention_backend=backend,
        dtype="float16",
        max_model_len=length,
        max_num_batched_tokens=options.chunk,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.ranks,
        kv_cache_memory_bytes=None if gib is None else int(gib * GIB),
        gpu_memory_utilization=0.85 if gib is None else 0.5,  # with a given KV cache size, it is only a start-up check
        **more,
    )


def close(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()


def prompts_of(tokens: int, batch: int) -> list[Any]:
    return [make_haystack(tokens - 2, NEEDLES, depths=DEPTHS, seed=11 + number) for number in range(batch)]


def read(llm: Any, tokens: int, batch: int) -> tuple[float, int]:
    """Seconds for all prompts, and the number of needles found in them."""
    haystacks = prompts_of(tokens, batch)
    started = time.perf_counter()
    ask(llm, [list(haystack.token_ids) for haystack in haystacks], 1)
    seconds = time.perf_counter() - started
    found = 0
    for name, value in NEEDLES.items():
        question = [token_id(f" {name}"), token_id("=")]
        answers = ask(llm, [[*haystack.token_ids, *question] for haystack in haystacks], 1)
        found += sum(answer == [token_id(value)] for answer in answers)
    print(f"{tokens} tokens x {batch}: read in {seconds:.1f} s, {found} of {batch * len(NEEDLES)} needles", flush=True)
    return seconds, found


def decode_seconds(llm: Any, tokens: int, batch: int, options: argparse.Namespace) -> float:
    """Seconds of one token with the prompts in the cache: the difference of a long answer and a short one."""
    prompts = [list(haystack.token_ids) for haystack in prompts_of(tokens, batch)]
    ask(llm, prompts, 1)
    taken = []
    for count in (1, 1 + options.decode):
        started = time.perf_counter()
        ask(llm, prompts, count)
        taken.append(time.perf_counter() - started)
    return (taken[1] - taken[0]) / options.decode


def ask(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
