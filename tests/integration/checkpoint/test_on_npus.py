"""vllm-ascend's platform checks a model's folder when it makes its configuration. An empty class plays it here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.ascend.platform import check_model
from fastattention_vllm.integration.refusal import Refusal


def config(model: Path, use_mla: bool = False, length: int | None = None) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=SimpleNamespace(name=compat.BACKEND_NAME)),
        model_config=SimpleNamespace(
            model=str(model),
            use_mla=use_mla,
            hf_text_config=SimpleNamespace(max_position_embeddings=100),
            max_model_len=200,
            original_max_model_len=length,
        ),
        cache_config=SimpleNamespace(mamba_block_size=None),
        load_config=SimpleNamespace(load_format="auto"),
    )


def test_a_folder_is_checked_before_any_process_starts(tmp_path: Path) -> None:
    called: list[Any] = []

    class Base:
        @classmethod
        def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
            called.append(cls)

    class Platform(Base):
        pass

    check_model(Platform)
    check_model(Platform)
    apply = Platform.apply_config_platform_defaults
    apply(asked := config(tmp_path))
    assert asked.model_config.max_model_len == 100
    with pytest.raises(Refusal, match="--max-model-len 200 is longer than the 100 positions"):
        apply(config(tmp_path, length=200))
    apply(config(tmp_path, length=200, use_mla=True))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(Refusal, match="is not a complete safetensors file"):
        apply(asked)
    asked.attention_config.backend = None
    apply(asked)
    assert called == [Platform] * 5
    assert "_fastattention" not in vars(Base.apply_config_platform_defaults.__func__)
