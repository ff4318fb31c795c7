"""Models, machines and requests of every size, for property tests."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from fastattention_vllm.plan.hardware import Machine, machine, tables
from fastattention_vllm.plan.memory import Request
from fastattention_vllm.plan.model import ModelShape, shape_of


@st.composite
def shapes(draw: st.DrawFn, windows: bool = True) -> ModelShape:
    layers = draw(st.integers(1, 48))
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    window = draw(st.sampled_from([0, 512, 4096])) if windows else 0
    kinds = draw(st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=layers, max_size=layers))
    return shape_of(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": 1024 * draw(st.integers(1, 8)),
            "intermediate_size": 1024 * draw(st.integers(1, 24)),
            "num_attention_heads": kv_heads * draw(st.sampled_from([1, 4, 8])),
            "num_key_value_heads": kv_heads,
            "head_dim": draw(st.sampled_from([64, 128, 256])),
            "vocab_size": 32000,
            "max_position_embeddings": 1 << 20,
            "sliding_window": window,
            "layer_types": kinds,
        },
        "drawn",
    )


@st.composite
def machines(draw: st.DrawFn, shape: ModelShape) -> Machine:
    name = draw(st.sampled_from(sorted(tables().devices)))
    device = tables().devices[name]
    possible = [n for n in (1, 2, 4, 8) if n <= tables().hosts[device.host].devices and divides(shape, n)]
    found = machine(name, draw(st.sampled_from(possible)))
    memory = draw(st.sampled_from([1.0, 0.5, 0.25]))
    return dataclasses.replace(found, host=found.host.model_copy(update={"memory_gib": memory * found.host.memory_gib}))


def divides(shape: ModelShape, ranks: int) -> bool:
    kv_heads = shape.num_kv_heads
    return shape.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


REQUESTS = st.builds(
    Request,
    context=st.integers(1, 1 << 20),
    requests=st.integers(1, 8),
    batched_tokens=st.sampled_from([2048, 8192]),
    utilization=st.floats(0.5, 1.0),
)
