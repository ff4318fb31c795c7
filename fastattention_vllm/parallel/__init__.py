"""Tensor parallelism: overlaps the all-reduce of a row-parallel linear layer with its matmul. No vLLM import."""
