"""volta_fallback between vLLM's metadata and xformers, without a GPU.

xformers computes only on GPUs, so this runs its documented equivalent in PyTorch (documented_xformers.py). Masks are
xformers' own where it is installed, and written after its documentation elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention_vllm.attention import xformers
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.integration.cuda import select as backend_cuda
from fastattention_vllm.integration.cuda import xformers as backend_xformers
from fastattention_vllm.integration.refusal import Refusal
from tests.attention import oracle
from tests.attention.oracle import Case
from tests.attention.volta.conftest import described_kernels  # noqa: F401  an autouse fixture
from tests.integration.cuda.documented_xformers import Mask, memory_efficient_attention
from tests.integration.cuda.test_volta import HEADS, KV_HEADS, PAGE, builder, common, config, slots

CPU = torch.device("cpu")


def genuine() -> ModuleType | None:
    try:
        return importlib.import_module("xformers.ops.fmha.attn_bias")
    except ImportError:
        return None


@pytest.fixture(params=["documented masks", "genuine masks"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Any = genuine() if request.param == "genuine masks" else SimpleNamespace(BlockDiagonalMask=Mask)
    if masks is None:
        pytest.skip("xformers is not installed")
    ops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", masks)
    monkeypatch.setattr(xformers, "version", lambda: "0.0.34")


def case(dtype: torch.dtype, size: int, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes: Any) -> Any:
    return Case(q_lens, kv_lens, HEADS, KV_HEADS, size, PAGE, dtype, **changes).build()


def through_the_layer(problem: AttentionProblem, **changes: Any) -> torch.Tensor:
    """Run the layer. The new keys and values are not in the cache yet, and one slot is padding."""
    size = problem.head_size
    metadata = backend_xformers.XformersMetadataBuilder(
        SimpleNamespace(block_size=PAGE), ["layer"], config(), CPU
    ).build(0, common(problem))
    impl = backend_xformers.FastAttentionXformersImpl(HEADS, size, problem.scale, KV_HEADS, **changes)
    cache = problem.key._base
    assert cache is not None
    cache = cache.clone()
    where = slots(problem)
    pages, rows = where // PAGE, where % PAGE
    new = [torch.nn.functional.pad(part[pages, rows], (0, 0, 0, 0, 0, 1)) for part in (problem.key, problem.value)]
    cache[pages, :, rows] = float("nan")
    impl.do_kv_cache_update(None, *new, cache, torch.nn.functional.pad(where, (0, 1), value=-1))
    out = torch.full((len(problem.query), HEADS, size), 7.0, dtype=problem.query.dtype)
    impl.forward(None, problem.query, *new, cache, metadata, out)
    return out


def check(problem: AttentionProblem, found: torch.Tensor) -> None:
    real = int(problem.query_start_loc[-1])
    expected, _ = oracle.attention(problem)
    relative, absolute = oracle.OUTPUT_TOLERANCE[problem.query.dtype]
    torch.testing.assert_close(found[:real].double(), expected[:real], rtol=relative, atol=absolute)
    assert (found[real:] == 7).all(), "padding must not be touched"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 320), (torch.float32, 64)], ids=["fp16-320", "fp32-64"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_step_of_decoding_requests_and_prompts(dtype: torch.dtype, size: int, window: int | None) -> None:
    reach = {} if window is None else {"window": (window - 1, -1)}
    problem = case(dtype, size, (1, 2, 1, 20, 5), (200, 33, 1, 20, 70), padding=3, **reach)
    check(problem, through_the_layer(problem, sliding_window=window))


@pytest.mark.usefixtures("installed")
def test_an_encoder_attends_in_both_directions() -> None:
    problem = case(torch.float16, 320, (5, 20), (5, 20), causal=False)
    tokens = slots(problem)
    key, value = (part[tokens // PAGE, tokens % PAGE] for part in (problem.key, problem.value))
    step = replace(common(problem), causal=False)
    metadata = backend_xformers.XformersMetadataBuilder(
        SimpleNamespace(block_size=PAGE), ["layer"], config(), CPU
    ).build(0, step)
    impl = backend_xformers.FastAttentionXformersImpl(HEADS, 320, problem.scale, KV_HEADS, attn_type="encoder_only")
    out = torch.full_like(problem.query, 7.0)
    impl.forward(None, problem.query, key, value, torch.empty(0), metadata, out)
    check(problem, out)


@pytest.mark.usefixtures("installed")
def test_a_window_needs_causal_sequences() -> None:
    with pytest.raises(ValueError, match="the window is 4, but xformers supports windows only with a causal mask"):
        xformers.bias([3], [3], causal=False, window=4)


# --- choice of the backend -------------------------------------------------------------------------------------------


def model(dtype: torch.dtype, head_size: int, **options: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, get_head_size=lambda: head_size, use_mla=False),
        additional_config={"fastattention": options},
    )


def chosen(monkeypatch: pytest.MonkeyPatch, vllm_config: Any, installed: str | None = "0.0.34") -> str:
    import vllm.config
    import vllm.platforms

    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: vllm_config)
    monkeypatch.setattr(
        vllm.platforms, "current_platform", SimpleNamespace(get_device_capability=lambda device_id=0: (7, 0))
    )
    monkeypatch.setattr(xformers, "version", lambda: installed)
    return str(backend_cuda.chosen().__name__)


def test_our_kernels_are_preferred_to_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"volta_fallback": "xformers"}):
        assert chosen(monkeypatch, model(torch.float16, 128, **options), None) == "FastAttentionVoltaBackend"
    assert chosen(monkeypatch, None) == "FastAttentionVoltaBackend"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 320), (torch.float32, 128)])
def test_xformers_runs_only_if_requested(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = model(dtype, size, volta_fallback="xformers")
    assert chosen(monkeypatch, asked) == "FastAttentionXformersBackend"
    with pytest.raises(Refusal, match=r"Volta kernels (need|support) .*install xformers and pass .*volta_fallback"):
        chosen(monkeypatch, model(dtype, size))
    with pytest.raises(Refusal, match='volta_fallback is "xformers", but xformers is not installed'):
        chosen(monkeypatch, asked, None)
    with pytest.raises(Refusal, match="host_kv_layers is 4, but volta_fallback keeps all KV on the GPU"):
        chosen(monkeypatch, model(dtype, size, volta_fallback="xformers", host_kv_layers=4))


def test_the_choice_of_xformers_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(xformers, "version", lambda: "0.0.34")
    monkeypatch.setattr(
        backend_xformers, "get_current_vllm_config_or_none", lambda: model(torch.float32, 64, volta_fallback="xformers")
    )
    logger = SimpleNamespace(info_once=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(backend_xformers, "logger", logger)
    impl = backend_xformers.FastAttentionXformersImpl(HEADS, 64, 0.125, KV_HEADS)
    impl.process_weights_after_loading(torch.float32)
    assert said == [
        "Attention kernels: xformers 0.0.34, selected by volta_fallback because the model's dtype is float32, but the "
        "Volta kernels need float16."
    ]


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        ({"logits_soft_cap": 30.0}, "a soft cap"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
        ({"sliding_window": 4, "attn_type": "encoder_only"}, "a window on both sides"),
    ],
)
def test_features_that_xformers_does_not_support_are_refused(feature: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal, match=f"use {named}, which volta_fallback: xformers does not support"):
        backend_xformers.FastAttentionXformersImpl(HEADS, 64, 0.125, KV_HEADS, **feature)


def test_claims_of_the_xformers_backend() -> None:
    backend = backend_xformers.FastAttentionXformersBackend
    assert backend.supports_head_size(320)
    assert not backend.supports_head_size(260)
    assert backend.supports_dtype(torch.float32)
    assert not backend.supports_dtype(torch.bfloat16)
    assert not backend.supports_sink()
    assert builder()._cudagraph_support != backend.get_builder_cls()._cudagraph_support
