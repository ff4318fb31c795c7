"""The parts of scripts/setup_env.py that a successful install does not exercise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import setup_env

ROOT = Path(__file__).resolve().parents[2]


def install_record(packages: Path, version: str, *files: str) -> Path:
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"{name},sha256=x,1\n" for name in ("vllm/__init__.py", *files)))
    return packages


def test_the_pure_python_vllm_is_accepted(tmp_path: Path) -> None:
    assert setup_env.wrong_vllm(install_record(tmp_path, setup_env.VLLM_VERSION)) is None


@pytest.mark.parametrize(
    ("version", "files", "named"),
    [
        ("0.31.0", (), "0.31.0"),
        (setup_env.VLLM_VERSION + "+cpu", (), "+cpu"),
        (setup_env.VLLM_VERSION, ("vllm/_C.abi3.so",), "vllm/_C.abi3.so"),
    ],
)
def test_a_wrong_vllm_from_a_wheel_cache_is_detected(
    version: str, files: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    problem = setup_env.wrong_vllm(install_record(tmp_path, version, *files))
    assert problem is not None
    assert named in problem


def test_a_missing_vllm_is_detected(tmp_path: Path) -> None:
    assert setup_env.wrong_vllm(tmp_path) is not None


def test_a_wrong_cached_build_is_installed_again_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
        calls.append(arguments)
        assert environment is not None
        assert environment["VLLM_TARGET_DEVICE"] == "empty"
        if len(calls) == 1:
            install_record(tmp_path, setup_env.VLLM_VERSION, "vllm/_C.abi3.so")
        else:
            (tmp_path / f"vllm-{setup_env.VLLM_VERSION}.dist-info" / "RECORD").write_text("vllm/__init__.py,,\n")

    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setattr(setup_env, "site_packages", lambda: tmp_path)
    monkeypatch.setattr(setup_env, "log", lambda text: None)
    setup_env.install_vllm()
    assert "--no-cache-dir" not in calls[0]
    assert {"--no-cache-dir", "--force-reinstall"} <= set(calls[1])


def test_a_step_runs_again_only_when_its_inputs_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_env, "DONE", tmp_path / "done.json")
    ran: list[str] = []
    inputs = {"a": "1", "b": "1"}

    def steps() -> list[setup_env.Step]:
        return [
            setup_env.Step(name, lambda name=name: ran.append(name), lambda name=name: [inputs[name]])  # type: ignore[misc]
            for name in inputs
        ]

    setup_env.run_steps(steps())
    setup_env.run_steps(steps())
    assert ran == ["a", "b"]
    inputs["b"] = "2"
    setup_env.run_steps(steps())
    assert ran == ["a", "b", "b"]
    inputs["a"] = "2"
    setup_env.run_steps(steps())
    assert ran == ["a", "b", "b", "a", "b"], "steps after a changed step must run again"


def run_setup(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "setup_env.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_compiler_is_one_sentence(tmp_path: Path) -> None:
    result = run_setup(PATH=str(tmp_path))
    assert result.returncode != 0
    assert "the CPU kernels need a C++ compiler, but none was found" in result.stderr
    assert "apt-get install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_cxx_is_named(tmp_path: Path) -> None:
    result = run_setup(PATH="/usr/bin:/bin", CXX="no-such-compiler")
    assert result.returncode != 0
    assert "CXX=no-such-compiler" in result.stderr


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "PYTHON_RANGE", ((3, 90), (3, 91)))
    with pytest.raises(setup_env.SetupError, match=r"needs Python 3\.90"):
        setup_env.check_machine()
