"""Engines with random models, options and requests give the answers of Hugging Face transformers.

Each answer is checked token by token: the reference computes its log-probabilities after the tokens that the engine
chose, so the comparison continues after two equally likely tokens. An engine whose KV cache is rounded (fp8, bf16) is
compared with one that runs the same steps without host layers. A number half-way between two values of the cache can
still be rounded up by one program and down by the other. How far this moves the log-probabilities is computed for each
answer (:func:`moved_by_rounding`), and allowed.

``FASTATTENTION_DRAWS=200`` draws that many problems; ``HYPOTHESIS_PROFILE=search`` draws new ones every time. A failure
prints the problem, and ``solve(Problem(...), path)`` runs it again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st
from vllm import LLM, SamplingParams

from fastattention_vllm.integration.host_layers import layers as host_layers
from fastattention_vllm.placement import host_attention, prefetch
from tests.integration.drawn_models import Forced
from tests.integration.drawn_problems import Asked, Problem, draw_problem
from tests.integration.engine import LOGPROB_TOLERANCE, counter, engine
from tests.reference_models import Rounding

DRAWS = int(os.environ.get("FASTATTENTION_DRAWS", "15"))
CACHES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NOISE = 3e-6
"""Differences of keys and values between two programs in fp32, relative to the root mean square of a head's vector."""
TIED = 2 * LOGPROB_TOLERANCE
"""Log-probabilities that differ by less are considered equal."""


def run(llm: LLM, requests: Sequence[Asked], prompts: Sequence[list[int]]) -> dict[int, Any]:
    """Requests arrive and leave at their steps. Returns what has finished, by number."""
    comes = {number: asked.at_step for number, asked in enumerate(requests)}
    goes = {n: asked.at_step + asked.dropped_after for n, asked in enumerate(requests) if asked.dropped_after}
    outputs, step = {}, 0
    while comes or llm.llm_engine.has_unfinished_requests():
        for number in [number for number, at in comes.items() if at <= step]:
            del comes[number]
            asked = requests[number]
            params = SamplingParams(
                temperature=0,
                max_tokens=asked.answer,
                logprobs=asked.logprobs,
                prompt_logprobs=asked.prompt_logprobs,
                ignore_eos=True,
                detokenize=False,
            )
            prompt: Any = {"prompt_token_ids": prompts[number]}
            llm.llm_engine.add_request(str(number), prompt, params, priority=asked.priority)
        llm.llm_engine.abort_request([str(number) for number, at in goes.items() if at == step])
        if llm.llm_engine.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in llm.llm_engine.step() if output.finished}
        step += 1
        assert step < 5000, "the engine makes no progress"
    return outputs


def answers(problem: Problem, path: Path, on_host: Sequence[int], seen: Counter[str]) -> dict[int, Any]:
    section = problem.ours | {"host_kv_layers": list(on_host)}
    more = {"additional_config": {"fastattention": section}}
    with pytest.MonkeyPatch.context() as patch:
        if problem.staging_blocks:
            size = problem.model
            block = 2 * problem.settings["block_size"] * size.kv_heads * size.head_size * 4
            patch.setattr(prefetch, "STAGING_BYTES", problem.staging_blocks * block)
            patch.setattr(host_attention, "MIN_STREAMED_BYTES", 1)
        with engine(path, **problem.settings, **more) as llm:
            layers = host_layers.find(llm.llm_engine.vllm_config)
            if "tensor_parallel_size" not in problem.settings:  # otherwise the caches are in other processes
                assert (layers.placement.host if layers else ()) == tuple(on_host)
            outputs = run(llm, problem.requests, problem.prompts())
            seen["preempted"] += counter(llm, "vllm:num_preemptions") > 0
            seen["accepted drafts"] += counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0
            seen["cached prefixes"] += counter(llm, "vllm:prefix_cache_hits") > 0
    return outputs


def follow(output: Any, asked: Asked, forced: Forced) -> tuple[int, int]:
    """Compare all reported tokens.

    Returns their number, and how many of them the reference ranks below another token.
    """
    completion, prompt = output.outputs[0], list(output.prompt_token_ids)
    tokens = list(completion.token_ids)
    assert len(tokens) == len(completion.logprobs) == asked.answer
    expected = forced.logprobs(prompt + tokens[:-1])
    said = list(zip(expected[len(prompt) - 1 :], tokens, completion.logprobs, strict=True))
    ties = 0
    for row, token, logprobs in said:
        best = float(row.max())
        assert float(row[token]) > best - TIED, f"token {token}, {best - float(row[token]):.3g} below the best"
        assert len(logprobs) >= asked.logprobs
        ties += int(row.argmax()) != token
    if asked.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == len(prompt)
        said += list(zip(expected, prompt[1:], output.prompt_logprobs[1:], strict=False))
        assert len(said) == asked.answer + len(prompt) - 1
    for row, token, logprobs in said:
        assert token in logprobs
        for other, logprob in logprobs.items():
            worst.append(abs(logprob.logprob - float(row[other])))
            assert abs(logprob.logprob - float(row[other])) < LOGPROB_TOLERANCE
    return len(tokens), ties


worst = [0.0]


def moved_by_rounding(forced: Forced, text: Sequence[int], dtype: torch.dtype) -> float:
    """How far log-probabilities move if keys and values differ by fp32's noise before they are rounded to ``dtype``."""

    def noisy(seed: int) -> Rounding:
        generator = torch.Generator().manual_seed(seed)

        def rounding(vectors: torch.Tensor) -> torch.Tensor:
            size = NOISE * vectors.square().mean(-1, keepdim=True).sqrt()
            return (vectors + size * torch.randn(vectors.shape, generator=generator)).to(dtype).to(vectors.dtype)

        return rounding

    exact = forced.logprobs(text, lambda vectors: vectors.to(dtype).to(vectors.dtype))
    return max(float((forced.logprobs(text, noisy(seed)) - exact).abs().max()) for seed in range(3))


def compare(output: Any, other: Any, tolerance: float) -> tuple[int, int]:
    """As :func:`follow`, but against another engine's answer, up to the first token where two are equally good."""
    ours, theirs = output.outputs[0], other.outputs[0]
    steps = zip(ours.token_ids, ours.logprobs, theirs.token_ids, theirs.logprobs, strict=True)
    for number, (token, logprobs, token_there, logprobs_there) in enumerate(steps):
        if token != token_there:
            assert token in logprobs_there, f"token {token} is not among the best"
            assert logprobs_there[token].logprob > logprobs_there[token_there].logprob - 2 * tolerance
            return number, 1
        for each, logprob in logprobs.items():
            if each in logprobs_there:
                worst.append(abs(logprob.logprob - logprobs_there[each].logprob))
                assert abs(logprob.logprob - logprobs_there[each].logprob) < tolerance
    return len(ours.token_ids), 0


def solve(problem: Problem, root: Path, seen: Counter[str] | None = None) -> None:
    seen = Counter() if seen is None else seen
    path = problem.model.path(root)
    outputs = answers(problem, path, problem.host_layers, seen)
    stayed = [number for number, asked in enumerate(problem.requests) if asked.dropped_after is None]
    assert set(stayed) <= set(outputs)
    rounded = problem.settings["kv_cache_dtype"] != "auto"
    reference = answers(problem, path, (), Counter()) if rounded else {}
    forced = Forced(path)
    for number in stayed:
        asked = problem.requests[number]
        try:
            if rounded:
                text = [*outputs[number].prompt_token_ids, *outputs[number].outputs[0].token_ids]
                moved = moved_by_rounding(forced, text, CACHES[problem.settings["kv_cache_dtype"]])
                compared, ties = compare(outputs[number], reference[number], LOGPROB_TOLERANCE + moved)
            else:
                compared, ties = follow(outputs[number], asked, forced)
        except AssertionError as error:
            raise AssertionError(f"request {number}: {error}") from error
        seen["tokens"] += asked.answer
        seen["compared"] += compared
        seen["ties"] += ties
    seen["host layers"] += bool(problem.host_layers)
    seen["windows of two lengths"] += problem.model.kind == "pangu"
    seen["two ranks"] += "tensor_parallel_size" in problem.settings
    seen["tiled"] += problem.ours.get("tiling_all_reduce", "off") != "off"
    seen["compiled"] += not problem.settings["enforce_eager"]
    seen["rounded caches"] += rounded
    seen["one group for all kinds"] += problem.settings["disable_hybrid_kv_cache_manager"]


ONE_BLOCK_TABLE = 453
"""Draws alternating windowed and full layers, one block table for both kinds, host layers of both kinds, and
prompts whose contexts are fetched in several parts.
"""


@pytest.mark.more
def test_a_drawn_engine_with_one_block_table_for_both_kinds(tmp_path: Path) -> None:
    problem = draw_problem(ONE_BLOCK_TABLE)
    assert problem.settings["disable_hybrid_kv_cache_manager"]
    assert {problem.model.layers[layer] for layer in problem.host_layers} == {"F", "W"}
    solve(problem, tmp_path)


FEW_LEFT_IN_ONE_TABLE = 2075
"""Draws one block table for both kinds, and more host layers than separate tables would allow."""


@pytest.mark.more
def test_a_drawn_engine_with_few_layers_left_in_one_block_table(tmp_path: Path) -> None:
    problem = draw_problem(FEW_LEFT_IN_ONE_TABLE)
    assert problem.host_layers not in problem.model.possible_host_layers()
    assert problem.host_layers in problem.model.possible_host_layers(one_table=True)
    solve(problem, tmp_path)


@pytest.mark.more
@pytest.mark.timeout(300 + 40 * DRAWS)
def test_drawn_engines_equal_the_reference(tmp_path_factory: pytest.TempPathFactory) -> None:
    root, seen = tmp_path_factory.mktemp("models"), Counter[str]()

    @settings(
        max_examples=DRAWS,
        phases=[Phase.explicit, Phase.generate],  # smaller failing problems are found faster by hand
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.integers(0, (1 << 32) - 1))
    @example(6)  # windows of two lengths
    @example(183)  # a bf16 cache, torch.compile and drafts
    @example(11774)  # host layers, drafts, and a single step that needs as many blocks as one request
    def drawn(seed: int) -> None:
        problem = draw_problem(seed)
        note(repr(problem))
        solve(problem, root, seen)

    drawn()
    assert seen["compared"] >= 0.98 * seen["tokens"], seen
    assert seen["ties"] <= 0.01 * seen["tokens"], seen
    drawn_at_least_once = ("preempted", "accepted drafts", "cached prefixes", "two ranks", "tiled")
    for what in ("host layers", "windows of two lengths", *drawn_at_least_once):
        assert seen[what], f"no draw had {what}, so it was not tested"
