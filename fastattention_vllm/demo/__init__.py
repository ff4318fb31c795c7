"""A small Llama-architecture model that is built to look values up in its context, and text to test it with.

    from fastattention_vllm.demo import DemoModelSpec, build_demo_model, make_haystack

    build_demo_model("demo-model", DemoModelSpec())
    prompt = make_haystack(4096, {"alpha": 7319}, depths=[0.5], ask="alpha").text

`fastattention_vllm.demo.model` explains how the model works.
"""

from fastattention_vllm.demo.haystack import Haystack, make_haystack
from fastattention_vllm.demo.model import build_demo_model
from fastattention_vllm.demo.spec import DemoModelSpec
from fastattention_vllm.demo.tokenizer import build_tokenizer

__all__ = ["DemoModelSpec", "Haystack", "build_demo_model", "build_tokenizer", "make_haystack"]
