"""Attention on the Ascend 910B: this package's own kernels in Triton. Not yet run on hardware."""
