"""The tiling-AllReduce in vLLM's row-parallel layers."""
