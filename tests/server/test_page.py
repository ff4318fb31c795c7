"""The status page of a real server in headless Chromium: light, dark and on a phone, with an API key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from fastattention_vllm.demo.model import build_demo_model
from tests.server.test_host_layers import HOST_BLOCKS, HOST_LAYERS, LENGTH, MODEL, gib, question, serving

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "a-key-for-this-test"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")
def test_the_page_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *groups["browser"]], check=True)
    model = build_demo_model(tmp_path / "demo", MODEL)
    with serving(model, tmp_path / "serve.log", gib(HOST_BLOCKS + 0.5), "--api-key", KEY) as server:
        bearer = {"Authorization": f"Bearer {KEY}"}
        for tokens in (700, LENGTH + 10):
            body = {"model": "demo", "prompt": question(41, tokens), "max_tokens": 20, "ignore_eos": True}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer, timeout=300)
        address = f"{server.url}/fastattention"
        command = [python, str(Path(__file__).with_name("browse.py")), str(CHROMIUM), address, str(tmp_path), KEY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert set(seen) == {"light", "dark", "phone"}
    for view in seen.values():
        # Chromium reports the two answers 401: without a key, and with the wrong one.
        assert [text for text in view["errors"] if "401" not in text] == []
        assert view["hosts"] == [address.split("/")[2]]
        assert "does not accept" in view["refused"]
        assert view["state"] == "Live"
        assert len(view["layers"]) == MODEL.num_layers
        assert sum("on the host" in name for name in view["layers"]) == HOST_LAYERS
        assert "of the blocks" in view["sections"]["pool"]
        assert "plain reads" in view["sections"]["rates"]
        assert "computes on CPUs" in view["sections"]["plan"]
        assert "done 200" in view["sections"]["requests"]
        assert "error 400" in view["sections"]["requests"]
        assert view["unnamed"] == 0
        assert view["overflow"] <= 0
        assert view["stored"] == [0, 0, ""]
    assert seen["light"]["ground"] != seen["dark"]["ground"]
    assert all((tmp_path / f"status-{name}.png").stat().st_size > 10_000 for name in seen)
