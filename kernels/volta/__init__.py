"""Attention kernels for NVIDIA V100 (sm_70): compiled by NVRTC, run on a simulated V100 where there is none."""
