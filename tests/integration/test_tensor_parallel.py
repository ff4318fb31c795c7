"""Two ranks over gloo give the answers of one, under vLLM's multiprocessing executor and under Ray."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.reference_models import hugging_face_answers, llama, random_prompts, save_random

LENGTHS = (1, 17, 64, 130, 300)


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


WORKER = "ray::RayWo"
"""Name of vLLM's worker (psutil truncates names). Its torch TCPStore listens on all addresses under every executor."""


def listening() -> set[tuple[str, str]]:
    """Programs started by this process, and the addresses on which they accept connections."""
    return {
        (process.name(), connection.laddr.ip)
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(llama(4, 2, 64), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("executor", ["mp", pytest.param("ray", marks=pytest.mark.full)])
def test_two_ranks_equal_hugging_face(executor: str, model: Path) -> None:
    prompts = random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, tensor_parallel_size=2, distributed_executor_backend=executor) as llm:
        check(generate(llm, prompts), expected)
        if executor == "ray":
            found = {one for one in listening() if not one[0].startswith(WORKER)}
            assert ("gcs_server", "::ffff:127.0.0.1") in found
            assert [one for one in found if one[1] not in LOOPBACK] == [], "reachable from other machines"
    if executor == "ray":
        import ray

        ray.shutdown()


@pytest.mark.more
def test_two_ranks_find_the_needle(tmp_path: Path) -> None:
    """The answer needs every head of every layer, so both ranks have contributed."""
    path = build_demo_model(tmp_path / "demo", DemoModelSpec(num_heads=4, num_kv_heads=2, dtype="bfloat16"))
    prompts = [list(make_haystack(3000, {"alpha": "7319"}, depths=[d], ask="alpha").token_ids) for d in (0.1, 0.6)]
    with engine(path, tensor_parallel_size=2, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids[0] for output in outputs]
    from fastattention_vllm.demo.tokenizer import token_id

    assert tokens == [token_id("7319")] * 2
