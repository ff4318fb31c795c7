"""This package's metrics, in vLLM's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fastattention_vllm import __version__
from fastattention_vllm.integration.serving.channel import Channel
from fastattention_vllm.integration.serving.worker_stats import HostLayerStats, WorkerStats

PREFIX = "fastattention:"
USAGE = "vllm:kv_cache_usage_perc"
"""vLLM's own gauge: the fraction of blocks in use, 0 to 1. Host layers use the same blocks."""

refused_requests = Counter(
    PREFIX + "refused_requests", "Requests that were refused because this backend lacks a feature."
)


class WorkerMetrics(Collector):
    """Presents the last numbers of a channel. The caller refreshes the channel first."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def describe(self) -> Iterable[Metric]:
        """No names in advance, because the metrics depend on the workers."""
        return ()

    def collect(self) -> Iterable[Metric]:
        workers = self._channel.workers
        if not workers:
            return
        age = gauge("stats_age_seconds", "Seconds since the workers reported the numbers of this package.", [])
        age.add_metric([], self._channel.age() or 0.0)
        yield age
        yield kernels(workers)
        yield of_nan_logits(workers)
        yield from of_host_layers(workers)
        yield from of_tiling(workers)


def gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def kernels(workers: Iterable[WorkerStats]) -> Metric:
    info = InfoMetricFamily(PREFIX + "kernels", "The kernels that compute attention layers.", labels=["rank", "host"])
    for worker in workers:
        for name, layers in worker.kernels.items():
            info.add_metric(
                [str(worker.rank), worker.host], {"kernels": name, "layers": str(layers), "version": __version__}
            )
    return info


def of_nan_logits(workers: Iterable[WorkerStats]) -> Metric:
    total = counter("nan_logits", "Tokens whose logits contained NaN, so that their answers are wrong.", ["rank"])
    for worker in workers:
        total.add_metric([str(worker.rank)], worker.nan_logits)
    return total


def of_host_layers(workers: Iterable[WorkerStats]) -> Iterable[Metric]:
    found = [(str(worker.rank), worker.host_layers) for worker in workers if worker.host_layers]
    layers = gauge("attention_layers", "Attention layers, by the place of their KV cache.", ["rank", "place"])
    for worker in workers:
        host = worker.host_layers.host_layers if worker.host_layers else 0
        device = worker.host_layers.device_layers if worker.host_layers else sum(worker.kernels.values())
        layers.add_metric([str(worker.rank), "host"], host)
        layers.add_metric([str(worker.rank), "device"], device)
    yield layers
    if not found:
        return
    yield pool(found)
    for name, text in (
        ("cpu_attention_seconds", "Time that the CPU spent on attention of host layers."),
        ("cpu_attention_bytes", "Bytes of keys and values that the CPU has read for attention."),
        ("resident_bytes", "Bytes of keys and values of host layers that the device read from its own copies."),
        ("saturated_numbers", "Numbers of keys and values beyond the largest fp8 number, stored as that number."),
        ("device_wait_seconds", "Upper limit of the time that the device waited for the CPU in host layers."),
    ):
        total = counter(name, text, ["rank"])
        for rank, stats in found:
            total.add_metric([rank], getattr(stats, name))
        yield total
    limit = gauge("plain_read_bytes_per_second", "Rate of plain reads of the host pool, measured at start.", ["rank"])
    for rank, stats in found:
        if stats.plain_read_rate:
            limit.add_metric([rank], stats.plain_read_rate)
    yield limit
    streamed = counter(
        "streamed_bytes", "Bytes of keys and values that the device read over the link.", ["rank", "phase"]
    )
    for rank, stats in found:
        streamed.add_metric([rank, "decode"], stats.decode_streamed_bytes)
        streamed.add_metric([rank, "prefill"], stats.prefill_streamed_bytes)
    yield streamed


def pool(found: Iterable[tuple[str, HostLayerStats]]) -> Metric:
    """The host pool: used and free bytes, by vLLM's own count of blocks."""
    usage = max(
        (sample.value for metric in REGISTRY.restricted_registry([USAGE]).collect() for sample in metric.samples),
        default=0.0,
    )
    family = gauge("host_pool_bytes", "Host memory for the KV cache of host layers.", ["rank", "state"])
    for rank, stats in found:
        family.add_metric([rank, "used"], round(usage * stats.pool_bytes))
        family.add_metric([rank, "free"], stats.pool_bytes - round(usage * stats.pool_bytes))
    return family


def of_tiling(workers: Iterable[WorkerStats]) -> Iterable[Metric]:
    tiled = [(str(worker.rank), worker.tiling) for worker in workers if worker.tiling]
    if not tiled:
        return
    layers = gauge("tiled_layers", "Row-parallel layers whose all-reduce overlaps with their matmul.", ["rank", "cuts"])
    saved = gauge(
        "tiling_saved_seconds",
        "Time saved per layer and step, as measured by the calibration.",
        ["rank", "outputs", "inputs_per_rank", "tokens", "blocks", "collective"],
    )
    for rank, stats in tiled:
        layers.add_metric([rank, stats.cuts], stats.layers)
        for trial in stats.trials:
            shape = [str(trial.outputs), str(trial.inputs_per_rank), str(trial.tokens)]
            saved.add_metric([rank, *shape, str(len(trial.blocks)), trial.collective], trial.saved_seconds)
    yield layers
    yield saved
