"""Quantised checkpoints on NVIDIA GPUs below compute capability 7.5, where vLLM refuses most of them."""
