"""Linear layers equal torch's own: those on weights in rows, and packed ones, which keep one copy of their weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from fastattention_vllm.attention.cpu import kernels as cpu_kernels
from fastattention_vllm.attention.cpu import linear as rows
from fastattention_vllm.integration.cpu import worker as cpu_worker
from fastattention_vllm.integration.cpu.stand_ins import linear as cpu_linear
from tests.attention.cpu.test_memory import HUGE, huge_bytes, needs_huge_pages
from tests.integration.engine import engine, generate
from tests.reference_models import llama, random_prompts, save_random

needs_packing = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="weights are packed on CPUs with AVX-512 bf16"
)


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The function that vLLM calls for each loaded layer."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    cpu_linear.replace_linears_once_loaded()
    cpu_linear.replace_linears_once_loaded()
    replaced = utils.dispatch_cpu_unquantized_gemm
    assert isinstance(replaced, cpu_linear._Dispatch)
    assert not isinstance(replaced.original, cpu_linear._Dispatch)
    yield replaced
    gc.collect()


def layer_of(inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    layer: Any = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    layer.requires_grad_(False)
    return layer


@needs_packing
@pytest.mark.parametrize("tokens", [1, 3, 16, 33, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (129, 7), (1, 1), (2048, 513)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_layer_equals_torchs_linear(
    dispatch: Any, tokens: int, inputs: int, outputs: int, biased: bool
) -> None:
    layer = layer_of(inputs, outputs)
    weight, bias = layer.weight.clone(), torch.randn(outputs, 2, dtype=torch.bfloat16)[:, 0] if biased else None
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
    dispatch(layer, remove_weight=True)
    assert layer.weight.numel() == 0
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    for ours in (layer.cpu_linear(x, layer.weight, bias), layer.cpu_linear(x[None], layer.weight, bias)[0]):
        assert ours.shape == (tokens, outputs)
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=2**-6)
    wide = torch.randn(tokens, 2 * inputs, dtype=torch.bfloat16)[:, ::2]
    torch.testing.assert_close(
        layer.cpu_linear(wide, layer.weight, bias).double(),
        linear(wide.double(), weight.double(), None if bias is None else bias.double()),
        rtol=2**-7,
        atol=2**-6,
    )


@needs_packing
def test_compiled_code_finds_the_weight_and_the_one_loaded_after_it(dispatch: Any) -> None:
    layers = torch.nn.ModuleList([layer_of(64, 96), layer_of(64, 96)])
    x = torch.randn(3, 64, dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [layer.cpu_linear(x, layer.weight, None) for layer in layers]

    def load(factor: float) -> list[torch.Tensor]:
        for number, layer in enumerate(layers):
            layer.weight = torch.nn.Parameter(factor * (number + 1) * layer_of(64, 96).weight, requires_grad=False)
        expected = [linear(x, layer.weight) for layer in layers]
        for layer in layers:
            dispatch(layer, remove_weight=True)
        return expected

    expected = load(1.0)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", options=None)
    torch.testing.assert_close(compiled(x), expected)
    expected = load(-2.0)
    torch.testing.assert_close(compiled(x), expected)


@needs_packing
def test_a_weight_is_held_once_and_freed_with_its_layer(dispatch: Any) -> None:
    before = len(cpu_linear.packed_weights())
    layer = layer_of(64, 96)
    original = weakref.ref(layer.weight)
    dispatch(layer, remove_weight=True)
    assert original() is None
    dispatch(layer, remove_weight=False)  # the weight is empty, so the layer stays as it is and nothing is repacked
    assert len(cpu_linear.packed_weights()) == before + 1
    del layer
    gc.collect()
    assert len(cpu_linear.packed_weights()) == before


@pytest.mark.parametrize(
    ("dtype", "remove_weight", "can_pack"),
    [
        (torch.float32, True, True),
        (torch.float16, True, True),
        (torch.bfloat16, False, True),  # embeddings, and output layers that may share their weight
        (torch.bfloat16, True, False),
    ],
)
@pytest.mark.parametrize("limit", [0, 3, None], ids=["torch", "few tokens", "all tokens"])
def test_other_layers_keep_their_weight(
    dispatch: Any,
    dtype: torch.dtype,
    remove_weight: bool,
    can_pack: bool,
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_linear, "tokens_on_rows", lambda _: limit)
    if not can_pack:
        monkeypatch.setattr(cpu_linear, "can_pack", lambda: False)
    layer = layer_of(64, 96, dtype)
    weight, bias = layer.weight, torch.randn(96).to(dtype)
    # otherwise vLLM's kernels for small weights are used
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    dispatch(layer, remove_weight)
    assert layer.weight is weight
    compiled = torch.compile(
        lambda x: layer.cpu_linear(x, layer.weight, bias), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (3, 4):
        x = torch.randn(tokens, 64).to(dtype)
        ours = limit is None or tokens <= limit
        expected = (rows.linear if ours else linear)(x, weight, bias)
        assert torch.equal(layer.cpu_linear(x, layer.weight, bias), expected)
        assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize(
    ("isa", "dtype", "in_torch", "limit"),
    [
        ("avx2", torch.bfloat16, False, None),
        ("avx2", torch.float32, False, None),
        ("avx512", torch.bfloat16, True, rows.FEW_TOKENS),
        ("avx512_bf16", torch.float32, True, rows.FEW_TOKENS),
        ("amx", torch.float16, True, rows.FEW_TOKENS),
        ("avx512_bf16", torch.float16, False, None),
        ("avx2", torch.float64, False, 0),
        ("neon", torch.bfloat16, False, 0),
        ("scalar", torch.float32, False, 0),
    ],
)
def test_which_tokens_the_kernels_take(
    isa: str, dtype: torch.dtype, in_torch: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "isa", lambda: isa)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: in_torch)
    assert cpu_linear.tokens_on_rows.__wrapped__(dtype) == limit


def test_a_weight_in_columns_is_left_to_torch(dispatch: Any) -> None:
    layer = layer_of(64, 96, torch.float32)
    layer.weight = torch.nn.Parameter(torch.randn(64, 96).T, requires_grad=False)
    x = torch.randn(3, 64)
    dispatch(layer, remove_weight=False)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), linear(x, layer.weight))


@pytest.mark.parametrize("reason", ["another CPU", "no such op", "wrong results"])
def test_nothing_is_packed_where_packing_is_not_supported(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "another CPU":
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
        monkeypatch.setattr(cpu_linear, "_laid_out", lambda weight: weight if reason == "no such op" else weight * 2)
        if reason == "no such op":
            monkeypatch.setattr(cpu_linear, "_linear", lambda *_: torch.ops.mkldnn.no_such_op())
        else:
            monkeypatch.setattr(cpu_linear, "_linear", linear)
            monkeypatch.setattr(cpu_linear, "buffer", lambda packed: (0, 0))
    assert not cpu_linear.can_pack.__wrapped__()


@needs_packing
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.more)])
def test_an_engine_answers_the_same_with_packed_weights(
    eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_random(llama(4, 2, 64), tmp_path / "model")
    prompts = random_prompts([3, 20, 70])
    answers = []
    for packed in (False, True):
        with monkeypatch.context() as patch:
            if not packed:
                patch.setattr(cpu_linear, "can_pack", lambda: False)
            with engine(model, dtype="bfloat16", enforce_eager=eager) as llm:
                assert bool(cpu_linear.packed_weights()) == packed
                answers.append(generate(llm, prompts))
        gc.collect()
    for plain, ours in zip(*answers, strict=True):
        first = [output.outputs[0].logprobs[0] for output in (plain, ours)]
        token = ours.outputs[0].token_ids[0]
        assert token == plain.outputs[0].token_ids[0]
        assert abs(first[0][token].logprob - first[1][token].logprob) < 0.02


@needs_packing
@needs_huge_pages
def test_packed_weights_are_in_huge_pages(dispatch: Any) -> None:
    layer = layer_of(1024, 4 * HUGE // 2048)
    dispatch(layer, remove_weight=True)
    packed = cpu_linear.packed_weights()[-1]
    cpu_worker.place_tensors("weights", [layer.weight, packed], [0], discard=False)
    address, size = cpu_linear.buffer(packed)
    assert size >= 4 * HUGE
    assert huge_bytes(address, size) >= 3 * HUGE
