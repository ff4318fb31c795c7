"""Host layers without vLLM: which layers they are, the memory of their KV cache, and how a step uses it."""
