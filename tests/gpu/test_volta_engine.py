"""Real engines on the V100's kernels, from their PTX, give the same answers as vLLM's own backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id
from tests import reference_models as reference
from tests.gpu.test_engine import GPU, Steps, answers, check, expected, model  # noqa: F401
from tests.integration.engine import NGRAM, check_drafts, engine, generate
from tests.reference_models import random_prompts, repeating_prompts, save_repetitive

PTX = {"volta_kernels": "ptx"}
CHANGES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"enforce_eager": False},
    "prefix-caching": {"enable_prefix_caching": True},
    "no-async": {"async_scheduling": False},
}


@pytest.mark.parametrize("host_layers", [0, 2])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_answers_are_those_of_vllms_backend(
    host_layers: int,
    changes: dict[str, Any],
    model: Path,  # noqa: F811
    expected: Callable[[bool], list[Steps]],  # noqa: F811
) -> None:
    section = PTX | {"host_kv_layers": host_layers, "stream_fraction": 0.5}
    found = answers(model, additional_config={"fastattention": section}, **changes)
    check(found, expected(changes.get("enforce_eager", True)))


@pytest.mark.parametrize("changes", [CHANGES["eager"], CHANGES["graphs"]], ids=["eager", "graphs"])
def test_answers_of_turings_kernels(
    changes: dict[str, Any],
    model: Path,  # noqa: F811
    expected: Callable[[bool], list[Steps]],  # noqa: F811
) -> None:
    section = {"volta_kernels": "ptx-sm_75", "host_kv_layers": 0}
    found = answers(model, additional_config={"fastattention": section}, **changes)
    check(found, expected(changes.get("enforce_eager", True)))


def test_replays_read_the_tables_of_their_own_step(model: Path) -> None:  # noqa: F811
    """Batches of every size, with requests that end and others that arrive, long after the graphs were captured."""
    prompts = random_prompts((1, 700, 33, 5, 260, 90, 16, 17, 800, 2))
    found = []
    for eager in (True, False):
        with engine(model, **(GPU | {"max_num_seqs": 4, "enforce_eager": eager}),
                    additional_config={"fastattention": PTX | {"host_kv_layers": 0}}) as llm:  # fmt: skip
            outputs = [
                *generate(llm, prompts, max_tokens=9),
                *generate(llm, prompts[:3], max_tokens=30),
            ]
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    agreeing = sum(a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
    assert agreeing >= 0.8 * (9 * 10 + 30 * 3), "rounding may change a token and all that follow"


def test_speculation(tmp_path: Path) -> None:
    """The decode kernel computes several query tokens of a request."""
    path = save_repetitive(reference.llama(8, 2, 128, layers=4), tmp_path)
    prompts = repeating_prompts()
    drafts = NGRAM | {"num_speculative_tokens": 1}
    found = []
    for changes in ({}, {"speculative_config": drafts}):
        with engine(path, additional_config={"fastattention": PTX | {"host_kv_layers": 0}}, **(GPU | changes)) as llm:
            found.append([list(output.outputs[0].token_ids) for output in generate(llm, prompts, max_tokens=24)])
            if changes:
                check_drafts(llm)
    agreeing = sum(a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
    assert agreeing >= 40, "of 48; rounding may change a token and all that follow"


@pytest.mark.parametrize(
    ("eager", "cache"), [(True, "auto"), (False, "auto"), (False, "fp8_e5m2"), (False, "fp8_e4m3")]
)
def test_the_needle_is_found(eager: bool, cache: str, tmp_path: Path) -> None:
    path = build_demo_model(tmp_path / "demo", DemoModelSpec(dtype="float16"))
    depths = (0.1, 0.5, 0.9)
    prompts = [list(make_haystack(15000, {"alpha": "7319"}, depths=[d], ask="alpha").token_ids) for d in depths]
    settings = GPU | {"max_model_len": 16384, "max_num_batched_tokens": 2048, "enforce_eager": eager}
    settings["kv_cache_dtype"] = cache
    section = PTX | {"host_kv_layers": 0}
    with engine(path, additional_config={"fastattention": section}, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [token_id("7319")] * 3


def test_models_that_the_kernels_do_not_support_are_refused_in_a_sentence(model: Path) -> None:  # noqa: F811
    with (
        pytest.raises(Exception, match=r"bfloat16|dtype"),
        engine(model, additional_config={"fastattention": PTX}, **(GPU | {"dtype": "bfloat16"})),
    ):
        pass
