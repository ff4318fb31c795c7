"""Attention on CPUs: the C++ kernels, called through their C ABI."""
