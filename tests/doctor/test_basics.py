"""`fastattention doctor` alone: what this machine is."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.doctor import basics
from fastattention_vllm.placement import cgroups
from tests.doctor.test_tensor_parallel import doctor


def test_it_says_what_this_machine_is() -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(lines) == {"hardware", "limits", "memory", "GPUs", "CPU", "versions"}
    assert f"kernels for {cpu.usable_isas()[0]}" in lines["CPU"]
    assert f"torch {torch.__version__}" in lines["versions"]
    assert f"vllm {importlib.metadata.version('vllm')}" in lines["versions"]


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "cpus", lambda *root: 3)
    monkeypatch.setattr(cgroups, "memory_left", lambda *root: 1 << 29)
    assert "limits     control groups allow the time of 3 CPUs and 0.5 GiB more of memory" in list(basics.basics())


def test_a_library_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def isa() -> str:
        raise RuntimeError("there is no library.")

    monkeypatch.setattr(cpu, "isa", isa)
    assert "CPU        kernels cannot run: there is no library." in list(basics.basics())
