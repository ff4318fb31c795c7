"""Products with quantised weights on V100: this package's CUDA kernels, launched through the driver API."""
