"""Bad input to the real `vllm serve` ends in one clear sentence and a non-zero exit, without a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, OlmoeConfig

from tests.environment import USER_ENVIRONMENT
from tests.reference_models import VOCAB, llama, save_random

VLLM = Path(sys.executable).parent / "vllm"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(llama(4, 2, 64, layers=1), tmp_path_factory.mktemp("llama"))


def serve(*arguments: str, **environment: str) -> str:
    """Run `vllm serve` with input that must be refused; returns its output."""
    process = subprocess.Popen(
        [str(VLLM), "serve", *arguments],
        env=USER_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "WARNING"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        pytest.fail("accepted: the server started")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode not in (0, None), said
    assert "Traceback" not in said, said
    return said


def ours(said: str) -> str:
    """The one-sentence message of a refusal by the plugin."""
    return only_line(said, "fastattention: ")


def vllms(said: str) -> str:
    """The one-line message of a refusal by vLLM."""
    return only_line(said, "vllm: ")


def only_line(said: str, prefix: str) -> str:
    (line,) = (line for line in said.splitlines() if line.startswith(prefix))
    assert len(line) < 500
    return line


COMMON = ("--attention-backend", "fastattention", "--skip-tokenizer-init", "--max-model-len", "512")


def test_an_unknown_option(model: Path) -> None:
    options = json.dumps({"fastattention": {"cpu_thread": 2}})
    line = ours(serve(str(model), *COMMON, "--additional-config", options))
    assert "'cpu_thread'" in line
    assert "cpu_threads" in line


def test_an_unsupported_model_mla(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["DeepseekV3ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert "multi-head latent attention" in ours(serve(str(tmp_path), *COMMON, "--load-format", "dummy"))


@pytest.mark.full
def test_an_unsupported_model_experts(tmp_path: Path) -> None:
    config = OlmoeConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, architectures=["OlmoeForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    line = ours(serve(str(tmp_path), *COMMON, "--load-format", "dummy", "--dtype", "bfloat16"))
    assert "mixture-of-experts model (olmoe)" in line
    assert "dense model" in line


@pytest.mark.full
def test_an_unknown_architecture(tmp_path: Path) -> None:
    config = llama(2, 2, 64)
    config.architectures = ["NoSuchModelForCausalLM"]
    config.save_pretrained(tmp_path)
    assert "NoSuchModelForCausalLM" in vllms(serve(str(tmp_path), *COMMON))


@pytest.mark.full
def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    assert "no-such-model" in vllms(serve(str(tmp_path / "no-such-model"), *COMMON))


def test_a_kv_cache_that_cannot_hold_one_request(model: Path) -> None:
    line = ours(serve(str(model), *COMMON, "--kv-cache-memory-bytes", "200000"))
    assert "--max-model-len 256 or less" in line
    assert "200000" in line


@pytest.mark.full
def test_a_quantised_kv_cache(model: Path) -> None:
    line = ours(serve(str(model), *COMMON, "--kv-cache-dtype", "nvfp4"))
    assert "--kv-cache-dtype nvfp4" in line
    assert "--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2" in line


@pytest.mark.full
def test_another_backend_that_this_vllm_cannot_run(model: Path) -> None:
    line = ours(serve(str(model), "--attention-backend", "CPU_ATTN", "--skip-tokenizer-init"))
    assert "CPU_ATTN" in line


def test_a_misspelt_backend(model: Path) -> None:
    assert "'FASTATENTION'" in vllms(serve(str(model), "--attention-backend", "fastatention"))


def test_vllm_target_device_cpu(model: Path) -> None:
    assert "unset VLLM_TARGET_DEVICE" in ours(serve(str(model), *COMMON, VLLM_TARGET_DEVICE="cpu"))


@pytest.mark.full
def test_an_unusable_instruction_set(model: Path) -> None:
    line = ours(serve(str(model), *COMMON, FASTATTENTION_CPU_ISA="mmx"))
    assert "mmx" in line
    assert "scalar" in line


def test_missing_kernels(model: Path, tmp_path: Path) -> None:
    line = ours(serve(str(model), *COMMON, FASTATTENTION_CPU_LIBRARY=str(tmp_path / "absent.so")))
    assert "absent.so" in line


@pytest.mark.full
def test_weights_that_were_cut_off(tmp_path: Path) -> None:
    weights = save_random(llama(4, 2, 64, layers=1), tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    line = ours(serve(str(tmp_path), *COMMON))
    assert "model.safetensors" in line
    assert "download or copy the model again" in line


@pytest.mark.full
def test_a_damaged_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert "not a valid JSON file" in vllms(serve(str(tmp_path), *COMMON))


@pytest.mark.full
def test_compiling_without_a_compiler(model: Path) -> None:
    line = ours(serve(str(model), *COMMON, CXX="no-such-compiler"))
    assert "no-such-compiler" in line
    assert "--enforce-eager" in line


def test_a_taken_port(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = serve(str(model), *COMMON, "--host", "127.0.0.1", "--port", str(port))
    assert "--port" in ours(said)


def test_a_vllm_outside_the_supported_range(model: Path, tmp_path: Path) -> None:
    """The same vLLM with another version number: a folder whose metadata says 0.18.0 is first on the path."""
    info = tmp_path / "vllm-0.18.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.18.0\n")
    line = ours(serve(str(model), *COMMON, PYTHONPATH=str(tmp_path)))
    assert "0.18.0" in line
    assert "0.19.1" in line
