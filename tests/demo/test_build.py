"""Building a model directory."""

from pathlib import Path

import pytest

from fastattention_vllm.demo import DemoModelSpec, build_demo_model
from fastattention_vllm.demo.__main__ import main

SMALL = DemoModelSpec(num_layers=2, num_heads=2, num_kv_heads=1)


def test_same_spec_same_bytes(tmp_path: Path) -> None:
    first, second = (build_demo_model(tmp_path / name, SMALL) for name in ("a", "b"))
    names = sorted(path.name for path in first.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in second.iterdir()) == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("fastattention_vllm.demo.model.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        build_demo_model(tmp_path / "model", SMALL)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        build_demo_model(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_fills_an_empty_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    build_demo_model(target, SMALL)
    assert (target / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 1}, "num_layers is 1"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 64}, "num_heads is 64"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_size": 32}, "head_size is 32"),
        ({"head_size": 72}, "head_size is 72"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ],
)
def test_spec_refuses(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message) as error:
        DemoModelSpec(**options)
    assert str(error.value).endswith(".")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model"
    assert main([str(target), "--layers", "2", "--heads", "2", "--kv-heads", "1"]) == 0
    assert "2 layers, 2 query heads and 1 KV heads of size 64" in capsys.readouterr().out
    assert main([str(target)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    assert main([str(tmp_path / "other"), "--heads", "3"]) == 2
    assert "num_kv_heads is 2" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
