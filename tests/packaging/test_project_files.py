"""Files that GitHub and citation tools read are valid, and everything that they name exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastattention_vllm import __version__

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def load(path: Path) -> dict[Any, Any]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["authors"] == [{"name": "fastattention-vllm"}]
    (paper,) = citation["references"]
    assert paper["url"].endswith("2410.16663")
    assert all(author["family-names"] and author["given-names"] for author in paper["authors"])


def test_workflows_and_forms_exist() -> None:
    assert {path.name for path in WORKFLOWS} == {"ci.yml", "release.yml"}
    assert {path.name for path in FORMS} == {"bug.yml", "hardware.yml"}


def test_continuous_integration_runs_the_same_as_ci_run() -> None:
    commands = [step["run"] for step in steps(ROOT / ".github" / "workflows" / "ci.yml") if "run" in step]
    assert commands[-1] == "bash .ci/run"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_make_targets_exist(workflow: Path) -> None:
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), f"{step['uses']} may change under its tag"
        for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE):
            subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_issue_forms_meet_githubs_requirements(form: Path) -> None:
    page = load(form)
    assert page["name"]
    assert page["description"]
    names = [field["id"] for field in page["body"] if field["type"] != "markdown"]
    assert len(names) == len(set(names)) > 0
    for field in page["body"]:
        assert field["type"] in FIELDS
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)", release) for release in releases)
    assert releases[0].split()[0] == __version__


def test_the_full_tests_run_only_on_demand() -> None:
    collected = subprocess.run(
        ["make", "--dry-run", "test", "test-more"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    selections = re.findall(r'pytest -m "(.*?)"', collected)
    assert len(selections) == 2
    assert all(selection.endswith("and not full") for selection in selections)
    assert "test-full" not in (ROOT / ".ci" / "run").read_text()
