"""vLLM-Ascend on NPUs."""
