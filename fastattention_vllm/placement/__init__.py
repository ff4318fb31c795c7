"""Which layers' KV cache lies in host memory, where exactly, and how one step works with it. No vLLM import."""
