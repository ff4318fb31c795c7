"""Tensor parallelism: the all-reduce of a row-parallel linear layer hidden behind its matmul. No vLLM import."""
