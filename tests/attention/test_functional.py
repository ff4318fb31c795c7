"""fast_attn_func and fast_attn_varlen_func have flash_attn's interface, both eager and compiled."""

from __future__ import annotations

import importlib.util
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention_vllm import fast_attn_func, fast_attn_varlen_func
from fastattention_vllm.attention import functional, kernels
from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.kernels import kernels_for
from fastattention_vllm.attention.problem import AttentionProblem, deliver
from tests.attention import oracle
from tests.attention.oracle import Case

# Argument names and defaults of flash_attn 2.8, flash_attn_interface.py.
FLASH_ATTN_FUNC = (
    "(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
)
FLASH_ATTN_VARLEN_FUNC = (
    "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None)"
)


def batch(
    seqlen_q: int = 20, seqlen_k: int = 50, heads: int = 4, kv_heads: int = 2, size: int = 64, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    q = torch.randn(3, seqlen_q, heads, size, generator=random, **options)
    k, v = (torch.randn(3, seqlen_k, kv_heads, size, generator=random, **options) for _ in range(2))
    return q, k, v


def varlen(case: Case) -> dict[str, Any]:
    problem = case.build()
    seq_lens = problem.seq_lens
    cu_seqlens_k = torch.cat([torch.zeros(1, dtype=torch.int32), seq_lens.cumsum(0, dtype=torch.int32)])
    key, value = problem.key, problem.value
    if problem.kv_start_loc is not None:  # the varlen interface has no gaps between sequences
        rows = [
            torch.arange(start, start + length)
            for start, length in zip(problem.kv_start_loc.tolist(), seq_lens.tolist(), strict=True)
        ]
        key, value = key[torch.cat(rows)], value[torch.cat(rows)]
    return {
        "q": problem.query,
        "k": key,
        "v": value,
        "cu_seqlens_q": problem.query_start_loc,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max(case.q_lens),
        "max_seqlen_k": max(case.kv_lens),
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "alibi_slopes": problem.alibi_slopes,
        "sinks": problem.sinks,
        "block_table": problem.block_table,
    }


@pytest.mark.parametrize(
    ("function", "theirs"), [(fast_attn_func, FLASH_ATTN_FUNC), (fast_attn_varlen_func, FLASH_ATTN_VARLEN_FUNC)]
)
def test_the_signature_is_flash_attns_plus_one_keyword_argument(function: Any, theirs: str) -> None:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == theirs[:-1] + ", *, sinks=None)"


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "head_size strided"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (7, 3)}, {"softcap": 5.0}, {"sinks": torch.tensor([2.0, -1.0, 4.0, 0.0])}],
    ids=str,
)
def test_fixed_length_matches_the_definition(layout: str, options: dict[str, Any]) -> None:
    q, k, v = batch()
    if layout == "heads first":  # [B, H, S, D] tensors, as torch SDPA has them
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "head_size strided":
        q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v))
    out, lse, nothing = fast_attn_func(q, k, v, return_attn_probs=True, **options)
    assert nothing is None
    assert out.shape == q.shape
    assert lse.shape == (3, 4, 20)
    assert torch.equal(fast_attn_func(q, k, v, **options), out)

    score = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 8
    if "softcap" in options:
        score = 5 * torch.tanh(score / 5)
    distance = torch.arange(50) - (torch.arange(20)[:, None] + 30)
    if "causal" in options:
        score = score.masked_fill(distance > 0, -math.inf)
    if "window_size" in options:
        score = score.masked_fill((distance < -7) | (distance > 3), -math.inf)
    if "sinks" in options:
        score = torch.cat([score, options["sinks"].double()[:, None, None].expand(3, 4, 20, 1)], -1)
    weight = score.softmax(-1)[..., :50]
    expected = torch.einsum("bhqk,bkhd->bqhd", weight, v.double().repeat_interleave(2, 2))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), score.logsumexp(-1), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fixed_length_matches_torch_sdpa(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in batch(seqlen_q=50))
    out = fast_attn_func(q, k, v, causal=causal, softmax_scale=0.3)

    def reference(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2).double() for t in (q, k, value)), is_causal=causal, scale=0.3, enable_gqa=True
        ).transpose(1, 2)

    expected = reference(v)
    rtol, atol = oracle.OUTPUT_TOLERANCE[dtype]
    allowed = rtol * expected.abs() + atol
    if (dtype == torch.bfloat16 and cpu.isa() in oracle.BF16_ISAS) or (
        dtype == torch.float16 and cpu.isa() in oracle.SPLIT_ISAS
    ):
        allowed += oracle.WEIGHT_ROUNDING[dtype] * reference(v.abs())
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_and_values_may_be_fp8(dtype: torch.dtype) -> None:
    q, k, v = batch()
    k, v = k.to(dtype), v.to(dtype)
    assert torch.equal(fast_attn_func(q, k, v), fast_attn_func(q, k.float(), v.float()))  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("alibi", ["", "shared", "per sequence"])
@pytest.mark.parametrize("sinks", [None, 2.0])
def test_varlen_matches_the_oracle(page_size: int, alibi: str, sinks: float | None) -> None:
    case = Case((5, 0, 70), (30, 9, 70), page_size=page_size, alibi=alibi, sinks=sinks, window=(50, -1))
    out, lse, _ = fast_attn_varlen_func(**varlen(case), return_attn_probs=True)
    assert lse.shape == (4, 75)
    problem = case.build()
    oracle.assert_matches(problem, out, lse.T, oracle.attention(problem))


def test_no_keys_and_no_queries() -> None:
    q, k, v = batch(seqlen_k=0)
    assert (fast_attn_func(q, k, v) == 0).all()
    q, k, v = batch(seqlen_q=0)
    assert fast_attn_func(q, k, v).shape == (3, 0, 4, 64)


def test_training_is_refused() -> None:
    q, k, v = batch()
    with pytest.raises(ValueError, match=r"dropout_p must be 0 .* not 0\.1"):
        fast_attn_func(q, k, v, dropout_p=0.1)
    for position in range(3):
        tensors = list(batch())
        tensors[position].requires_grad_()
        with pytest.raises(ValueError, match=r"requires gradients.*torch.no_grad\(\)"):
            fast_attn_func(*tensors)
        with torch.no_grad():
            assert not fast_attn_func(*tensors).requires_grad


def test_devices_without_kernels_are_refused() -> None:
    q, k, v = (t.to("meta") for t in batch())
    with pytest.raises(ValueError, match="No attention kernels for device meta; available: cpu, cuda, npu"):
        fast_attn_func(q, k, v)


@pytest.mark.parametrize(
    ("device", "capability", "vllm_flash", "family"),
    [
        ("cpu", None, True, "cpu"),
        ("cuda:1", (7, 0), True, "volta"),
        ("cuda", (7, 5), False, "volta"),
        ("cuda", (8, 0), True, "flash"),
        ("cuda", (8, 9), False, "torch_flash"),
        ("cuda", (12, 0), False, "torch_flash"),
        ("npu", None, False, "ascend"),
    ],
)
def test_every_device_has_kernels(
    device: str, capability: tuple[int, int] | None, vllm_flash: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "vllm_has_flash", lambda: vllm_flash)
    asked = SimpleNamespace(type=device.partition(":")[0])  # a torch build without GPU support knows no device "npu"
    module = kernels_for(asked)  # type: ignore[arg-type]
    assert module.__name__.removesuffix(".kernels") == f"fastattention_vllm.attention.{family}"  # type: ignore[attr-defined]


def test_a_gpu_before_the_v100_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.raises(ValueError, match=r"compute capability 6\.1; 7\.0 \(V100\) or newer is needed"):
        kernels_for(torch.device("cuda"))


def test_compiled_flash_attention_is_found_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = kernels.vllm_has_flash.__wrapped__
    (tmp_path / "vllm_flash_attn").mkdir()
    assert not found(), "this vLLM has no compiled kernels"
    (tmp_path / "vllm_flash_attn" / "_vllm_fa2_C.abi3.so").touch()
    assert found()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not found(), "vLLM must not be imported"


class OfADevice:
    """Stand-in kernels that expect contiguous keys or vLLM's pages, and lengths on the host, and return new tensors."""

    ANY_PAGE_SIZE = False

    @staticmethod
    def run(problem: AttentionProblem, *, out: torch.Tensor, lse: torch.Tensor) -> None:
        found, sums = oracle.attention(problem)
        real = int(problem.query_start_loc[-1])
        found[real:], sums[real:] = math.nan, math.nan  # padding may hold anything
        deliver(problem, found, sums, out, lse)


def test_kernels_of_other_devices_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = batch()
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    cases = [varlen(Case((5, 20, 1), (70, 20, 30), 4, 2, page_size=size, padding=2)) for size in (0, 16)]
    expected = [fast_attn_func(q, k, v, causal=True, return_attn_probs=True)]
    expected += [fast_attn_varlen_func(**case, return_attn_probs=True) for case in cases]
    monkeypatch.setattr(functional, "kernels_for", lambda device: OfADevice)
    found = [fast_attn_func(q, k, v, causal=True, return_attn_probs=True)]
    found += [fast_attn_varlen_func(**case, return_attn_probs=True) for case in cases]
    for (out, lse, _), (expected_out, expected_lse, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=4e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = batch()
    with pytest.raises(ValueError, match=r"q, k and v must be \[batch, seqlen, num_heads, head_size\]"):
        fast_attn_func(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="with the same batch size"):
        fast_attn_func(q[:2], k, v)
    with pytest.raises(ValueError, match="key and value must match"):
        fast_attn_func(q, k, v[:, :-1])
    with pytest.raises(ValueError, match=r"sinks must be \[4\] float32 on cpu, not \[2\]"):
        fast_attn_func(q, k, v, sinks=torch.zeros(2))


def test_compiled_without_graph_breaks() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = fast_attn_func(q * 2, k, v, causal=True)
        return out.sin() + 1  # type: ignore[union-attr]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seqlen in (20, 33):  # the second one with a dynamic shape
        tensors = batch(seqlen_q=seqlen)
        torch.testing.assert_close(compiled(*tensors), layer(*tensors), rtol=0, atol=0)


def test_varlen_compiled_without_graph_breaks() -> None:
    arguments = varlen(Case((5, 9), (30, 9)))

    def layer(q: torch.Tensor) -> torch.Tensor:
        out, lse, _ = fast_attn_varlen_func(**{**arguments, "q": q}, return_attn_probs=True)
        return out * lse.T[..., None]

    q = arguments["q"]
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(q), layer(q), rtol=0, atol=0)


def test_choosing_the_kernels_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels_of_a_gpu(device: torch.device) -> Any:
        kernels.vllm_has_flash()  # looks for files, which torch.compile cannot trace
        return cpu

    monkeypatch.setattr(functional, "kernels_for", kernels_of_a_gpu)
    arguments = varlen(Case((5, 9), (30, 9)))
    for function, given in (fast_attn_func, dict(zip("qkv", batch(), strict=True))), (fast_attn_varlen_func, arguments):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**given), function(**given), rtol=0, atol=0)  # type: ignore[operator]


def test_operators_pass_torchs_own_checks() -> None:
    q, k, v = batch()
    per_head = torch.rand(4)
    for window, alibi, sinks in (((-1, -1), None, None), ((5, 0), per_head, per_head + 1)):
        torch.library.opcheck(torch.ops.fastattention.attention, (q, k, v, alibi, sinks, 0.1, True, *window, 0.0))
    for page_size in (0, 16):
        a = varlen(Case((5, 9), (30, 9), page_size=page_size, sinks=1.0))
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes", "sinks")
        tensors = [a[name] for name in names]
        torch.library.opcheck(torch.ops.fastattention.varlen_attention, (*tensors, 0.1, True, -1, -1, 0.0))
