"""vLLM on NVIDIA GPUs: which attention backend runs on which, and these backends."""
