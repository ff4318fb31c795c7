from __future__ import annotations

import itertools

import pytest
import torch

from fastattention_vllm.bench.cases import parse_case
from fastattention_vllm.bench.memory import Arena, plan_rotation

GIB = 2**30
CASE = parse_case("decode bf16 (32,8,128) 32K b1")  # 128 MiB per layer


def test_a_sweep_is_4_gib_or_8_caches() -> None:
    assert plan_rotation(CASE, available=64 * GIB, cache=2**20).layers == 32
    assert plan_rotation(CASE, available=64 * GIB, cache=GIB).layers == 64
    assert plan_rotation(CASE, available=64 * GIB, cache=GIB).note is None


def test_a_sweep_shortened_by_memory_is_reported() -> None:
    plan = plan_rotation(CASE, available=2 * GIB, cache=0)
    assert plan.layers == 9
    assert plan.note is not None
    assert "1.12 GiB instead of 4 GiB, because memory is short" in plan.note


def test_a_sweep_shortened_on_request_is_reported() -> None:
    plan = plan_rotation(CASE, available=64 * GIB, cache=0, asked=GIB)
    assert plan.layers == 8
    assert plan.note is not None
    assert "as asked" in plan.note
    assert plan_rotation(CASE, available=64 * GIB, cache=0, asked=8 * GIB).note is None


def test_a_case_that_does_not_fit() -> None:
    with pytest.raises(MemoryError, match=r"takes 8\.0 GiB, but only 6\.0 GiB may be used"):
        plan_rotation(parse_case("decode bf16 (32,8,128) 128K b16"), available=10 * GIB, cache=0)
    assert plan_rotation(parse_case("prefill bf16 (8,1,64) 4K"), available=GIB, cache=0).layers == 1


def test_layers_are_apart_and_full_of_numbers() -> None:
    arena = Arena()
    case = parse_case("decode fp16 (8,2,64) 300 b1 page16")
    layers = arena.layers(case, 3)
    assert {layer.numel() for layer in layers} == {case.layer_bytes}
    addresses = [layer.data_ptr() for layer in layers]
    assert all(b - a >= case.layer_bytes for a, b in itertools.pairwise(addresses))
    numbers = layers[2].view(torch.float16).float()
    assert 0.9 < numbers.std() < 1.1
    other = arena.layers(parse_case("decode fp32 (8,2,64) 300 b1 page16"), 1)[0].view(torch.float32)
    assert 0.9 < other.std() < 1.1, "must be refilled for another dtype"
