"""Attention on V100 and Turing: our CUDA kernels, launched through the driver API."""
