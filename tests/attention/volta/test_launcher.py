"""Refusals and messages of the V100 kernels' launcher, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.attention.problem import AttentionProblem
from fastattention_vllm.attention.volta import images
from fastattention_vllm.attention.volta import kernels as volta
from fastattention_vllm.attention.volta import launch as volta_kernels
from fastattention_vllm.cuda_driver import DriverError, Kernel
from kernels.volta import variants
from tests.attention.oracle import Case

FP16 = torch.float16


class OnGpu:
    """A tensor that claims to be on a GPU. Nothing here reads its elements."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def on_gpu(problem: AttentionProblem, **changes: Any) -> AttentionProblem:
    problem = replace(problem, **changes)
    return replace(problem, **{name: OnGpu(getattr(problem, name)) for name in ("query", "key", "value")})


PROBLEM = Case((2, 3), (20, 30), dtype=FP16).build()
PER_SEQUENCE = Case((2, 3), (20, 30), dtype=FP16, alibi="per sequence").build()
CONTIGUOUS = Case((2, 3), (20, 30), dtype=FP16, page_size=0).build()
MANY = torch.empty_strided((1 << 20, 16, 2, 64), (1 << 16, 128, 64, 1), dtype=FP16, device="meta")
REFUSED: list[tuple[AttentionProblem, str]] = [
    (PROBLEM, r"query is on cpu, but the Volta kernels need it on a GPU\."),
    (replace(on_gpu(PROBLEM), value=PROBLEM.value), "value is on cpu, but the Volta kernels need it on a GPU"),
    (
        on_gpu(PROBLEM, query=PROBLEM.query.bfloat16()),
        "query has dtype torch.bfloat16, but the Volta kernels need float16; pass --dtype float16",
    ),
    (
        on_gpu(PROBLEM, key=PROBLEM.key.bfloat16()),
        "key has dtype torch.bfloat16, but the Volta kernels need float16, float8_e5m2, float8_e4m3fn or int8",
    ),
    (
        on_gpu(PROBLEM, key=PROBLEM.key.to(torch.float8_e4m3fn)),
        "key has dtype torch.float8_e4m3fn and value torch.float16, but they must have the same dtype",
    ),
    (
        on_gpu(PROBLEM, query=torch.zeros(5, 4, 68, dtype=FP16)[..., :64]),
        r"query has strides \(272, 68, 1\), but the last one must be 1 and the others multiples of 8\.",
    ),
    (on_gpu(PROBLEM, query=torch.zeros(5, 64, 4, dtype=FP16).transpose(1, 2)), r"query has strides \(256, 1, 4\)"),
    (
        on_gpu(PROBLEM, query=torch.zeros(5 * 4 * 64 + 4, dtype=FP16)[4:].view(5, 4, 64)),
        "query begins at an address that is not a multiple of 16 bytes",
    ),
    (
        on_gpu(PROBLEM, query=torch.zeros(5, 4, 72, dtype=FP16)),
        "head_size is 72, but the Volta kernels support 64, 80, 96, 112, 128, 192, 256",
    ),
    (
        on_gpu(PROBLEM, value=torch.zeros(*PROBLEM.value.shape, dtype=FP16)),
        r"key has strides \([0-9, ]*\) and value \([0-9, ]*\), but they must have the same strides",
    ),
    (
        on_gpu(PROBLEM, key=MANY, value=MANY),
        "key has 1048576 blocks of 65536 numbers, more than the Volta kernels can address",
    ),
    (on_gpu(PROBLEM, scale=0.0), r"scale is 0\.0, but the Volta kernels need a positive one"),
    (on_gpu(PER_SEQUENCE), "alibi_slopes differ between sequences, but the Volta kernels need one slope per head"),
]


@pytest.mark.parametrize(("problem", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_unsupported_problems_are_refused(problem: AttentionProblem, said: str) -> None:
    """``can_run`` returns the reason; ``run`` raises it."""
    with pytest.raises(ValueError, match=said) as refusal:
        volta.run(problem)
    assert volta.can_run(problem) == str(refusal.value)


def test_writes_into_unsupported_caches_are_refused() -> None:
    key, cache, slots = torch.zeros(2, 2, 64, dtype=FP16), torch.zeros(1, 16, 2, 64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError,
        match=r"float16 keys into a .* or int8 cache, not torch\.float16 keys into a torch\.float32 cache\.$",
    ):
        volta.write_kv(key, key, cache, cache, slots)
    with pytest.raises(ValueError, match=r"not torch\.bfloat16 keys into a torch\.float8_e5m2 cache\.$"):
        volta.write_kv(key.bfloat16(), key.bfloat16(), *[cache.to(torch.float8_e5m2)] * 2, slots)


FP8 = {"kv_dtype": torch.float8_e4m3fn, "key_scale": 0.5, "value_scale": 2.0}
CAN = [PROBLEM, CONTIGUOUS, Case((2, 3), (20, 30), dtype=FP16, **FP8).build()]


@pytest.mark.parametrize("problem", CAN, ids=["pages", "no pages", "fp8"])
def test_supported_problems_are_accepted(problem: AttentionProblem) -> None:
    assert volta.can_run(on_gpu(problem)) is None


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice made by a test ends with the test."""
    yield
    monkeypatch.undo()
    volta._asked = "auto"
    volta.target.cache_clear()


TARGETS = [
    ((7, 0), "auto", "sm_70.cubin"),
    ((7, 2), "auto", "sm_70.cubin"),
    ((7, 5), "auto", "sm_75.cubin"),
    ((9, 0), "auto", "sm_70.ptx"),
    ((7, 0), "ptx", "sm_70.ptx"),
    ((7, 5), "ptx-sm_75", "sm_75.ptx"),
    ((9, 0), "ptx-sm_75", "sm_75.ptx"),
]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(("capability", "kernels", "image"), TARGETS)
def test_kernels_that_are_not_built(
    capability: tuple[int, int], kernels: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU has its own kernels; newer GPUs can use the PTX of either."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(images, "IMAGES", tmp_path)
    variant = variants.decode(64, architecture=volta.choose(kernels).architecture)
    said = rf"not built: there is no {tmp_path}/decode_d64\.{re.escape(image)}; run `make volta`"
    with pytest.raises(RuntimeError, match=said):
        volta._kernel(variant)


@pytest.mark.usefixtures("chosen")
def test_kernels_of_a_newer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    said = r"volta_kernels is ptx-sm_75, but this GPU has compute capability 7\.0; set it to auto\."
    with pytest.raises(ValueError, match=said):
        volta.choose("ptx-sm_75")


def test_kernels_for_turing_fit_its_limits() -> None:
    """All CTAs of an SM share 64 KiB of shared memory and 1024 threads."""
    for variant in variants.VARIANTS:
        if variant.architecture == volta_kernels.TURING:
            assert variant.shared_bytes * variant.ctas_per_sm <= 64 << 10, variant
            assert variant.threads * variant.ctas_per_sm <= 1024


@pytest.mark.parametrize(
    ("group", "speculated", "tokens"),
    [(1, 0, 8), (3, 0, 2), (6, 0, 1), (16, 0, 1), (40, 0, 1), (6, 1, 2), (6, 4, 5), (6, 5, 1), (2, 1, 4), (40, 3, 1)],
)
def test_tokens_of_a_sequence_that_is_decoded(group: int, speculated: int, tokens: int) -> None:
    """Those that fit the decode kernel, or as many as are proposed, if they fit the wide one."""
    assert volta_kernels.decode_tokens(group, speculated) == tokens


def test_a_workspace_has_room_for_all_decoding_sequences() -> None:
    """Of many query heads per KV head as well."""
    of_prefill = volta_kernels.partial_floats(variants.prefill(64), 40, 2, 256, 65536)  # type: ignore[arg-type]
    for group, speculated, rows in ((8, 0, 8), (12, 0, 12), (6, 3, 24)):
        found = volta_kernels.partial_floats(variants.prefill(64), group, 2, 256, 65536, speculated)  # type: ignore[arg-type]
        assert found == volta_kernels.floats_of_parts(64, 256 * 2 * 64 * rows) > of_prefill


# --- driver -----------------------------------------------------------------------------------------------------------


class Driver:
    """A fake driver: returns the status set for each call (0 by default) and records the arguments."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.statuses.get(name, cuda_driver.SUCCESS)

        return call

    def cuGetErrorString(self, status: int, text: Any) -> int:
        if status == 999:
            return 1
        text._obj.value = f"reason {status}".encode()
        return cuda_driver.SUCCESS


def install(monkeypatch: pytest.MonkeyPatch, **statuses: int) -> Driver:
    driver = Driver(**statuses)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    return driver


def test_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_driver._driver.cache_clear()
    with pytest.raises(DriverError, match=r"no NVIDIA driver was found \(libcuda\.so\.1: cannot open"):
        cuda_driver.load(b"", "kernel", 0)


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({"cuModuleLoadData": 209}, r"^loading the module of k failed: reason 209 \(CUDA driver error 209\)\.$"),
        ({"cuModuleGetFunction": 500}, "^looking up k failed: reason 500"),
        ({"cuFuncSetAttribute": 1}, "^asking for 90000 bytes of shared memory for k failed: reason 1 "),
        ({"cuModuleLoadData": 999}, r"^loading the module of k failed: an unknown error \(CUDA driver error 999\)\.$"),
    ],
)
def test_a_module_that_does_not_load(statuses: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **statuses)
    with pytest.raises(DriverError, match=said):
        cuda_driver.load(b"", "k", 90000)


def test_only_large_shared_memory_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    cuda_driver.load(b"", "k", 48 << 10)
    assert "cuFuncSetAttribute" not in [name for name, *_ in driver.calls]
    cuda_driver.load(b"", "k", (48 << 10) + 16)
    assert driver.calls[-1][0] == "cuFuncSetAttribute"
    assert driver.calls[-1][2:] == (8, (48 << 10) + 16)  # 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def test_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch)
    kernel = Kernel("k", ctypes.c_void_p(5), ctypes.c_void_p(6))
    parameters = volta_kernels.AttentionParams(scale=0.5)
    kernel.launch((3, 2, 1), (128, 1, 1), 1024, parameters, 77)
    ((name, function, *numbers, stream, arguments, extra),) = driver.calls
    assert name == "cuLaunchKernel"
    assert (function.value, stream.value, extra.value) == (5, 77, None)
    assert numbers == [3, 2, 1, 128, 1, 1, 1024]
    assert volta_kernels.AttentionParams.from_address(arguments[0]).scale == 0.5


def test_an_empty_launch_and_a_failing_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, cuLaunchKernel=701)
    kernel = Kernel("k", ctypes.c_void_p(5), ctypes.c_void_p(6))
    kernel.launch((3, 0, 1), (128, 1, 1), 0, volta_kernels.AttentionParams(), 0)
    assert driver.calls == []
    with pytest.raises(DriverError, match=r"^the launch of k with a grid of \(3, 2, 1\) failed: reason 701 \(CUDA"):
        kernel.launch((3, 2, 1), (128, 1, 1), 0, volta_kernels.AttentionParams(), 0)
