"""A vLLM engine on the dummy device in a separate process. Takes model folder and prompts; prints tokens as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import vllm.platforms

    from fastattention_vllm.attention import kernels
    from fastattention_vllm.integration import compat
    from tests.recipes.device import overlay

    overlay.add_files()
    kernels.FAMILIES, compat.BACKENDS = overlay.families(), overlay.backends()
    vllm.platforms.builtin_platform_plugins["dummy"] = lambda: "tests.recipes.device.vllm_platform.DummyPlatform"

    from tests.integration.engine import engine, generate

    asked = json.load(sys.stdin)
    with engine(Path(asked["model"])) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        backends = {f"{layer.attn_backend.__module__}.{layer.attn_backend.__name__}" for layer in layers}
        completions = [output.outputs[0] for output in generate(llm, asked["prompts"])]
        logprobs = [
            [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in completions
        ]
        tokens = [list(one.token_ids) for one in completions]
    print(json.dumps({"backends": sorted(backends), "tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
