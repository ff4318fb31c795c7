"""deploy/systemd: the unit is valid, has few rights, and serves a command that vLLM accepts."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "fastattention.service"
EXPOSURE = 25
"""Of 100, as `systemd-analyze security` weighs it. It calls 20 to 50 "OK". Devices and JIT compilation cost points."""
NEEDED_CALLS = ("mbind", "sched_setaffinity", "madvise", "get_mempolicy")

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def settings() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    parser.optionxform = str  # keeps capital letters
    parser.read_string(UNIT.read_text())
    return parser["Service"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The unit with a program that exists on this machine."""
    copy = tmp_path / UNIT.name
    program = shlex.split(settings()["ExecStart"])[0]
    copy.write_text(UNIT.read_text().replace(f"ExecStart={program}", "ExecStart=/bin/true"))
    return copy


def test_vllm_parses_the_command() -> None:
    words = shlex.split(settings()["ExecStart"])
    assert Path(words[0]).name == "vllm"
    assert words[1:3] == ["serve", "--config"]
    words[3] = str(ROOT / "configs" / "cpu-server.yaml")
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    assert parser.parse_args(words[1:]).host == "127.0.0.1"


def test_it_starts_again_after_a_failure_and_can_pin_the_host_pool() -> None:
    found = settings()
    assert found["Restart"] == "on-failure"
    assert found["OOMPolicy"] == "stop"
    assert found["LimitMEMLOCK"] == "infinity"
    assert found["MemoryMax"].endswith("%")


@needs_systemd
def test_systemd_accepts_it(elsewhere: Path) -> None:
    result = subprocess.run(["systemd-analyze", "verify", elsewhere], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@needs_systemd
def test_systemd_would_notice_a_wrong_setting(elsewhere: Path) -> None:
    elsewhere.write_text(elsewhere.read_text().replace("OOMPolicy=", "OOMPolicies="))
    result = subprocess.run(["systemd-analyze", "verify", elsewhere], capture_output=True, text=True, check=False)
    assert "OOMPolicies" in result.stderr


@needs_systemd
def test_it_has_few_rights(elsewhere: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", elsewhere]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert f"below {EXPOSURE / 10} of 10" in (ROOT / "docs" / "deployment.md").read_text()


@needs_systemd
def test_the_filter_allows_placing_memory_and_threads() -> None:
    def calls(group: str) -> set[str]:
        text = subprocess.check_output(["systemd-analyze", "syscall-filter", "--no-pager", group], text=True)
        names = {line.strip() for line in text.splitlines()[1:] if line.strip() and not line.strip().startswith("#")}
        inner = {name for name in names if name.startswith("@")}
        return (names - inner).union(*map(calls, inner))

    assert set(NEEDED_CALLS) <= calls(settings()["SystemCallFilter"])
