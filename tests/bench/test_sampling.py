from __future__ import annotations

import pytest

from fastattention_vllm.bench.sampling import Rotation, Samples, in_turn


def test_the_median_is_over_clean_samples() -> None:
    assert Samples(clean=[1.0, 2.0, 9.0], disturbed=[100.0]).median == 2.0
    assert Samples(disturbed=[100.0]).median == 100.0
    assert Samples(clean=[1.0, 2.0, 3.0, 4.0, 5.0]).iqr == pytest.approx(2 / 3)
    assert Samples(clean=[1.0]).iqr == 0.0


def test_every_other_round_runs_backwards() -> None:
    assert [list(in_turn("abc", number)) for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_a_rotation_begins_again_after_its_last_layer() -> None:
    rotation = Rotation(2)
    assert [rotation.next() for _ in range(3)] == [0, 1, 0]
