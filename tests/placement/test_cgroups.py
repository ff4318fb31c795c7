"""Limits of control groups in fake trees: both versions, nested, in containers and outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastattention_vllm.bench import machine
from fastattention_vllm.placement import cgroups, host_memory
from fastattention_vllm.placement import cpus as topology

MIB = 1 << 20
NONE_V1 = "9223372036854771712"


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")
    return tmp_path


def own(tree: Path, text: str) -> None:
    (tree / "own").write_text(text)


def files(tree: Path, group: str, **contents: str) -> None:
    folder = tree / "cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_no_limits_are_found_without_limits(tree: Path) -> None:
    assert (cgroups.memory_left(), cgroups.cpus()) == (None, None)
    own(tree, "0::/user.slice\n")
    files(tree, "user.slice", memory__max="max", cpu__max="max 100000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (None, None)


def test_the_tightest_of_nested_groups_applies(tree: Path) -> None:
    """As systemd's MemoryMax= and CPUQuota= set them, for a service or for its slice."""
    own(tree, "0::/system.slice/vllm.service\n")
    files(tree, "system.slice/vllm.service", memory__max=str(900 * MIB), memory__current=str(100 * MIB))
    assert cgroups.memory_left() == 800 * MIB
    files(tree, "system.slice", memory__max=str(1000 * MIB), memory__current=str(700 * MIB), cpu__max="350000 100000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (300 * MIB, 4)
    files(tree, "system.slice/vllm.service", cpu__max="100000 100000")
    assert cgroups.cpus() == 1
    files(tree, "system.slice/another.service", memory__max="1", memory__current="1")
    assert cgroups.memory_left() == 300 * MIB


def test_the_limit_above_which_linux_slows_processes_down_applies_too(tree: Path) -> None:
    """As systemd's MemoryHigh= and the kubelet's memory QoS set it."""
    own(tree, "0::/a/b\n")
    files(tree, "a/b", memory__max="max", memory__high=str(300 * MIB), memory__current=str(100 * MIB))
    assert cgroups.memory_left() == 200 * MIB
    files(tree, "a", memory__max=str(250 * MIB), memory__high=str(900 * MIB), memory__current=str(100 * MIB))
    assert cgroups.memory_left() == 150 * MIB


def test_version_1_is_supported(tree: Path) -> None:
    own(tree, "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n")
    files(tree, "memory", memory__limit_in_bytes=NONE_V1, memory__usage_in_bytes="5")
    files(tree, "cpu,cpuacct/docker/a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (None, None)
    files(
        tree,
        "memory/docker/a",
        memory__limit_in_bytes=str(500 * MIB),
        memory__usage_in_bytes=str(450 * MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
    )
    files(tree, "cpu,cpuacct/docker", cpu__cfs_quota_us="50000", cpu__cfs_period_us="20000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (150 * MIB, 3)


@pytest.mark.parametrize("path", ["/docker/of-the-host", "/../another"])
def test_a_container_without_its_path_uses_its_root(tree: Path, path: str) -> None:
    own(tree, f"4:memory:{path}\n0::{path}\n")
    files(tree, "memory", memory__limit_in_bytes=str(64 * MIB), memory__usage_in_bytes="0")
    files(tree, ".", cpu__max="200000 100000")
    files(tree, "../another", cpu__max="100000 100000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (64 * MIB, 2)


def test_names_of_groups_are_bytes(tree: Path) -> None:
    r"""Linux allows every byte but 0, / and \n in them, so those who make groups may, too."""
    name = os.fsdecode(b"a\xff:\xc2\x85b\rc")
    (tree / "own").write_bytes(b"garbage\n7\n\xfe\n0::/" + os.fsencode(name) + b"\n")
    files(tree, name, memory__max=str(5 * MIB), memory__current="0", cpu__max="\u00b2 100000")
    assert (cgroups.memory_left(), cgroups.cpus()) == (5 * MIB, None)


def test_all_callers_see_the_same_limits(tree: Path) -> None:
    own(tree, "0::/a/b\n")
    files(tree, "a", memory__max=str(8 * MIB), memory__current=str(5 * MIB), cpu__max="100000 100000")
    assert host_memory.available_bytes() == machine.available_memory() == 3 * MIB
    assert len(topology.physical_cpus()) == 1


def test_an_absent_file_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(" 5\n")
    assert cgroups.read_text(tmp_path / "a", "7") == "5"
    assert cgroups.read_text(tmp_path / "b", "7") == "7"
