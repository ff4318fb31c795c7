"""``reload_weights`` loads a whole checkpoint into a running engine, or refuses it before anything is changed.

While vLLM loads a checkpoint again, a parameter has no data until its own ``weight_loader`` is called. If a model's
``load_weights`` copies into a parameter past that loader, the copy is lost. If only a part of a parameter arrives, the
rest of it is what was in memory before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fastattention_vllm.integration import compat
from fastattention_vllm.integration.checkpoint.tensor_names import missing_tensor
from fastattention_vllm.integration.checkpoint.weights import check_folder
from fastattention_vllm.integration.refusal import Refusal

LOADED_ONCE = frozenset(
    {
        "bert.BertForMaskedLM",
        "colbert.ColBERTJinaRobertaModel",
        "colbert.ColBERTLfm2Model",
        "colbert.ColBERTModel",
        "colbert.ColBERTModernBertModel",
        "colpali.ColPaliModel",
        "colqwen3.ColQwen3Model",
        "colqwen3_5.ColQwen3_5Model",
        "deepseek_v4.DeepseekV4ForCausalLM",
        "deepseek_v4.DeepseekV4Model",
        "deepseek_v41.DeepseekV41LLMForCausalLM",
        "deepseek_v41.DeepseekV4Model",
        "gpt_oss.GptOssModel",
        "hy_v4.HYV4Model",
        "k2_horizon.K2HorizonModel",
        "longcat_flash_ngram.FlashNgramModel",
        "mimo_v2.MiMoV2Model",
        "nano_nemotron_vl.NemotronH_Nano_VL_V2",
        "nemotron_parse.NemotronParseForConditionalGeneration",
        "nemotron_parse.RadioWithNeck",
        "pixtral.PixtralForConditionalGeneration",
        "qwen4_exp.Qwen4ExpNGramEmbedding",
        "step3_text.Step3TextModel",
        "step3p5.Step3p5Model",
        "voxtral.VoxtralForConditionalGeneration",
    }
)
"""vLLM's classes whose load_weights copies some weights into parameters itself. A test finds them in vLLM's sources."""
FOLDERS = ("vllm.model_executor.models.", "vllm.models.")

Weights = Iterable[tuple[str, Any]]


def check_first(worker: Any) -> None:
    """Let a worker's class check what it loads again. Repeated calls are safe.

    All versions: vLLM has no hook for it. A worker that uses another attention backend loads as it did.
    """
    reload = getattr(worker, "reload_weights", None)
    if reload is None or hasattr(reload, "_fastattention"):
        return

    @functools.wraps(reload)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        if compat.uses_this_backend(self.vllm_config):
            checked(functools.partial(reload, self), self, *args, **kwargs)
        else:
            reload(self, *args, **kwargs)

    reload_weights._fastattention = True  # type: ignore[attr-defined]
    worker.reload_weights = reload_weights


def checked(
    reload: Callable[..., None],
    worker: Any,
    weights_iterator: Weights | None = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
    **kwargs: Any,
) -> None:
    """Check, and reload. A folder is checked before. What an iterator gives is known only when it has been loaded.

    Raises:
        Refusal: the model cannot be loaded again, or the new checkpoint is not complete.
    """
    config = worker.vllm_config
    if is_checkpoint_format:
        check_loaders(worker.model_runner.get_model())
    if weights_iterator is None:
        check_folder(Path(weights_path or config.model_config.model), config)
    names: list[str] = []
    if weights_iterator is not None and is_checkpoint_format:
        weights_iterator = _noting(weights_iterator, names)
    reload(
        weights_iterator=weights_iterator,
        weights_path=weights_path,
        is_checkpoint_format=is_checkpoint_format,
        **kwargs,
    )
    # Those who train may send some layers at a time, so only parts of one parameter belong together.
    lacking = missing_tensor(names, config.model_config.hf_text_config, whole=False)
    if lacking:
        raise Refusal(
            f"the weights that were loaded lack the tensor {lacking}, so the parameter that holds it is damaged and "
            "answers are wrong; load these weights again, with this tensor in the same call."
        )


def check_loaders(model: Any) -> None:
    """
    Raises:
        Refusal: vLLM would load only a part of the weights of this model, or of one inside it.
    """
    if any(_name(kind) in LOADED_ONCE for module in model.modules() for kind in type(module).__mro__):
        raise Refusal(
            f"reload_weights would not replace all weights of {type(model).__name__}; start the server again with the "
            "new checkpoint."
        )


def _name(kind: type[Any]) -> str | None:
    """``folder.Class`` or ``file.Class`` of one of vLLM's models."""
    for folder in FOLDERS:
        if kind.__module__.startswith(folder):
            return f"{kind.__module__.removeprefix(folder).partition('.')[0]}.{kind.__name__}"
    return None


def _noting(weights: Weights, names: list[str]) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        names.append(name)
        yield name, tensor
