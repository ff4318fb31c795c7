"""Every option of vLLM is in one table, and every entry of the table is covered by a test."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from fastattention_vllm.integration.support import UNSUPPORTED
from scripts import vllm_options, vllm_surface
from scripts.vllm_options import KINDS, Concerned

ROOT = Path(__file__).resolve().parents[2]
TABLE = vllm_options.read()
SURFACES = {version: cast(vllm_surface.Surface, vllm_surface.recorded(version)) for version in vllm_surface.versions()}
ON_THE_HOST = {"--kv-sharing-fast-prefill", "a KV connector", "data parallelism", "context parallelism", "--enable-dbo",
               "sleep mode"}  # fmt: skip
"""Features that tests/integration/host_layers/test_layers.py sees refused only with host layers."""
CONDITION = "only with "


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [*SURFACES, "installed"])
def test_no_option_is_missing(version: str, kind: str) -> None:
    surface = vllm_surface.installed() if version == "installed" else SURFACES[version]
    missing = set(surface[kind]) - set(TABLE.names(kind))
    assert not missing, f"vLLM {version}: add {sorted(missing)} to {vllm_options.TABLE.name}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_option_is_listed_once_and_exists(kind: str) -> None:
    counts = Counter(TABLE.names(kind))
    assert [name for name, count in counts.items() if count > 1] == []
    assert set(counts) <= {name for surface in SURFACES.values() for name in surface[kind]}


@pytest.mark.parametrize("row", [row for row in TABLE.concerned if row.test], ids=lambda row: row.names[0])
def test_each_named_test_exists(row: Concerned) -> None:
    file, _, name = row.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name.rpartition("::")[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "row", [row for row in TABLE.concerned if row.cpu == "refused" and not row.test], ids=lambda row: row.names[0]
)
def test_refusals_on_cpus_are_in_the_start_up_check(row: Concerned) -> None:
    """tests/integration/test_support.py triggers each of them and checks the message."""
    assert row.note in {unsupported.feature for unsupported in UNSUPPORTED}


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE.concerned if row.host_layers == "refused" and row.cpu != "refused"],
    ids=lambda row: row.names[0],
)
def test_refusals_of_host_layers_are_tested(row: Concerned) -> None:
    assert row.note in ON_THE_HOST


def test_conditions_name_an_option() -> None:
    options = {vllm_options.flag(kind, name) for kind in KINDS for name in TABLE.names(kind)}
    words = {"context parallelism", "pipeline parallelism"}
    for row in TABLE.concerned:
        if row.note.startswith(CONDITION):
            assert row.note.removeprefix(CONDITION) in options | words
