"""Layers whose KV cache lies in host memory."""
