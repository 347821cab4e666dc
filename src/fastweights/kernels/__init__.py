"""Triton kernels for GPUs, each with a plain reference that it is tested against."""
