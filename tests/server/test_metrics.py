"""The numbers of this backend in the real server: /metrics and the status, after a request."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Served


def test_metrics_and_status_after_a_request(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        prompt = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}
        client.post("/v1/completions", json=prompt).raise_for_status()
        text = client.get("/metrics").raise_for_status().text
        status = client.get("/fastattention/status").raise_for_status().json()
    ours = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("fastattention:")
    }
    assert "fastattention CPU" in ours["fastattention:kernels_info"].labels["kernels"]
    assert ours["fastattention:refused_requests_total"].value == 0
    (worker,) = status["workers"]
    assert worker["host_layers"] is None
    assert sum(worker["kernels"].values()) == int(ours["fastattention:kernels_info"].labels["layers"])
