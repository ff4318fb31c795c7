"""Tiling-AllReduce in vLLM's row-parallel layers."""
