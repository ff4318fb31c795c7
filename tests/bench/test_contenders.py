from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastattention_vllm.bench import vllm_native
from fastattention_vllm.bench.cases import Case, parse_case
from fastattention_vllm.bench.contender import Bound
from fastattention_vllm.bench.contenders import CpuContender, Ours, contenders
from fastattention_vllm.bench.correctness import Checker, make_query
from fastattention_vllm.bench.cpu_report import CpuRow
from fastattention_vllm.bench.memory import Arena
from fastattention_vllm.bench.runner import Runner
from fastattention_vllm.bench.sdpa import Sdpa

CASES = [
    "decode bf16 (8,2,64) 300 b3 page16",
    "decode fp16 (4,4,128) 129 b1",
    "decode fp32 (8,1,64) 1000 b2 page32",
    "prefill bf16 (8,2,64) 200 page16",
    "prefill fp16 (8,1,64) 50 on 100 b2",
]


PAIRS = [
    pytest.param(contender, parse_case(text), id=f"{contender.name}: {text}")
    for contender in contenders(["ours", "sdpa"])
    for text in CASES
    if contender.why_not(parse_case(text)) is None
]


@pytest.mark.parametrize(("contender", "case"), PAIRS)
def test_each_contender_computes_the_case(contender: CpuContender, case: Case) -> None:
    query = make_query(case)
    bound = contender.bind(case, query, Arena().layers(case, 2))
    verdict = Checker(case, query).check(bound)
    assert not verdict.wrong, verdict
    assert verdict.error < verdict.allowed / 3
    assert bound.calls[1]().shape == query.shape
    assert not torch.equal(bound.calls[0]().clone(), bound.calls[1]()), "each layer must have a separate cache"


@pytest.mark.usefixtures("hurried")
def test_pages_larger_than_the_pool_of_random_numbers() -> None:
    row = measure("decode bf16 (8,8,128) 5000 b1 page5000", [])["None"]
    assert row.ours is not None
    assert row.error is not None


class Broken(Sdpa):
    """SDPA of another problem: wrong, however fast it is."""

    def __init__(self, name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name = self.peer = name
        self._spoil = spoil

    def bind(self, case: Case, query: torch.Tensor, layers: list[torch.Tensor]) -> Bound:
        bound = super().bind(case, query, layers)
        return Bound([lambda call=call: self._spoil(call()) for call in bound.calls], bound.load)


class Failing(Sdpa):
    name = peer = "failing"

    def bind(self, case: Case, query: torch.Tensor, layers: list[torch.Tensor]) -> Bound:
        raise RuntimeError("no such kernel")


def measure(text: str, peers: list[CpuContender]) -> dict[str, CpuRow]:
    rows = Runner([Ours(), *peers], threads=2, rounds=1, sweep_bytes=1 << 20).measure(parse_case(text))
    return {str(row.peer_name): row for row in rows}


@pytest.mark.usefixtures("hurried")
def test_a_wrong_contender_is_reported_as_wrong_and_not_as_fast() -> None:
    wrong = [
        Broken("zeros", torch.zeros_like),
        Broken("nan", lambda out: torch.full_like(out, float("nan"))),
        Broken("heads swapped", lambda out: out.flip(1)),
    ]
    rows = measure("decode bf16 (8,2,64) 300 b3 page16", [*wrong, Sdpa()])
    for name in ("zeros", "nan", "heads swapped"):
        assert (rows[name].peer, rows[name].ratio) == (None, None)
        assert any(f"{name} is wrong" in note for note in rows[name].notes)
        assert rows[name].peer_error is not None
    good = rows["torch SDPA"]
    assert good.peer is not None
    assert good.ratio == pytest.approx(good.ours / good.peer)
    assert good.fraction_of_limit == pytest.approx(good.ours / good.limit)


@pytest.mark.usefixtures("hurried")
def test_a_failing_contender_is_a_row_with_its_reason() -> None:
    row = measure("prefill fp16 (4,2,64) 100", [Failing()])["failing"]
    assert row.peer is None
    assert row.ours is not None
    assert row.notes[0] == "failing failed: RuntimeError: no such kernel"


@pytest.mark.usefixtures("hurried")
def test_a_wrong_result_of_ours_keeps_the_peer_without_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Ours.bind

    def spoiled(self: Ours, case: Case, query: torch.Tensor, layers: list[torch.Tensor]) -> Bound:
        bound = bind(self, case, query, layers)
        return Bound([lambda call=call: call() * 2 for call in bound.calls], bound.load)

    monkeypatch.setattr(Ours, "bind", spoiled)
    row = measure("decode fp16 (4,2,64) 100 b1", [Sdpa()])["torch SDPA"]
    assert (row.ours, row.ratio, row.fraction_of_limit) == (None, None, None)
    assert row.peer is not None
    assert any("ours is wrong" in note for note in row.notes)


def test_a_case_too_large_for_memory_is_a_row_with_the_reason() -> None:
    rows = measure("decode fp32 (128,128,256) 1024K b64", [Sdpa()])
    assert list(rows) == ["None"]
    assert "may be used here" in rows["None"].notes[0]


def test_an_unknown_contender() -> None:
    with pytest.raises(ValueError, match="choose from ours, sdpa, vllm"):
        contenders(["theirs"])


def test_without_a_cpu_build_of_vllm_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """This is the package's ordinary environment, where vLLM itself would print a warning about a missing module."""
    case = parse_case("decode bf16 (8,2,64) 512 b1", 128)
    vllm_native._operators.cache_clear()
    assert "compiled CPU kernels" in (vllm_native.CpuAttn().why_not(case) or "")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    vllm_native._operators.cache_clear()
    assert vllm_native.CpuAttn().why_not(case) == "vLLM is not installed here."
    vllm_native._operators.cache_clear()
