from __future__ import annotations

import itertools

import pytest

from fastattention_vllm.bench import machine, measure
from fastattention_vllm.bench.measure import Subject, run_rounds
from fastattention_vllm.bench.sampling import Rotation


def test_each_call_uses_the_next_layer() -> None:
    """No contender may find a layer in a cache because another one has just read it."""
    rotation = Rotation(3)
    seen: list[tuple[str, int]] = []
    subjects = [
        Subject(name, [lambda name=name, i=i: seen.append((name, i)) for i in range(3)], sample_seconds=0.0)
        for name in "ab"
    ]
    for subject in (*subjects, *subjects, *subjects):
        subject.sample(rotation)
    assert [layer for _, layer in seen] == [0, 1, 2, 0, 1, 2]
    assert {name for name, _ in seen} == {"a", "b"}


def test_disturbed_samples_are_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([0.0, 0.0, 5.0, 10.0])
    monkeypatch.setattr(machine, "run_delay", lambda: next(delays))
    subject = Subject("x", [lambda: None], sample_seconds=0.0)
    subject.sample(Rotation(1))
    subject.sample(Rotation(1))
    assert len(subject.samples.clean) == len(subject.samples.disturbed) == 1


@pytest.mark.usefixtures("hurried")
def test_rounds_are_interleaved_and_repeated_while_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PATIENCE_SECONDS", 60.0)
    order: list[str] = []
    subjects = [Subject(name, [lambda name=name: order.append(name)], sample_seconds=0.0) for name in "ab"]
    monkeypatch.setattr(machine, "run_delay", lambda: 0.0)
    run_rounds(subjects, Rotation(1), rounds=2)
    assert "".join(order) == "ab" + "abba", "a warm-up, then rounds in alternating order"
    clock = itertools.count()
    monkeypatch.setattr(machine, "run_delay", lambda: float(next(clock)))
    unlucky = Subject("c", [lambda: None], sample_seconds=0.0)
    run_rounds([unlucky], Rotation(1), rounds=2)
    assert len(unlucky.samples.disturbed) == 6, "three times as many, where no sample is clean"


@pytest.mark.usefixtures("hurried")
def test_slow_calls_are_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_delay", lambda: 0.0)
    for slow, samples in ((2.0, 3), (6.0, 1)):
        subject = Subject("x", [lambda: None], sample_seconds=0.0, slowest=slow)
        run_rounds([subject], Rotation(1), rounds=9)
        assert len(subject.samples.clean) == samples
