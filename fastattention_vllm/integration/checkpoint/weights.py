"""The weights of a local model are complete. Otherwise a worker would fail after half a minute, with a traceback, or
answer with what memory held in place of a missing tensor.

Only the headers of the files are read, so this takes milliseconds for a model of any size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastattention_vllm.integration.checkpoint.tensor_names import missing_tensor
from fastattention_vllm.integration.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INDEX = "model.safetensors.index.json"
MISTRAL_INDEX = "consolidated.safetensors.index.json"
MISTRAL = "consolidated"
"""How the names of Mistral's own format begin. Where there are such files, vLLM may read only these."""
NUMBERED = re.compile(r"(?P<begin>.*-)(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.safetensors")
LONGEST_HEAD = 100 << 20
"""Bytes. The limit of the safetensors library."""
FIX = "download or copy the model again"
LFS = b"version https://git-lfs"
"""How a file begins that stands for one which git has not fetched."""
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Files of weights that vLLM reads from a folder."""


def check_weights(vllm_config: VllmConfig) -> None:
    """Check the safetensors files of a model folder on this machine. Other models and formats are left to vLLM.

    Raises:
        Refusal: a file or a tensor is missing, a file is cut off, not fetched by git, or not a safetensors file, or all
            are GGUF files.
    """
    if vllm_config.model_config is not None:
        check_folder(Path(vllm_config.model_config.model), vllm_config)


def check_folder(folder: Path, vllm_config: VllmConfig) -> None:
    """:func:`check_weights` for another folder with weights of the same model."""
    if vllm_config.load_config.load_format not in ("auto", "safetensors") or not folder.is_dir():
        return
    # As vLLM, which ignores hidden files. A folder without these files may hold weights in another format.
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")]
    _check_not_gguf(folder)
    mistral = [path for path in files if path.name.startswith(MISTRAL)]
    files = mistral or files
    index = folder / (MISTRAL_INDEX if mistral else INDEX)
    indexed = _indexed(index) if files and index.is_file() else {}
    for name in sorted(set(indexed.values())):
        if not (folder / name).is_file():
            raise Refusal(f"{index} names {name}, which is not in this folder; {FIX}.")
    if indexed:  # vLLM reads no other file
        files = [path for path in files if path.name in indexed.values()]
    else:
        _check_numbers(files)
    tensors = {path.name: _tensors_of(path) for path in files}
    for tensor, name in indexed.items():
        if tensor not in tensors.get(name, ()):
            raise Refusal(f"{index} says that {name} has the tensor {tensor}, which it lacks; {FIX}.")
    lacking = missing_tensor(set().union(*tensors.values()), vllm_config.model_config.hf_text_config)
    if lacking:
        raise Refusal(f"the weights in {folder} lack the tensor {lacking}, which other layers or experts have; {FIX}.")


def _check_numbers(files: list[Path]) -> None:
    """Without an index, the names of the files say how many there are."""
    numbers = [found for path in files if (found := NUMBERED.fullmatch(path.name))]
    present = {found[0] for found in numbers}
    if len(present) < len(files):
        return
    for begin, total in {(found["begin"], found["total"]) for found in numbers}:
        for number in range(1, int(total) + 1):
            name = f"{begin}{number:0{len(total)}}-of-{total}.safetensors"
            if name not in present:
                raise Refusal(f"{files[0].parent} has {files[0].name}, but not {name}; {FIX}.")


def _check_not_gguf(folder: Path) -> None:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not any(next(folder.glob(pattern), None) for pattern in OTHER_WEIGHTS):
        raise Refusal(
            f"{folder} has {gguf[0].name} and no safetensors files; a folder of GGUF files is not read; download the "
            "model as safetensors."
        )


def _indexed(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        return {str(tensor): str(name) for tensor, name in json.loads(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{index} is not an index of weights ({error!r}); {FIX}.") from error


def _tensors_of(path: Path) -> list[str]:
    """The names of a file's tensors. The file is the length of its header in 8 bytes, the header
    in JSON, and the tensors.

    Raises:
        Refusal: it is not such a file, or cut off.
    """
    try:
        if not path.is_file():  # to open a FIFO would wait for its other end
            raise OSError("it is not a file")
        with path.open("rb") as file:
            if (first := file.read(len(LFS))) == LFS:
                raise Refusal(
                    f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {path.parent}, or download "
                    "the model again."
                )
            length = int.from_bytes(first[:8], "little")
            file.seek(8)
            if length > LONGEST_HEAD:
                raise ValueError(f"its header would have {length} bytes")
            head = json.loads(file.read(length))
        tensors = {name: int(entry["data_offsets"][1]) for name, entry in head.items() if name != "__metadata__"}
        whole = 8 + length + max(tensors.values(), default=0)
    except Refusal:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refusal(f"{path} is not a complete safetensors file ({error}); {FIX}.") from error
    if (size := path.stat().st_size) != whole:
        raise Refusal(f"{path} has {size} bytes, but its header says {whole}; {FIX}.")
    return list(tensors)
