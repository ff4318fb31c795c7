"""deploy/kubernetes as the tests read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def of_kind(file: Path, *kinds: str) -> dict[str, Any]:
    (found,) = [document for document in documents(file) if document["kind"] in kinds]
    return found


def template(file: Path) -> dict[str, Any]:
    """The pod template of the server."""
    spec = of_kind(file, "Deployment", "RayCluster")["spec"]
    found: dict[str, Any] = spec["headGroupSpec"]["template"] if "headGroupSpec" in spec else spec["template"]
    return found


def as_deployment(cluster: dict[str, Any]) -> dict[str, Any]:
    """A Deployment with the same pods. Kubernetes' schemas do not have KubeRay's kinds, but their pods are ordinary."""
    pods = cluster["spec"]["headGroupSpec"]["template"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": cluster["metadata"],
        "spec": {"selector": {"matchLabels": pods["metadata"]["labels"]}, "template": pods},
    }
