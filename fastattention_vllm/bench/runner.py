"""Measures cases: everyone who can run one, next to the plain read of its pages and the arithmetic peak.

Used by: command.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.bench import limits, machine
from fastattention_vllm.bench.cases import Case
from fastattention_vllm.bench.contenders import OURS, CpuContender
from fastattention_vllm.bench.correctness import Checker, Verdict, make_query
from fastattention_vllm.bench.cpu_report import CpuRow
from fastattention_vllm.bench.measure import Subject, run_rounds
from fastattention_vllm.bench.memory import Arena, plan_rotation

READ, PEAK = "plain read", "arithmetic peak"


@dataclass(slots=True)
class Entry:
    """A contender in one case."""

    contender: CpuContender
    subject: Subject | None = None
    verdict: Verdict | None = None
    note: str | None = None

    @property
    def seconds(self) -> float | None:
        """Median; none where there is no right answer."""
        return self.subject.samples.median if self.subject is not None else None


class Runner:
    """Keeps memory and what was found out about the machine from case to case."""

    def __init__(
        self, contenders: list[CpuContender], threads: int, rounds: int, sweep_bytes: int | None = None
    ) -> None:
        self.contenders, self.threads, self.rounds, self.sweep_bytes = contenders, threads, rounds, sweep_bytes
        self._arena = Arena()
        self._peaks: dict[str, limits.Peak] = {}

    @torch.inference_mode()
    def measure(self, case: Case) -> list[CpuRow]:
        """One row per peer, or one without a peer where none can run the case."""
        try:
            rotation = plan_rotation(case, self._arena.available(), machine.last_level_cache(), self.sweep_bytes)
        except MemoryError as error:
            return rows_of(case, [], None, self, [str(error)])
        layers = self._arena.layers(case, rotation.layers)
        query = make_query(case)
        entries = self._enter(case, query, layers)

        readers = limits.page_readers(case, layers)
        method = limits.fastest_read(readers, rotation)
        read = Subject(READ, [functools.partial(reader.read, method) for reader in readers])
        if case.dtype not in self._peaks:
            self._peaks[case.dtype] = limits.fastest_peak(case.dtype)
        peak = self._peaks[case.dtype]
        arithmetic = Subject(PEAK, [peak], sample_seconds=0.0)

        subjects = [read, arithmetic, *(entry.subject for entry in entries if entry.subject is not None)]
        run_rounds(subjects, rotation, self.rounds)
        found = Findings(
            case=case,
            read=read,
            arithmetic=arithmetic,
            flops_of_peak=peak.flops,
            peak_kind=peak.kind,
            read_method=str(method),
            disturbed=sum(len(subject.samples.disturbed) for subject in subjects),
            sweep_bytes=rotation.layers * case.kv_bytes,
        )
        return rows_of(case, entries, found, self, [rotation.note] if rotation.note else [])

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
    """What was measured of the machine during a case."""

    case: Case
    read: Subject
    arithmetic: Subject
    flops_of_peak: float
    peak_kind: str
    read_method: str
    disturbed: int
    sweep_bytes: int

    @property
    def flops_rate(self) -> float:
        """FLOP/s."""
        return self.flops_of_peak / self.arithmetic.samples.median

    @property
    def roofline(self) -> limits.Roofline:
        return limits.Roofline(self.read.samples.median, self.case.flops / self.flops_rate)


def rows_of(case: Case, entries: list[Entry], found: Findings | None, runner: Runner, notes: list[str]) -> list[CpuRow]:
    """One row per peer among ``entries``, or one without a peer."""
    decode = case.kind == "decode"
    amount = case.kv_bytes / 1e9 if decode else case.flops / 1e12

    def speed(seconds: float | None) -> float | None:
        return None if seconds is None else amount / seconds

    ours = next((entry for entry in entries if entry.contender.peer == OURS), None)
    our_seconds = ours.seconds if ours is not None else None
    row = CpuRow(
        case=str(case),
        metric="decode KV read rate" if decode else "prefill rate",
        unit="GB/s" if decode else "TFLOPS",
        ours=speed(our_seconds),
        threads=runner.threads,
        isa=cpu.isa(),
        milliseconds=1e3 * our_seconds if our_seconds is not None else None,
    )
    involved: list[Subject] = []
    if ours is not None:
        notes = notes + ([ours.note] if ours.note is not None else [])
        row.error = ours.verdict.error if ours.verdict is not None else None
        if ours.subject is not None:
            row.iqr, row.samples = ours.subject.samples.iqr, len(ours.subject.samples.clean)
            involved.append(ours.subject)
    if found is not None:
        row.limit = speed(found.roofline.seconds)
        row.fraction_of_limit = found.roofline.seconds / our_seconds if our_seconds is not None else None
        row.longer = found.roofline.longer
        row.read_gbs, row.read_method = case.kv_bytes / found.roofline.read / 1e9, found.read_method
        row.peak_tflops, row.peak_kind = found.flops_rate / 1e12, found.peak_kind
        row.disturbed, row.sweep_gib = found.disturbed, found.sweep_bytes / 2**30
        involved.append(found.read if found.roofline.longer == "read" else found.arithmetic)

    peers = dict.fromkeys(entry.contender.peer for entry in entries if entry.contender.peer != OURS)
    rows = [
        against(row, peer, [entry for entry in entries if entry.contender.peer == peer], speed, involved, notes)
        for peer in peers
    ]
    if rows:
        return rows
    return [row.model_copy(update=quality(involved, notes))]


def against(
    row: CpuRow,
    peer: str,
    group: list[Entry],
    speed: Callable[[float | None], float | None],
    involved: list[Subject],
    notes: list[str],
) -> CpuRow:
    """``row`` with the fastest of ``group``, whose members all stand for ``peer``."""
    timed = [entry for entry in group if entry.seconds is not None]
    best = min(timed, key=lambda entry: entry.seconds or 0.0) if timed else group[0]
    other = row.model_copy(update={"peer_name": peer, "peer_variant": best.contender.name})
    if best.subject is not None and best.seconds is not None:
        other.peer, other.peer_milliseconds = speed(best.seconds), 1e3 * best.seconds
        other.peer_iqr = best.subject.samples.iqr
        other.ratio = 1e3 * best.seconds / row.milliseconds if row.milliseconds is not None else None
        involved = [*involved, best.subject]
    if best.verdict is not None:
        other.peer_error = best.verdict.error
    # That one of several variants does not apply is no news; that one is wrong is.
    reasons = [entry.note for entry in group if entry.note is not None and (entry.verdict or not timed)]
    return other.model_copy(update=quality(involved, [*notes, *dict.fromkeys(reasons)]))


def quality(involved: list[Subject], notes: list[str]) -> dict[str, object]:
    """``reliable`` and ``notes`` of a row that rests on these subjects."""
    unsure = [subject.name for subject in involved if not subject.samples.clean]
    if unsure:
        names = ", ".join(unsure)
        notes = [*notes, f"Threads waited for a CPU in every sample of {names}: measure again on an idle machine."]
    return {"reliable": not unsure, "notes": notes}
