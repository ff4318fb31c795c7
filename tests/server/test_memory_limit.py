"""A whole server in a control group with little memory: it serves what fits, and refuses the rest with one sentence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fastattention_vllm.demo.model import build_demo_model
from tests.environment import USER_ENVIRONMENT
from tests.limited import limited_to, parent
from tests.server.test_host_layers import HOST_LAYERS, MODEL, VLLM, ask_at_once, blocks_and_pool, question, serving

LIMIT = 4 << 30
POOL_GIB = 0.25
"""Of all host layers, for the blocks of device layers."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(parent() is None, reason="this user may not create control groups with a memory limit"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("demo") / "demo", MODEL)


def test_a_server_that_fits_answers_and_is_not_ended(model: Path, tmp_path: Path) -> None:
    with limited_to(LIMIT) as group:
        with serving(model, tmp_path / "log", POOL_GIB, enter=group.enter) as server:
            ask_at_once([server], {number: question(number, 1500) for number in (21, 22, 23, 24)})
            _, pool = blocks_and_pool(server)
        assert pool == pytest.approx(POOL_GIB, abs=0.01)
        assert group.times_full() == 0


@pytest.mark.parametrize(
    ("kv_bytes", "host_layers", "said"),
    [
        (
            LIMIT + (2 << 30),
            0,
            "fastattention: --kv-cache-memory-bytes 6442450944 is 6.00 GiB of KV cache per rank, but",
        ),
        (1 << 30, HOST_LAYERS, "the host layers' KV cache needs 4.00 GiB, but only "),
    ],
    ids=["KV cache", "host pool"],
)
def test_a_server_that_does_not_fit_says_so(
    model: Path, tmp_path: Path, kv_bytes: int, host_layers: int, said: str
) -> None:
    options = {"host_kv_layers": host_layers} | ({"host_kv_gib": 6.0} if host_layers else {})
    command = [str(VLLM), "serve", str(model), "--attention-backend", "fastattention", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(kv_bytes)]
    command += ["--additional-config", json.dumps({"fastattention": options})]
    log = tmp_path / "log"
    with limited_to(LIMIT) as group:
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                env=USER_ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=group.enter,
                timeout=600,
            )
        assert group.times_full() == 0
    assert done.returncode == 1
    assert said in log.read_text()
