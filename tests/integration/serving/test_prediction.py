"""The planner's predictions for a running server, and the sentences that replace them."""

from __future__ import annotations

import pytest

from fastattention_vllm.integration.serving.engine_stats import Finished
from fastattention_vllm.integration.serving.prediction import device_key, predictor, rates_of
from fastattention_vllm.integration.serving.worker_stats import HostRates
from fastattention_vllm.plan.hardware import GIB, tables
from tests.integration.serving.fakes import HOST, gpu_config, gpu_worker

RATES = HostRates(memory=40e9, cpu=30e9, link=20e9, cpu_beside_link=22e9, link_beside_cpu=15e9)


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("Tesla V100-SXM2-16GB", 15.78, "v100-16g"),
        ("Tesla V100-SXM2-32GB", 31.74, "v100-32g"),
        ("Tesla V100-PCIE-32GB", 31.74, "v100-pcie-32g"),
        ("Tesla T4", 14.58, "t4-16g"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.75, "rtx2080ti-11g"),
        ("NVIDIA GeForce RTX 3090", 23.69, "rtx3090-24g"),
        ("NVIDIA L4", 21.96, "l4-24g"),
        ("NVIDIA L40S", 44.4, "l40s-48g"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80g"),
        ("NVIDIA H100 80GB HBM3", 79.11, "h100-80g"),
        ("NVIDIA H200", 139.72, "h200-141g"),
        ("NVIDIA H200", 20.0, None),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
    ],
)
def test_the_tables_are_searched_for_pytorchs_name(name: str, gib: float, key: str | None) -> None:
    assert key is None or key in tables().devices
    assert device_key(name, int(gib * GIB)) == key


def test_a_known_device_and_model_have_predictions() -> None:
    found = predictor(gpu_config(), [gpu_worker(host=8)])
    prediction = found.prediction
    assert prediction.why_not is None
    assert prediction.device == "1 x NVIDIA H200 SXM"
    assert prediction.decode_tokens == 131072
    assert prediction.planned_host_layers == 0
    assert prediction.decode_seconds_per_token
    assert prediction.prefill_seconds
    one = Finished("a", 4000, 0, 11, 1.0, 1.0)
    times, longer = found.times(one), found.times(Finished("b", 64000, 0, 11, 1.0, 1.0))
    assert times
    assert longer
    assert times.prefill
    assert longer.prefill
    assert longer.prefill > 10 * times.prefill
    assert times.decode
    assert prediction.decode_seconds_per_token > times.decode


def test_predictions_are_for_the_layers_where_they_are() -> None:
    one = Finished("a", 64000, 0, 11, 1.0, 1.0)
    decode = [predictor(gpu_config(), [gpu_worker(host=host)]).times(one) for host in (0, 8, 24)]
    times = [found.decode for found in decode if found and found.decode]
    assert len(times) == 3
    assert times == sorted(set(times))


def test_cached_prompts_and_single_tokens_are_not_predicted() -> None:
    times = predictor(gpu_config(), [gpu_worker(host=8)]).times(Finished("a", 4000, 2000, 1, 1.0, 0.0))
    assert times
    assert (times.prefill, times.decode) == (None, None)


def test_measured_rates_replace_the_tables() -> None:
    measured = gpu_worker(host=8, rates=RATES)
    assert rates_of([measured, measured]) == (80e9, 20e9)
    assert rates_of([measured, gpu_worker(host=8)]) is None
    plain, own = (predictor(gpu_config(), [worker]).prediction for worker in (gpu_worker(host=8), measured))
    assert (plain.measured_rates, own.measured_rates) == (False, True)
    assert plain.decode_seconds_per_token
    assert own.decode_seconds_per_token
    assert own.decode_seconds_per_token > plain.decode_seconds_per_token


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("CPU", {}, "computes on CPUs"),
        ("NVIDIA GeForce GTX 1080", {}, "no data for NVIDIA GeForce GTX 1080"),
        ("NVIDIA H200", {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture of experts"),
        ("NVIDIA H200", {"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_the_reason_replaces_a_prediction(device: str, changes: dict[str, object], reason: str) -> None:
    cpu = {"device_bytes": None} if device == "CPU" else {}
    worker = gpu_worker(host=8).model_copy(update={"device": device} | cpu)
    found = predictor(gpu_config(**changes), [worker])
    assert found.prediction.why_not
    assert reason in found.prediction.why_not
    assert found.prediction.decode_seconds_per_token is None
    assert found.times(Finished("a", 4000, 0, 11, 1.0, 1.0)) is None


def test_pipeline_parallelism_is_not_predicted() -> None:
    config = gpu_config()
    config.parallel_config.pipeline_parallel_size = 2
    found = predictor(config, [gpu_worker(host=8)])
    assert found.prediction.why_not == "the planner does not support pipeline parallelism"
    assert HOST.rates is None
