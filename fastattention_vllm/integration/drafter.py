"""The drafter of speculative decoding: which ones run on CPUs, its backend, and the memory that it adds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from fastattention_vllm.integration import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.fastattention")

WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter has attention layers, and computes one token per pass."""
SPECULATION = ("ngram", *WITH_LAYERS)
READING_TEXT = ("draft_model", "eagle")
"""Methods whose drafter does not take the embeddings of an image, and fails at the first request."""
MTP_MODELS = ("qwen3_next_mtp", "qwen3_5_mtp")
"""Model types of MTP layers that were tested on CPUs."""
WITH_STATES = ("ngram", "mtp")
"""Methods that were tested with models that have linear-attention layers."""
UNTESTED_WAYS = {
    "parallel_drafting": False,
    "use_heterogeneous_vocab": False,
    "disable_padded_drafter_batch": False,
    "use_local_argmax_reduction": False,
    "num_speculative_tokens_per_batch_size": None,
    "draft_sample_method": "greedy",
    "quantization": None,
    "kv_cache_dtype": None,
}
"""Entries of --speculative-config, and the values that were tested on CPUs."""
MTP_WEIGHTS = "mtp."
"""How the names of an MTP layer's weights begin in the model's checkpoint."""


def model_of(vllm_config: VllmConfig) -> Any:
    """vLLM's configuration of the drafter's model, or None without a drafter that has attention layers."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method not in WITH_LAYERS:
        return None
    return speculative.draft_model_config


def finds_drafts(vllm_config: VllmConfig) -> bool:
    """Whether drafts are n-grams that a request repeats, of which there may be none in a step."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method == "ngram"


def drafts_per_request(vllm_config: VllmConfig) -> int:
    """Drafts of one request in a step, at most."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return int(speculative.num_speculative_tokens or 0) if speculative else 0


def is_of_draft_model(vllm_config: VllmConfig) -> bool:
    """Whether this is the configuration that a worker makes for the draft model, from the engine's."""
    return vllm_config.model_config is not None and vllm_config.model_config is model_of(vllm_config)


def seen_alone(vllm_config: VllmConfig) -> VllmConfig | None:
    """The configuration as if a draft model were the model itself, or None without a draft model."""
    speculative: Any = vllm_config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        return None
    alone = copy.copy(vllm_config)
    alone.model_config, alone.speculative_config = speculative.draft_model_config, None
    return alone


def untested_way(vllm_config: VllmConfig) -> object:
    """What --speculative-config asks of a drafter that was not tested on CPUs."""
    speculative: Any = vllm_config.speculative_config
    if model_of(vllm_config) is None:
        return False
    for name, tested in UNTESTED_WAYS.items():
        value = getattr(speculative, name, tested)
        if value != tested:
            return f"{name}: {json.dumps(value, default=str)}"
    backend = getattr(speculative, "attention_backend", None)
    return backend is not None and backend.name != compat.BACKEND_NAME and f"attention_backend: {backend.name}"


def untested_layers(vllm_config: VllmConfig) -> object:
    """What the drafter's layers do that was not tested on CPUs."""
    draft = model_of(vllm_config)
    if draft is None:
        return False
    if vllm_config.speculative_config.method == "mtp":
        kind = draft.hf_config.model_type
        return kind not in MTP_MODELS and f"MTP of {kind}"
    if draft.is_hybrid or draft.is_multimodal_model:
        return draft.hf_text_config.model_type
    if has_windows(draft):
        return f"sliding windows in {draft.model}"
    model: Any = vllm_config.model_config
    kind = "linear attention" if model.is_hybrid else has_windows(model) and "sliding windows"
    return bool(kind) and not has_equal_layers(vllm_config) and f"KV heads of another size beside {kind}"


def has_windows(model: Any) -> bool:
    """Whether config.json names sliding windows: one for all windowed layers, or one for each layer."""
    lists = ("interleaved_sliding_window", "sliding_windows")
    return bool(model.get_sliding_window()) or any(getattr(model.hf_text_config, name, None) for name in lists)


def has_equal_layers(vllm_config: VllmConfig) -> bool:
    """Whether a block of the drafter's layers is as large as one of the model's."""
    return len({_kv_elements(vllm_config, model) for model in (vllm_config.model_config, model_of(vllm_config))}) == 1


def num_layers(vllm_config: VllmConfig) -> int:
    """The drafter's attention layers."""
    draft = model_of(vllm_config)
    if draft is None:
        return 0
    if vllm_config.speculative_config.method == "mtp":  # without the entry, as in Qwen3-Next, vLLM makes one layer
        return int(getattr(draft.hf_config, "n_predict", None) or 1)
    return int(draft.get_num_layers(vllm_config.parallel_config))


def bytes_per_token(vllm_config: VllmConfig, itemsize: int) -> int:
    """Bytes that all layers of the drafter keep of a token, on one rank."""
    draft = model_of(vllm_config)
    return 0 if draft is None else num_layers(vllm_config) * 2 * _kv_elements(vllm_config, draft) * itemsize


def _kv_elements(vllm_config: VllmConfig, model: Any) -> int:
    return int(model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size())


def use_this_backend(vllm_config: VllmConfig) -> None:
    """Give the drafter this package's backend, unless the user has named one.

    >= 0.23: vLLM does not give the drafter the model's backend, but chooses one. (0.19 gives it the model's.)
    """
    if model_of(vllm_config) is None:
        return
    speculative: Any = vllm_config.speculative_config
    if getattr(speculative, "parallel_drafting", False):
        return
    say_what_is_not_drafted(vllm_config)
    if getattr(speculative, "attention_backend", True) is None:
        speculative.attention_backend = compat.ensure_backend_member()
        logger.info_once(
            "The drafter uses the backend %s, as the model does; attention_backend in --speculative-config names "
            "another one.",
            compat.BACKEND_NAME,
        )


def longest_drafted(vllm_config: VllmConfig) -> int | None:
    """Tokens of the longest request that gets drafts, or None if all requests do.

    0.19 to 0.33: vLLM's runner drafts nothing in a step whose longest request, with its drafts, is longer than the
    drafter reads (``GPUModelRunner._input_fits_in_drafter``).
    """
    draft = model_of(vllm_config)
    if draft is None or draft.max_model_len is None:
        return None
    limit = int(draft.max_model_len)
    return limit - drafts_per_request(vllm_config) if limit < vllm_config.model_config.max_model_len else None


def say_what_is_not_drafted(vllm_config: VllmConfig) -> None:
    """Log a drafter that reads less than the model. vLLM says nothing of it."""
    longest = longest_drafted(vllm_config)
    if longest is not None:
        logger.warning_once(
            "The drafter reads at most %d tokens, and --max-model-len is %d: while a request has more than %d tokens, "
            "no request in the same step gets drafts.",
            model_of(vllm_config).max_model_len,
            vllm_config.model_config.max_model_len,
            longest,
        )


def weight_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the drafter's weights on one rank, from its files; 0 with a warning if they are not on this machine.

    What the drafter shares with the model, such as the embedding, is not in its files, or counts twice.
    """
    draft = model_of(vllm_config)
    if draft is None:
        return 0
    own = vllm_config.speculative_config.method != "mtp"
    folder = _folder(draft.model, getattr(draft, "revision", None))
    sizes = [] if folder is None else [_tensor_bytes(file) for file in sorted(folder.glob("*.safetensors"))]
    total = sum(
        size
        for tensors in sizes
        for name, size in tensors.items()
        if own or name.startswith(MTP_WEIGHTS) or f".{MTP_WEIGHTS}" in name
    )
    if not total:
        logger.warning_once(
            "The size of the drafter's weights is not known before they are loaded: %s is not on this machine as "
            "safetensors. If memory is short, set host_kv_layers to a number.",
            draft.model,
        )
    return total // int(vllm_config.parallel_config.tensor_parallel_size)


def _folder(model: str, revision: str | None) -> Path | None:
    """The folder of a model on this machine: as named, or downloaded from the Hugging Face hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None


def _tensor_bytes(file: Path) -> dict[str, int]:
    """The size of each tensor in a safetensors file, from its head."""
    with file.open("rb") as opened:
        head = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in head.items()
        if name != "__metadata__"
    }
