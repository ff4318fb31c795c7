"""Random inputs for an engine: a model, options that work together, and requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.integration.drawn_models import MIXED, Model, draw_model, draw_several_windows
from tests.integration.engine import NGRAM
from tests.reference_models import random_prompts

MAX_MODEL_LEN = 384
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "bfloat16")


@dataclass(frozen=True)
class Asked:
    """A request."""

    new: int
    """Number of its unshared tokens, drawn with ``seed``."""
    seed: int
    times: int
    """How often the tokens are repeated, so that n-gram speculation has something to look up."""
    like: int
    """An earlier request with the same prefix."""
    shared: int
    """Number of tokens of that prefix."""
    answer: int
    """Number of tokens of the answer."""
    logprobs: int
    prompt_logprobs: int | None
    at_step: int
    """The engine's step at which the request arrives."""
    dropped_after: int | None
    """Number of steps after which the client disconnects; None if it stays."""
    priority: int


@dataclass(frozen=True)
class Problem:
    """Its printed form recreates it and can be passed to :func:`tests.integration.test_differential.solve`."""

    model: Model
    host_layers: tuple[int, ...]
    settings: dict[str, Any]
    """Options of vLLM."""
    ours: dict[str, Any]
    """Options of the plugin."""
    staging_blocks: int | None
    """Blocks of context per staging buffer; None for the default."""
    requests: tuple[Asked, ...]

    def prompts(self) -> list[list[int]]:
        found: list[list[int]] = []
        for asked in self.requests:
            begin = found[asked.like][: asked.shared] if asked.shared else []
            found.append(begin + random_prompts([asked.new], asked.seed)[0] * asked.times)
        return found


def draw_problem(seed: int) -> Problem:
    numbers = random.Random(seed)
    model = draw_model(numbers)
    kinds = random.Random(f"windows of {seed}")  # apart from the other draws, which stay as they are
    if kinds.random() < 0.15:
        model = draw_several_windows(kinds)
    # vLLM's gpt-oss does not repeat a KV head on several ranks: with one KV head it divides by zero.
    splits = not any(heads % 2 for heads in model.heads) and (model.kind != "gpt-oss" or model.kv_heads % 2 == 0)
    ranks = 2 if numbers.random() < 0.15 and splits else 1
    cache = numbers.choice(QUANTISED) if ranks == 1 and numbers.random() < 0.15 else "auto"
    host_layers = draw_host_layers(numbers, model, some=cache != "auto")
    if not host_layers:
        cache = "auto"
    settings: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": numbers.choice([8, 16, 16, 24, 32, 128]),
        "enable_prefix_caching": numbers.random() < 0.5,
        "max_num_seqs": numbers.choice([1, 2, 4, 8]),
        "max_num_batched_tokens": numbers.choice([16, 50, 64, 64, 130, 512]),
        "kv_cache_dtype": cache,
        "enforce_eager": ranks == 2 or numbers.random() < 0.95,
        "disable_hybrid_kv_cache_manager": model.kind in MIXED and numbers.random() < 0.5,
        "scheduling_policy": numbers.choice(["fcfs", "fcfs", "priority"]),
        "long_prefill_token_threshold": numbers.choice([0, 0, 0, 24]),
    }
    if settings["disable_hybrid_kv_cache_manager"] and host_layers and kinds.random() < 0.5:
        host_layers = kinds.choice(model.possible_host_layers(one_table=True))
    speculates = numbers.random() < 0.2
    if speculates:
        settings["speculative_config"] = NGRAM
    elif cache == "auto":
        settings["async_scheduling"] = numbers.choice([None, True, False])
    ours: dict[str, Any] = {"stream_fraction": numbers.choice(["auto", 0.0, 0.3, 0.6, 1.0]), "cpu_threads": 1}
    if ranks == 2:
        settings |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        ours |= draw_tiling(numbers, full_form=model.kind != "bloom" and len(set(model.heads)) == 1)
    else:
        ours["cpu_threads"] = numbers.choice([1, 2])
    crowded = cache == "auto" and numbers.random() < 0.2
    if crowded:
        settings["block_size"] = numbers.choice([8, 16])  # requests soon need another block
        settings["num_gpu_blocks_override"] = fewest_blocks(model, settings) + numbers.randint(0, 3)
        settings["max_num_seqs"] = 8 if settings["max_num_batched_tokens"] > 16 else 4
    fast = model.kind == "gemma3n" and not host_layers and cache == "auto" and numbers.random() < 0.5
    if fast:
        settings["kv_sharing_fast_prefill"] = True
    requests = draw_requests(numbers, crowded=crowded, longer_answers=speculates, of_prompts=not fast)
    staging = numbers.choice([1, 3, 6, None]) if ranks == 1 else None
    return Problem(model, host_layers, settings, ours, staging, requests)


def draw_host_layers(numbers: random.Random, model: Model, some: bool) -> tuple[int, ...]:
    """Draw no host layers, some, or as many as possible."""
    possible = model.possible_host_layers()
    how_many = numbers.choice(["none", "some", "some", "most", "most"])
    if not possible or (how_many == "none" and not some):
        return ()
    if how_many == "most":
        possible = [host for host in possible if len(host) == len(possible[-1])]
    return numbers.choice(possible)


def draw_tiling(numbers: random.Random, *, full_form: bool) -> dict[str, Any]:
    """``full_form``: the model meets its requirements, output projections of one shape named o_proj."""
    if numbers.random() < 0.3:
        return {"tiling_all_reduce": "off"}
    return {
        "tiling_all_reduce": numbers.randint(2, 5),
        "tiling_min_tokens": numbers.choice([2, 8, 40]),
        "tiling_full_form": numbers.random() < 0.5 and full_form,
    }


def fewest_blocks(model: Model, settings: dict[str, Any]) -> int:
    """The number of blocks that one request of the maximum length needs, whatever is on the host."""
    size = model.kv_size(settings["block_size"], 2 * settings["max_num_batched_tokens"])
    return -(-size.of_request(settings["max_model_len"]) // size.layers_per_group())


def draw_requests(
    numbers: random.Random, *, crowded: bool, longer_answers: bool, of_prompts: bool
) -> tuple[Asked, ...]:
    """``crowded``: many requests that all fit at first, but run out of blocks as their answers grow."""
    requests: list[Asked] = []
    lengths: list[int] = []
    for number in range(numbers.randint(6, 8) if crowded else numbers.randint(2, 7)):
        like, shared = 0, 0
        if requests and numbers.random() < 0.5:
            like = numbers.randrange(number)
            shared = min(numbers.choice([lengths[like], 16, 48, 130, 200]), lengths[like])
        times = numbers.choice([1, 1, 4])
        new = numbers.choice([1, 3, 15] if crowded else [1, 3, 15, 16, 17, 40, 65, 130, 300])
        new = min(new, (300 - shared) // times)
        lengths.append(shared + new * times)
        requests.append(
            Asked(
                new=new,
                seed=numbers.randrange(1000),
                times=times,
                like=like,
                shared=shared,
                answer=numbers.randint(*((60, 90) if crowded else (20, 50) if longer_answers else (1, 12))),
                logprobs=numbers.choice([3, 5]),
                prompt_logprobs=numbers.choice([0, 2]) if of_prompts and numbers.random() < 0.2 else None,
                at_step=numbers.choice([0, 0, 0, 1] if crowded else [0, 0, 0, 1, 3, 9]),
                dropped_after=numbers.choice([1, 2, 5]) if number and numbers.random() < 0.1 else None,
                priority=numbers.randint(0, 2),
            )
        )
    return tuple(requests)
