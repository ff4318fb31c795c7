"""The tables of devices, hosts and links."""

from __future__ import annotations

import pytest

from fastattention_vllm.plan.errors import PlanError
from fastattention_vllm.plan.hardware import GIB, Curve, machine, measured, tables


def test_every_name_leads_somewhere() -> None:
    known = tables()
    for device in known.devices.values():
        assert device.host in known.hosts
        assert device.peers in known.peers
        assert device.kernels in known.kernels
    assert set(known.kernels) == {device.kernels for device in known.devices.values()}


def test_what_nobody_has_run_is_called_so() -> None:
    kernels = tables().kernels
    assert {name for name, one in kernels.items() if "not yet run" in one.state} == {"volta", "turing", "ascend"}
    assert "unverified" in tables().devices["ascend-910b-64g"].source


@pytest.mark.parametrize("name", tables().devices)
def test_every_device_fits_into_its_usual_host(name: str) -> None:
    found = machine(name, 1)
    assert found.free_host_bytes == found.host.memory_gib * GIB - measured().server_gib.value * GIB
    assert found.host.link_bytes(1) == 1e9 * found.host.link_gb_per_s


def test_devices_share_links_and_memory() -> None:
    one, eight = machine("v100-32g", 1), machine("v100-32g", 8)
    assert eight.host.link_bytes(8) == one.host.link_bytes(1) / 2, "two of a DGX-1 share a switch"
    assert eight.free_host_bytes < one.free_host_bytes / 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("v100", 1), "--gpu v100 is not known; known names: v100-16g,"),
        (("v100-32g", 1, "mainframe"), "--host mainframe is not known; known names: dgx-1,"),
        (("rtx3090-24g", 4), "host desktop-pcie4 has (2); use --host dgx-1 or"),
        (("v100-32g", 64), "--tp 8 or less"),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, int], said: str) -> None:
    with pytest.raises(PlanError) as error:
        machine(*arguments)
    assert said in str(error.value)


def test_the_users_numbers_replace_the_table() -> None:
    found = machine("v100-32g", 8, memory_gib=100.0, read_gb_per_s=50.0, cores=4, link_gb_per_s=6.0).host
    assert (found.memory_gib, found.read_gb_per_s, found.cores) == (100, 50, 4)
    assert found.link_bytes(8) == 3e9, "in the proportion of the table"
    assert tables().hosts["dgx-1"].memory_gib == 512


def test_heads_that_are_too_large_are_refused() -> None:
    kernels = tables().kernels["volta"]
    assert kernels.attention_fraction(128) > kernels.attention_fraction(256)
    with pytest.raises(PlanError, match="heads of size 512"):
        kernels.attention_fraction(512)


def test_a_curve_has_straight_lines_over_the_logarithm() -> None:
    curve = Curve(points=((1, 0.2), (4, 0.6)), what="x", source="y")
    assert [curve.at(number) for number in (0.5, 1, 2, 4, 100)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
