"""vLLM on NVIDIA GPUs: the choice of the attention backend, and the backends."""
