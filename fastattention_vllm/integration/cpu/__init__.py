"""vLLM on CPUs: platform, worker and attention backend."""
