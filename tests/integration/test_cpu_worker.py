"""The KV cache of a real engine lies in huge pages, and the log says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from fastattention_vllm.attention.cpu_memory import Placement
from fastattention_vllm.integration import cpu_resources, cpu_worker
from fastattention_vllm.integration.cpu_resources import GIB
from tests.attention.test_memory import needs_huge_pages, huge_bytes
from tests.integration.engine import engine
from tests.reference_models import llama, save_random

KV_BYTES = 64 << 20


@needs_huge_pages
def test_the_kv_cache_of_an_engine_lies_in_huge_pages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger("vllm").addHandler(caplog.handler)
    with engine(save_random(llama(4, 2, 64), tmp_path / "model"), kv_cache_memory_bytes=KV_BYTES) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert isinstance(worker, cpu_worker.FastAttentionCpuWorker)
        storages = {s.data_ptr(): s.nbytes() for s in cpu_worker._storages(worker.model_runner.kv_caches)}
        print({hex(a): n for a, n in storages.items()}, [huge_bytes(a, n) for a, n in storages.items()])
        print([m for m in caplog.messages if "KV cache" in m or "kernel" in m])
