from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import cloudpickle
import pytest

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]


def test_the_name_is_accepted_in_any_case_and_resolves_to_our_class() -> None:
    from vllm.config.attention import AttentionConfig

    member = compat.ensure_backend_member()
    assert AttentionConfig.validate_backend_before("fastattention") is member
    assert AttentionConfig.validate_backend_before("FastAttention") is member
    assert member.get_class().get_name() == member.name == "FASTATTENTION"


def test_registering_twice_changes_nothing() -> None:
    assert compat.ensure_backend_member() is compat.ensure_backend_member()


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_the_member_survives_pickling_into_a_process_that_has_loaded_no_plugin(dumps: object) -> None:
    payload = dumps(compat.ensure_backend_member())  # type: ignore[operator]
    code = (
        "import pickle, sys; member = pickle.load(sys.stdin.buffer); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E; "
        "assert E['FASTATTENTION'] is member; print(member.get_path())"
    )
    result = subprocess.run([sys.executable, "-c", code], input=payload, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    assert compat.BACKEND_PATH in result.stdout.decode()


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.19.1", "1.0.0"])
def test_a_vllm_outside_the_range_is_refused_by_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(Refusal, match=version):
        compat.check_vllm_version()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1.post1", "0.32.0rc1"])
def test_builds_of_a_supported_vllm_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    compat.check_vllm_version()


def test_the_cpu_extra_installs_a_supported_vllm() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (p.removeprefix("vllm==") for p in extras["cpu"] if p.startswith("vllm=="))
    assert compat.SUPPORTED_VLLM.contains(pin)
    assert f"vllm=={pin}" in (ROOT / "constraints" / "cpu.txt").read_text()
