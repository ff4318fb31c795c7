"""What attention computes: one problem description and the kernel families that solve it (``kernels.py``)."""
