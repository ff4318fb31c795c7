"""Is the needle found at every depth of a full-length prompt? The demo model in transformers, every token computed.

    python benchmarks/needle.py --tokens 65536 --device cpu            # attention by fast_attn_func
    python benchmarks/needle.py --tokens 262144 524288 --device cuda   # attention by torch SDPA: checks the model alone

Run by: contributors who change the demo model or `fast_attn_func`.
Needs: transformers, which vLLM brings. With `--device cuda` an NVIDIA GPU.

One prompt holds five needles. It is prefilled once, followed by one question per needle. The exit status is 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from fastattention_vllm import fast_attn_func
from fastattention_vllm.bench import machine
from fastattention_vllm.bench.report import Row, compared, report
from fastattention_vllm.demo.haystack import make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import token_id

NEEDLES = {"alpha": "7319", "beta": "2046", "gamma": "90", "delta": "5", "omega": "318"}
DEPTHS = [0.0, 0.1, 0.5, 0.9, 1.0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    attention = "fastattention" if options.device == "cpu" else "sdpa"
    register_fastattention()
    with tempfile.TemporaryDirectory() as folder:
        path = build_demo_model(Path(folder) / "demo", DemoModelSpec(dtype=options.dtype))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, options.dtype), attn_implementation=attention
        ).to(options.device)
    rows = [find_needles(model, tokens, attention) for tokens in options.tokens]
    if options.json:
        hardware = machine.hardware(torch.get_num_threads())
        if options.device == "cuda":
            hardware = torch.cuda.get_device_name()
        versions = machine.versions() | {"transformers": transformers.__version__}
        report(rows, hardware, versions).write(options.json)
    return 0 if all(row.ours == row.limit for row in rows) else 1


def register_fastattention() -> None:
    """Let transformers compute attention with ``fast_attn_func``, which builds its mask itself."""

    def forward(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **rest: Any) -> tuple[Any, None]:
        q, k, v = (states.transpose(1, 2) for states in (q, k, v))
        return fast_attn_func(q, k, v, softmax_scale=scaling, causal=True), None

    transformers.AttentionInterface.register("fastattention", forward)
    transformers.AttentionMaskInterface.register("fastattention", lambda *args, **kwargs: None)


@torch.no_grad()
def find_needles(model: Any, tokens: int, attention: str) -> Row:
    haystack = make_haystack(tokens, NEEDLES, depths=DEPTHS, seed=11)
    started = time.perf_counter()
    cache = transformers.DynamicCache()
    text = torch.tensor([haystack.token_ids], device=model.device)
    model(text, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = []
    for name, value in NEEDLES.items():
        question = torch.tensor([[token_id(f" {name}"), token_id("=")]], device=model.device)
        logits = model(question, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        cache.crop(-question.shape[1])
        found.append(int(logits[0, -1].argmax()) == token_id(value))
    seconds = time.perf_counter() - started
    print(f"{tokens:>7} tokens, {attention}: {sum(found)} of {len(found)} needles found, {seconds:.1f} s", flush=True)
    return compared(
        f"needle {tokens} tokens {model.dtype} {attention}".replace("torch.", ""),
        "prefill needles found",
        f"of {len(found)}",
        sum(found),
        better="higher",
        limit=len(found),
        seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
