from __future__ import annotations

import errno
from pathlib import Path

import pytest
from pydantic import BaseModel, field_validator
from vllm.config import ModelConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.refusal import Refusal, sentence


class _Config(BaseModel):
    size: int

    @field_validator("size")
    @classmethod
    def refuse(cls, size: int) -> int:
        if size > 1:
            raise Refusal(f"size {size} is too big; pass 1.")
        return size


def test_a_refusal_is_shown_as_its_sentence() -> None:
    assert sentence(Refusal("x is bad; use y.")) == "fastattention: x is bad; use y."


def test_a_refusal_inside_pydantic_is_found() -> None:
    with pytest.raises(ValueError, match="size 2") as caught:
        _Config(size=2)
    assert sentence(caught.value) == "fastattention: size 2 is too big; pass 1."


def test_a_refusal_that_caused_another_error_is_found() -> None:
    error = RuntimeError("engine failed")
    error.__cause__ = Refusal("the cause.")
    assert sentence(error) == "fastattention: the cause."


def test_vllms_own_validation_error_keeps_its_message_without_the_frame() -> None:
    with pytest.raises(ValueError, match="size") as caught:
        _Config(size="many")  # type: ignore[arg-type]
    shown = sentence(caught.value)
    assert shown is not None
    assert shown.startswith("vllm: ")
    assert "\n" not in shown


def test_an_earlier_refusal_does_not_hide_a_bug() -> None:
    error = KeyError("bug")
    error.__context__ = ValueError("handled before")
    assert sentence(error) is None


def test_a_message_that_lists_everything_is_cut_short() -> None:
    shown = sentence(ValueError("architecture X is not supported; supported: " + ", ".join(map(str, range(999)))))
    assert shown is not None
    assert "architecture X" in shown
    assert len(shown) < 400
    assert "VLLM_LOGGING_LEVEL=DEBUG" in shown


def test_a_list_of_backends_keeps_our_name() -> None:
    """vLLM's own message, whose list of some thirty names ends with this package's."""
    compat.ensure_backend_member()
    with pytest.raises(ValueError, match="FASTATTENTION") as caught:
        AttentionBackendEnum["FASTATENTION"]
    shown = sentence(caught.value)
    assert shown is not None
    assert shown.startswith("vllm: Unknown attention backend: 'FASTATENTION'. Valid options are: ")
    assert " FASTATTENTION" in shown
    assert len(shown) < 400


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["model-Q4.gguf"], "has model-Q4.gguf and no config.json; a folder of GGUF files is not read; pass a folder"),
        (["model.safetensors"], "has no config.json; pass a folder with config.json and safetensors files."),
    ],
)
def test_a_folder_without_config_json_names_it(files: list[str], said: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="local directory specified") as caught:
        ModelConfig(model=str(tmp_path))
    shown = sentence(caught.value)
    assert shown is not None
    assert shown.startswith(f"fastattention: {tmp_path} {said}")


def test_a_taken_port_names_the_flag() -> None:
    shown = sentence(OSError(errno.EADDRINUSE, "Address already in use"))
    assert shown is not None
    assert "--port" in shown


def test_a_programming_error_keeps_its_traceback() -> None:
    assert sentence(TypeError("bug")) is None
