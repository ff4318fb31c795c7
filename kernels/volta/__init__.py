"""Attention kernels for NVIDIA V100 (sm_70) and Turing (sm_75), compiled by NVRTC and tested on a simulated V100."""
