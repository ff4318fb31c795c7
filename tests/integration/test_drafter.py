"""What a drafter adds to a model: layers, memory, and a backend of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from fastattention_vllm.integration import compat, drafter
from fastattention_vllm.integration.host_layers import accelerator
from fastattention_vllm.integration.host_layers.accelerator import AcceleratorRuntime
from fastattention_vllm.placement.kv_size import KvSize
from fastattention_vllm.placement.plan import Layers, Limits, plan
from tests import drafters
from tests.reference_models import llama, qwen3_5, save_random

KV_HEADS, SIZE = 2, 256


def model(heads: int = KV_HEADS, size: int = SIZE, **named: Any) -> SimpleNamespace:
    return SimpleNamespace(
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: size,
        get_num_layers=lambda parallel: 3,
        max_model_len=4096,
        get_sliding_window=lambda: None,
        is_hybrid=False,
        is_multimodal_model=False,
        hf_config=SimpleNamespace(model_type="llama", n_predict=None),
        hf_text_config=SimpleNamespace(model_type="llama"),
    ) if not named else SimpleNamespace(**(vars(model(heads, size)) | named))  # fmt: skip


def config(method: str, draft: Any, target: Any = None, **named: Any) -> Any:
    speculative = SimpleNamespace(method=method, draft_model_config=draft, attention_backend=None, **named)
    parallel = SimpleNamespace(tensor_parallel_size=2)
    return SimpleNamespace(parallel_config=parallel, model_config=target or model(), speculative_config=speculative)


@pytest.mark.parametrize(
    ("method", "predicted", "layers"),
    [("mtp", 2, 2), ("mtp", None, 1), ("eagle", None, 3), ("draft_model", None, 3), ("ngram", None, 0)],
)
def test_a_drafter_has_as_many_layers_as_vllm_makes(method: str, predicted: int | None, layers: int) -> None:
    """The configuration of an MTP drafter is the model's, with all of its layers."""
    draft = model(hf_config=SimpleNamespace(n_predict=predicted))
    assert drafter.num_layers(config(method, draft)) == layers
    assert drafter.bytes_per_token(config(method, draft), 2) == layers * 2 * KV_HEADS * SIZE * 2


def test_a_block_of_a_smaller_drafter_takes_less() -> None:
    """vLLM counts a block of all layers of its only table: here 4 layers of 1 MiB, and 2 of a quarter."""
    size = KvSize(block_size=16, bytes_per_block=1 << 20, full_layers=4, draft_bytes=1 << 19)
    assert size.null_block() == (4 << 20) + (1 << 19)
    assert size.of_request(33) == 4 * size.null_block()
    assert size.longest_request(5 * size.null_block()) == 64
    placement = plan(Layers((0, 1, 2, 3)), size, 2, Limits(0, 0, 0))
    assert placement.host_size.draft_bytes == 0
    assert placement.max_blocks(10 * ((2 << 20) + (1 << 19)), 1 << 40) == 10


def test_a_drafter_that_reads_less_is_named_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rule, of the step that the longest request is in, decides what the length is."""
    lines: list[str] = []
    monkeypatch.setattr(drafter.logger, "warning_once", lambda text, *values: lines.append(text % values))
    asked = config("draft_model", model(max_model_len=128), num_speculative_tokens=3)
    longest = drafter.longest_drafted(asked)
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(use_dflash=lambda: False),
        num_spec_tokens=3,
        effective_drafter_max_model_len=128,
    )
    fits: Any = GPUModelRunner._input_fits_in_drafter
    assert longest is not None
    assert [fits(runner, SimpleNamespace(max_seq_len=longest + more)) for more in (0, 1)] == [True, False]
    drafter.use_this_backend(asked)
    (line,) = lines
    assert line.startswith(
        "The drafter reads at most 128 tokens, and --max-model-len is 4096: while a request has more "
    )
    assert f"more than {longest} tokens, no request" in line


@pytest.mark.parametrize("method", ["draft_model", "mtp", "ngram"])
def test_a_drafter_that_reads_as_much_is_not_mentioned(method: str) -> None:
    assert drafter.longest_drafted(config(method, model(max_model_len=4096), num_speculative_tokens=3)) is None


def test_vllm_limits_a_drafter_to_what_its_config_says(tmp_path: Path) -> None:
    for name, length in (("model", 512), ("draft", 128)):
        shape = llama(4, 2, 64)
        shape.max_position_embeddings = length
        save_random(shape, tmp_path / name)
    asked = EngineArgs(
        model=str(tmp_path / "model"),
        attention_backend="fastattention",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2},
    ).create_engine_config()
    assert drafter.longest_drafted(asked) == 126


WINDOWS_BY_LAYER = SimpleNamespace(model_type="plamo3", interleaved_sliding_window=[32, None])


@pytest.mark.parametrize("method", drafter.WITH_LAYERS)
def test_a_drafter_gets_this_backend_unless_another_is_named(method: str) -> None:
    asked = config(method, model())
    drafter.use_this_backend(asked)
    assert asked.speculative_config.attention_backend is compat.ensure_backend_member()
    asked.speculative_config.attention_backend = other = object()
    drafter.use_this_backend(asked)
    assert asked.speculative_config.attention_backend is other


@pytest.mark.parametrize(
    "asked",
    [config("dflash", model()), config("ngram", model()), config("draft_model", model(), parallel_drafting=True)],
    ids=["another method", "no layers", "several tokens per pass"],
)
def test_other_drafters_keep_vllms_choice(asked: Any) -> None:
    drafter.use_this_backend(asked)
    assert asked.speculative_config.attention_backend is None


def test_a_version_that_gives_the_drafter_the_models_backend_has_no_entry() -> None:
    asked = config("eagle", model())
    del asked.speculative_config.attention_backend
    drafter.use_this_backend(asked)
    assert not hasattr(asked.speculative_config, "attention_backend")


@pytest.mark.parametrize(
    ("draft", "target", "named"),
    [
        (model(), None, False),
        (model(is_hybrid=True), None, "llama"),
        (model(is_multimodal_model=True), None, "llama"),
        (model(model="small", get_sliding_window=lambda: 32), None, "sliding windows in small"),
        (model(model="small", hf_text_config=WINDOWS_BY_LAYER), None, "sliding windows in small"),
        (model(), model(get_sliding_window=lambda: 32), False),
        (model(1), model(hf_text_config=WINDOWS_BY_LAYER), "KV heads of another size beside sliding windows"),
        (model(1), model(get_sliding_window=lambda: 32), "KV heads of another size beside sliding windows"),
        (model(size=64), None, False),
    ],
)
def test_untested_layers_are_named(draft: Any, target: Any, named: object) -> None:
    assert drafter.untested_layers(config("draft_model", draft, target)) == named


def test_another_mtp_is_named() -> None:
    draft = model(hf_config=SimpleNamespace(model_type="mimo_mtp"))
    assert drafter.untested_layers(config("mtp", draft)) == "MTP of mimo_mtp"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, False),
        ({"parallel_drafting": True}, "parallel_drafting: true"),
        ({"quantization": "fp8"}, 'quantization: "fp8"'),
        ({"draft_sample_method": "greedy", "kv_cache_dtype": None}, False),
    ],
)
def test_untested_ways_are_named(named: dict[str, Any], expected: object) -> None:
    assert drafter.untested_way(config("draft_model", model(), **named)) == expected


def test_another_backend_is_named() -> None:
    asked = config("draft_model", model())
    asked.speculative_config.attention_backend = SimpleNamespace(name="TRITON_ATTN")
    assert drafter.untested_way(asked) == "attention_backend: TRITON_ATTN"


def of_folder(method: str, folder: Path | str) -> Any:
    return config(method, SimpleNamespace(model=str(folder), revision=None))


def test_the_weights_of_a_drafter_are_those_of_its_files(tmp_path: Path) -> None:
    """One rank of two has half of them. Of a model with MTP layers, only these count."""
    target = save_random(llama(4, 2, 64), tmp_path / "model")
    head = drafters.save_eagle(target, tmp_path / "eagle")
    attention, mlp, fc, norm = 128 * 64 * (4 + 2 + 2 + 4), 3 * 128 * 256, 2 * 128 * 128, 128
    assert drafter.weight_bytes(of_folder("eagle", head)) == 4 * (attention + mlp + fc + norm) // 2
    hybrid = drafters.add_mtp(save_random(qwen3_5(), tmp_path / "hybrid"), tmp_path / "mtp")
    gates, norms = 128 * 4 * 64, 2 * 64 + 2 * 128
    layer = attention + gates + mlp + norms
    assert drafter.weight_bytes(of_folder("mtp", hybrid)) == 4 * (layer + fc + 3 * norm) // 2
    assert drafter.weight_bytes(config("ngram", model())) == 0


def test_unknown_weights_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(drafter.logger, "warning_once", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(drafter, "_folder", lambda *_: None)
    assert drafter.weight_bytes(of_folder("draft_model", "someone/small")) == 0
    assert "someone/small is not on this machine" in lines[0]


def test_the_devices_memory_for_the_cache_is_without_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs and NPUs, free memory is read when only the model is loaded."""
    target = save_random(llama(4, 2, 64), tmp_path / "model")
    head = drafters.save_eagle(target, tmp_path / "eagle")
    memory = SimpleNamespace(mem_get_info=lambda device: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch, "get_device_module", lambda device: memory)
    monkeypatch.setattr(accelerator.budget, "activation_bytes", lambda **sizes: 0)

    def kv_bytes(method: str) -> int:
        asked = of_folder(method, head)
        asked.additional_config = {}
        asked.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
        asked.scheduler_config = SimpleNamespace(max_num_batched_tokens=1, max_num_seqs=1)
        asked.model_config.hf_text_config = SimpleNamespace(hidden_size=1, intermediate_size=1, vocab_size=1)
        asked.model_config.get_num_attention_heads = lambda parallel: 1
        return AcceleratorRuntime(asked, object, None, "", torch.device("cpu")).kv_bytes()  # type: ignore[arg-type]

    weights = drafter.weight_bytes(of_folder("eagle", head))
    assert weights > 0
    assert kv_bytes("ngram") - kv_bytes("eagle") == weights
