"""Schemathesis sends what the server's OpenAPI schema allows, and what it does not: no answer is a failed server."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from fastattention_vllm.demo.model import build_demo_model
from tests.server.conftest import ROOT
from tests.server.test_host_layers import HOST_BLOCKS, MODEL, gib, question, serving

OURS = ["/fastattention", "/fastattention/status", "/metrics"]
SCHEMA = {
    "openapi": "3.1.0",
    "info": {"title": "what this package adds, which vLLM's own schema does not list", "version": "1"},
    "paths": {
        path: {
            "get": {
                "parameters": [{"name": "name", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "an answer"}},
            }
        }
        for path in OURS
    },
}
NOT_IMPLEMENTED = "/v1/systemone"
"""vLLM answers 501, correctly: the demo model does not support it."""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_request_fails_the_server(tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    program = str(tmp_path / "env" / "bin" / "schemathesis")
    subprocess.run([program.replace("schemathesis", "pip"), "install", "--quiet", *groups["requests"]], check=True)
    own = tmp_path / "own.json"
    own.write_text(json.dumps(SCHEMA))
    model = build_demo_model(tmp_path / "demo", MODEL)
    with serving(model, tmp_path / "serve.log", gib(HOST_BLOCKS + 0.5)) as server:
        listed = httpx.get(f"{server.url}/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", NOT_IMPLEMENTED} <= set(listed)
        for schema in (f"{server.url}/openapi.json", str(own)):
            command = [program, "run", schema, "--url", server.url, "--checks", "not_a_server_error"]
            command += ["--exclude-path", NOT_IMPLEMENTED, "--phases", "fuzzing", "--max-examples", "25", "--seed", "1"]
            done = subprocess.run(
                [*command, "--request-timeout", "60"], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr
            assert "0 generated" not in done.stdout
        assert server.ask(question(41, 700)) == "41"
    assert "Traceback" not in server.log.read_text().split("Application startup complete")[1].split("SIGINT")[0]
