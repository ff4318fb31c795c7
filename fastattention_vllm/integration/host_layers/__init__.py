"""Host layers: layers whose KV cache is in host memory."""
