"""The weights of a local model are complete. Otherwise a worker would fail after half a minute, with a traceback.

Only the heads of the files are read, so this takes milliseconds for a model of any size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INDEX = "model.safetensors.index.json"
MISTRAL = "consolidated"
"""How the names of Mistral's own format begin. Where there are such files, vLLM may read only these."""
LONGEST_HEAD = 100 << 20
"""Bytes. The limit of the safetensors library."""
FIX = "download or copy the model again"


def check_weights(vllm_config: VllmConfig) -> None:
    """Check the safetensors files of a model folder on this machine. Other models and formats are left to vLLM.

    Raises:
        Refusal: a file is missing, cut off, or not a safetensors file.
    """
    if vllm_config.model_config is None:
        return
    folder = Path(vllm_config.model_config.model)
    if vllm_config.load_config.load_format not in ("auto", "safetensors") or not folder.is_dir():
        return
    # As vLLM, which ignores hidden files. A folder without these files may hold weights in another format.
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")]
    mistral = [path for path in files if path.name.startswith(MISTRAL)]
    index = folder / INDEX
    if files and not mistral and index.is_file():
        for name in _files_of(index):
            if not (folder / name).is_file():
                raise Refusal(f"{index} names {name}, which is not in this folder; {FIX}.")
    for path in mistral or files:
        _check(path)


def _files_of(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{index} is not an index of weights ({error!r}); {FIX}.") from error


def _check(path: Path) -> None:
    """A safetensors file is the length of its head in 8 bytes, the head in JSON, and the tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEAD:
                raise ValueError(f"its head would have {length} bytes")
            head = json.loads(file.read(length))
        tensors = [entry for name, entry in head.items() if name != "__metadata__"]
        whole = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refusal(f"{path} is not a complete safetensors file ({error}); {FIX}.") from error
    if (size := path.stat().st_size) != whole:
        raise Refusal(f"{path} has {size} bytes, but its head says {whole}; {FIX}.")
