"""Every option of vLLM stands in one table, and the table says nothing that no test shows."""

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
"""What tests/integration/host_layers/test_layers.py sees refused with host layers alone."""
CONDITION = "only with "


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [*SURFACES, "installed"])
def test_no_option_is_missing(version: str, kind: str) -> None:
    surface = vllm_surface.installed() if version == "installed" else SURFACES[version]
    missing = set(surface[kind]) - set(TABLE.names(kind))
    assert not missing, f"vLLM {version}: say in {vllm_options.TABLE.name} what becomes of {sorted(missing)}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_stands_there_once_and_exists(kind: str) -> None:
    counts = Counter(TABLE.names(kind))
    assert [name for name, count in counts.items() if count > 1] == []
    assert set(counts) <= {name for surface in SURFACES.values() for name in surface[kind]}


@pytest.mark.parametrize("row", [row for row in TABLE.concerned if row.test], ids=lambda row: row.names[0])
def test_the_test_that_is_named_exists(row: Concerned) -> None:
    file, _, name = row.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name.rpartition("::")[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "row", [row for row in TABLE.concerned if row.cpu == "refused" and not row.test], ids=lambda row: row.names[0]
)
def test_a_refusal_on_cpus_is_one_of_the_start_up_check(row: Concerned) -> None:
    """tests/integration/test_support.py asks for each of them, and reads the sentence."""
    assert row.note in {unsupported.feature for unsupported in UNSUPPORTED}


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE.concerned if row.host_layers == "refused" and row.cpu != "refused"],
    ids=lambda row: row.names[0],
)
def test_a_refusal_of_host_layers_is_one_of_theirs(row: Concerned) -> None:
    assert row.note in ON_THE_HOST


def test_what_is_asked_under_a_condition_names_an_option() -> None:
    options = {vllm_options.flag(kind, name) for kind in KINDS for name in TABLE.names(kind)}
    words = {"context parallelism", "pipeline parallelism"}
    for row in TABLE.concerned:
        if row.note.startswith(CONDITION):
            assert row.note.removeprefix(CONDITION) in options | words
