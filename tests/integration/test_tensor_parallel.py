"""Two ranks over gloo give the answers of one, under vLLM's multiprocessing executor and under Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams
from vllm.platforms import current_platform

from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.integration.serving import ray_cluster
from tests.integration.engine import MAX_TOKENS, check, engine, generate
from tests.reference_models import hugging_face_answers, llama, random_prompts, save_random

LENGTHS = (1, 17, 64, 130, 300)


SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


WORKER = "ray::RayWo"
"""Name of vLLM's worker (psutil truncates names). Its torch TCPStore listens on all addresses under every executor."""


def listening() -> set[tuple[str, str]]:
    """This process and programs started by it, and the addresses on which they accept connections."""
    here = psutil.Process()
    return {
        (process.name(), connection.laddr.ip)
        for process in (here, *here.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def check_listening() -> None:
    found = {one for one in listening() if not one[0].startswith(WORKER)}
    assert ("gcs_server", "::ffff:127.0.0.1") in found
    assert [one for one in found if one[1] not in LOOPBACK] == [], "reachable from other machines"


def queues() -> set[str]:
    """The names of vLLM's queues in shared memory."""
    return {path.name for path in SHARED_MEMORY.glob("psm_*")}


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
            check_listening()
    if executor == "ray":
        import ray

        ray.shutdown()


@pytest.fixture
def gpus_for_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM and Ray find two GPUs, and this plugin's changes for GPUs are installed and removed."""
    import ray
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
    monkeypatch.setattr(type(current_platform), "device_count", lambda self: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # An earlier test of this process may have changed these.
    monkeypatch.setenv(ray_cluster.SEVERAL_MACHINES, "1")
    monkeypatch.delenv(ray_cluster.SEVERAL_MACHINES)
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(RayExecutorV2, "_init_executor", RayExecutorV2._init_executor)
    ray_cluster.install()
    yield
    ray.shutdown()


@pytest.mark.full
def test_the_ray_executor_for_gpus_listens_on_this_machine_and_leaves_no_queues(
    gpus_for_ray: None, model: Path
) -> None:
    """vLLM's own executor, which runs on GPUs, with CPU workers."""
    before = queues()
    executor = "vllm.v1.executor.ray_executor_v2.RayExecutorV2"
    prompts = random_prompts(LENGTHS)
    expected = hugging_face_answers(model, prompts, MAX_TOKENS)
    with engine(model, tensor_parallel_size=2, distributed_executor_backend=executor) as llm:
        check(generate(llm, prompts), expected)
        check_listening()
        assert len(queues() - before) == 1, "the driver's own, which no kill of workers leaves behind"
    assert queues() == before


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
