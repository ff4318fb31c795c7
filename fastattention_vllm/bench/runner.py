"""Measures cases: everyone who can run one, next to the plain read of its pages and the arithmetic peak."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastattention_vllm.attention import cpu, roof
from fastattention_vllm.bench import limits, machine
from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.contenders import OURS, Contender
from fastattention_vllm.bench.correctness import Checker, Verdict, make_query
from fastattention_vllm.bench.measure import Rotation, Subject, run_rounds
from fastattention_vllm.bench.memory import Arena, plan_rotation
from fastattention_vllm.bench.report import Row

READ, PEAK = "plain read", "arithmetic peak"


@dataclass(slots=True)
class Entry:
    """A contender in one case."""

    contender: Contender
    subject: Subject | None = None
    verdict: Verdict | None = None
    note: str | None = None

    @property
    def seconds(self) -> float | None:
        """Median; none where there is no right answer."""
        return self.subject.samples.median if self.subject is not None else None


class Runner:
    """Keeps memory and what was found out about the machine from case to case."""

    def __init__(self, contenders: list[Contender], threads: int, rounds: int) -> None:
        self.contenders, self.threads, self.rounds = contenders, threads, rounds
        self._arena = Arena()
        self._read_method: roof.ReadMethod | None = None
        self._peaks: dict[str, limits.Peak] = {}

    @torch.inference_mode()
    def measure(self, case: Case) -> list[Row]:
        """One row per peer, or one without a peer where none can run the case."""
        try:
            plan = plan_rotation(case, self._arena.available(), machine.last_level_cache())
        except MemoryError as error:
            return rows_of(case, [], None, self, note=str(error))
        layers = self._arena.layers(case, plan.layers)
        query = make_query(case)
        entries = self._enter(case, query, layers)

        readers = limits.page_readers(case, layers)
        if self._read_method is None:
            self._read_method = limits.fastest_read(readers)
        method = self._read_method
        read = Subject(READ, [functools.partial(reader.read, method) for reader in readers])
        if case.dtype not in self._peaks:
            self._peaks[case.dtype] = limits.fastest_peak(case.dtype)
        peak = self._peaks[case.dtype]
        arithmetic = Subject(PEAK, [peak], sample_seconds=0.0)

        subjects = [read, arithmetic, *(entry.subject for entry in entries if entry.subject is not None)]
        run_rounds(subjects, Rotation(plan.layers), self.rounds)
        found = Findings(
            case=case,
            read=read.samples.median,
            flops_rate=peak.flops / arithmetic.samples.median,
            peak_kind=peak.kind,
            read_method=str(method),
            disturbed=sum(len(subject.samples.disturbed) for subject in subjects),
            sweep_bytes=plan.layers * case.kv_bytes,
        )
        return rows_of(case, entries, found, self, note=plan.note)

    def _enter(self, case: Case, query: torch.Tensor, layers: list[torch.Tensor]) -> list[Entry]:
        entries = []
        checker: Checker | None = None
        for contender in self.contenders:
            entry = Entry(contender, note=contender.why_not(case))
            entries.append(entry)
            if entry.note is not None:
                continue
            checker = checker or Checker(case, query)
            try:
                bound = contender.bind(case, query, layers)
                entry.verdict = checker.check(bound)
            except Exception as error:  # a peer that fails is a finding, not the end of the run
                entry.note = f"{contender.name} failed: {type(error).__name__}: {error}"
                continue
            if entry.verdict.wrong:
                entry.note = (
                    f"{contender.name} is wrong: its error is {entry.verdict.error:.2g} of the answer's size, "
                    f"{entry.verdict.allowed:.2g} would be rounding."
                )
                continue
            entry.subject = Subject(contender.name, list(bound.calls))
        return entries


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured of the machine during a case. Seconds per layer, FLOP/s, bytes."""

    case: Case
    read: float
    flops_rate: float
    peak_kind: str
    read_method: str
    disturbed: int
    sweep_bytes: int

    @property
    def roof(self) -> limits.Roof:
        return limits.Roof(self.read, self.case.flops / self.flops_rate)


def rows_of(case: Case, entries: list[Entry], found: Findings | None, runner: Runner, note: str | None) -> list[Row]:
    decode = case.kind == "decode"
    amount = case.kv_bytes / 1e9 if decode else case.flops / 1e12

    def speed(seconds: float | None) -> float | None:
        return None if seconds is None else amount / seconds

    ours = next((entry for entry in entries if entry.contender.peer == OURS), None)
    our_seconds = ours.seconds if ours is not None else None
    notes = [note, ours.note if ours is not None else None]
    row = Row(
        case=str(case),
        metric="decode KV read rate" if decode else "prefill rate",
        unit="GB/s" if decode else "TFLOPS",
        ours=speed(our_seconds),
        peer_name=None,
        peer=None,
        ratio=None,
        limit=None,
        fraction_of_limit=None,
        threads=runner.threads,
        isa=cpu.isa(),
        milliseconds=1e3 * our_seconds if our_seconds is not None else None,
    )
    if ours is not None and ours.subject is not None:
        row.iqr, row.samples = ours.subject.samples.iqr, len(ours.subject.samples.clean)
    if ours is not None and ours.verdict is not None:
        row.error = ours.verdict.error
    if found is not None:
        row.limit = speed(found.roof.seconds)
        row.fraction_of_limit = found.roof.seconds / our_seconds if our_seconds is not None else None
        row.longer = found.roof.longer
        row.read_gbs, row.read_method = case.kv_bytes / found.read / 1e9, found.read_method
        row.peak_tflops, row.peak_kind = found.flops_rate / 1e12, found.peak_kind
        row.disturbed, row.sweep_gib = found.disturbed, found.sweep_bytes / 2**30

    rows = []
    peers = dict.fromkeys(entry.contender.peer for entry in entries if entry.contender.peer != OURS)
    for peer in peers:
        group = [entry for entry in entries if entry.contender.peer == peer]
        timed = [entry for entry in group if entry.seconds is not None]
        best = min(timed, key=lambda entry: entry.seconds or 0.0) if timed else group[0]
        other = row.model_copy(update={"peer_name": peer, "peer_variant": best.contender.name})
        other.peer = speed(best.seconds)
        if best.subject is not None and best.seconds is not None:
            other.peer_milliseconds, other.peer_iqr = 1e3 * best.seconds, best.subject.samples.iqr
            other.ratio = best.seconds / our_seconds if our_seconds is not None else None
        if best.verdict is not None:
            other.peer_error = best.verdict.error
        wrong = [entry.note for entry in group if entry.note is not None and (entry.verdict or not timed)]
        other.note = " ".join(text for text in [*notes, *wrong] if text) or None
        rows.append(other)
    row.note = " ".join(text for text in notes if text) or None
    return rows or [row]


Progress = Callable[[Case, list[Row], float], None]


def measure_all(runner: Runner, cases: list[Case], progress: Progress) -> list[Row]:
    rows = []
    for case in cases:
        start = time.perf_counter()
        found = runner.measure(case)
        progress(case, found, time.perf_counter() - start)
        rows += found
    return rows
