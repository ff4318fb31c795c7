"""deploy/grafana and deploy/prometheus: their form, and that every metric in them exists."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.v1.metrics import loggers

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
SUFFIX = r"(_total|_bucket|_sum|_count)$"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]


def ours() -> dict[str, set[str]]:
    """The metrics of the page, which another test compares with a scrape, and their labels."""
    rows = [line.split("|")[1:3] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    found = {name.strip(" `"): set(re.findall(r"`(\w+)`", labels)) for name, labels in (r for r in rows if len(r) == 2)}
    return {name: labels for name, labels in found.items() if name.startswith("fastattention:")}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_exists(expression: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    vllms = set(re.findall(r"vllm:\w+", inspect.getsource(loggers)))
    names = set(re.findall(r"\b(?:fastattention|vllm):[\w:]+", expression)) - recorded
    assert names or recorded & set(re.findall(r"[\w:]+", expression))
    for name in names:
        known = name in ours() if name.startswith("fastattention") else re.sub(SUFFIX, "", name) in vllms
        assert known, name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_label_of_this_package_exists(expression: str) -> None:
    """Prometheus itself adds instance and job; le belongs to histograms."""
    names = [name for name in ours() if name in expression]
    labels = set().union(*(ours()[name] for name in names)) | {"instance", "job", "le"}
    grouped = {label for part in re.findall(r"(?:by|on) \(([^)]+)\)", expression) for label in part.split(", ")}
    matched = set(re.findall(r"(\w+)=~?\"", expression))
    assert grouped | matched <= labels


def test_the_dashboard_has_the_form_that_grafana_imports() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(dashboard)
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__range", "__all"}
    assert used == variables == {"datasource", "instance"}
    assert len({panel["id"] for panel in panels()}) == len(panels()) > 10
    for panel in panels():
        assert {"type", "title", "description", "gridPos", "targets", "fieldConfig"} <= set(panel)
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


def test_no_panel_covers_another() -> None:
    cells = {
        panel["title"]: {
            (x, y)
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        }
        for panel in panels()
    }
    assert all(x < 24 for area in cells.values() for x, _ in area)
    assert not [pair for pair in combinations(cells, 2) if cells[pair[0]] & cells[pair[1]]]


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert set(rule["annotations"]) == {"summary", "description"}


CASES = {
    "rule_files": [str(RULES)],
    "evaluation_interval": "1m",
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                {
                    "series": f'fastattention:host_pool_bytes{{instance="a", job="b", rank="{rank}", state="{state}"}}',
                    "values": f"{size}x30",
                }
                for rank, state, size in ((0, "free", 4), (0, "used", 96), (1, "free", 50), (1, "used", 50))
            ]
            + [{"series": 'fastattention:stats_age_seconds{instance="a", job="b"}', "values": "1x10 300x20"}],
            "alert_rule_test": [
                {
                    "eval_time": "20m",
                    "alertname": name,
                    "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}],
                }
                for name, labels, annotations in (
                    (
                        "FastAttentionHostPoolFull",
                        {"severity": "warning", "instance": "a", "job": "b", "rank": "0"},
                        {"summary": "The host pool of a, rank 0, has 4% left."},
                    ),
                    (
                        "FastAttentionWorkersSilent",
                        {"severity": "critical", "instance": "a", "job": "b"},
                        {"summary": "The workers of a have not reported for 5m 0s."},
                    ),
                )
            ],
        }
    ],
}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="takes promtool from Debian's package prometheus")
def test_promtool_accepts_the_rules_and_the_alerts_fire(tmp_path: Path) -> None:
    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run("apt-get", "download", "prometheus")
    (package,) = tmp_path.glob("prometheus_*.deb")
    run("dpkg", "-x", str(package), str(tmp_path))
    promtool = str(tmp_path / "usr" / "bin" / "promtool")
    run(promtool, "check", "rules", str(RULES))
    descriptions = {rule["alert"]: rule["annotations"]["description"] for rule in rules() if "alert" in rule}
    for case in CASES["tests"][0]["alert_rule_test"]:  # type: ignore[index]
        for alert in case["exp_alerts"]:
            alert["exp_annotations"]["description"] = descriptions[case["alertname"]]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(CASES))
    run(promtool, "test", "rules", "cases.yaml")
