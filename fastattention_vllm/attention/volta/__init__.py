"""Attention on V100 and Turing: this package's CUDA kernels, launched through the driver API."""
