"""scripts/wheel.py without building: its requirements, and what it reads from a wheel's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import wheel


@pytest.mark.parametrize(
    ("name", "glibc"),
    [
        ("fastattention_vllm-0.1.0-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", (2, 27)),
        ("fastattention_vllm-0.1.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", (2, 17)),
        ("fastattention_vllm-0.1.0-py3-none-manylinux_2_34_aarch64.whl", (2, 34)),
    ],
)
def test_the_oldest_glibc_is_read_from_the_name(name: str, glibc: tuple[int, int]) -> None:
    assert wheel.oldest_glibc(name) == glibc


def test_a_wheel_for_this_machine_only_is_refused() -> None:
    with pytest.raises(wheel.WheelError, match=r"linux_x86_64\.whl names no manylinux platform"):
        wheel.oldest_glibc("fastattention_vllm-0.1.0-py3-none-linux_x86_64.whl")


def test_a_wheel_that_needs_a_newer_glibc_is_removed_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged = tmp_path / "fastattention_vllm-0.1.0-py3-none-manylinux_2_34_x86_64.whl"
    tagged.touch()
    monkeypatch.setattr(wheel, "run", lambda *_, **__: f"Fixed-up wheel written to {tagged}\n")
    with pytest.raises(wheel.WheelError, match=r"needs glibc 2\.34, and the wheel may ask for 2\.28 at most"):
        wheel.tag(tmp_path / "any.whl")
    assert not tagged.exists()


def test_missing_images_are_named_with_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    monkeypatch.setattr(wheel, "MANIFEST", tmp_path / "lib" / "manifest.json")
    monkeypatch.setattr("sys.argv", ["wheel.py"])
    assert wheel.main() == 1
    assert capsys.readouterr().err == (
        "fastattention wheel: there are no V100 images (lib/manifest.json); run `make volta` first.\n"
    )


def test_a_failing_command_is_named_with_its_output() -> None:
    with pytest.raises(wheel.WheelError, match=r"`false` failed \(status 1\)"):
        wheel.run("false")
